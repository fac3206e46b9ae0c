#!/usr/bin/env python3
"""Both suites of `cpattn bench`, as a user starts them, on sizes that take no time.

Usage: bench_json.py CPATTN. Checks what was written, never how fast it was.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

REQUIRED = (
    "name", "dtype", "head_dim", "seq_len", "mask", "threads",
    "gflops", "peak_gflops", "fraction_of_peak", "ratio_to_peer",
)  # fmt: skip
RING = (
    "ranks", "schedule", "seconds", "tokens_per_second", "exposed_seconds", "transfer_seconds",
    "bytes_sent", "peak_rss_bytes", "ratio_to_baseline", "cost_over_arrival",
)  # fmt: skip


def records_of(cpattn, suite, *flags):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "bench.json"
        command = [cpattn, "bench", "--suite", suite, "--json", str(path), *flags]
        run = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if run.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with {run.returncode}\n{run.stdout}{run.stderr}")
        document = json.loads(path.read_text())
    if document["suite"] != suite or not document["records"]:
        sys.exit(f"{suite}: no records of this suite: {document}")
    return document["records"]


def require_keys(record, keys):
    missing = [key for key in keys if key not in record]
    if missing:
        sys.exit(f"{record['name']}: lacks {missing}")


def require_passes(suite, records, wanted):
    measured = {record["pass"] for record in records}
    if measured != wanted:
        sys.exit(f"{suite}: measured {sorted(measured)}, wanted {sorted(wanted)}")


def main(cpattn):
    small = ("--heads", "2", "--kv-heads", "1", "--head-dims", "32", "--repetitions", "1")
    kernels = records_of(cpattn, "kernels", "--seq-lens", "64", "--dtypes", "f32", *small)
    require_passes("kernels", kernels, {"forward", "backward"})
    for record in kernels:
        require_keys(record, REQUIRED + ("pass",))
        if not 0 < record["fraction_of_peak"] < 1.2:
            sys.exit(f"{record['name']}: fraction_of_peak {record['fraction_of_peak']}")
    ring = records_of(cpattn, "ring", "--seq-lens", "1500", *small)
    require_passes("ring", ring, {"forward", "backward", "both"})
    for record in ring:
        require_keys(record, REQUIRED + RING + ("pass",))
        if record["seconds"] <= 0:
            sys.exit(f"{record['name']}: {record['seconds']} seconds")
        if record["ranks"] > 1 and record["ratio_to_baseline"] is None:
            sys.exit(f"{record['name']}: not compared with one rank")
        if record["schedule"] == "canonical" and record["cost_over_arrival"] is None:
            sys.exit(f"{record['name']}: not compared with arrival")
    if len({record["ranks"] for record in ring}) < 2:
        sys.exit("ring: only one number of ranks was measured")


if __name__ == "__main__":
    main(sys.argv[1])
