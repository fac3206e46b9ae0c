#!/usr/bin/env python3
"""cpattn parity and bench with --cuda-backend: on doubles of CUDA and NCCL that execute kernels on
the CPU. Says nothing of a GPU, and never looks at how fast anything was.

Usage: gpu_cli_test.py CPATTN DOUBLES
"""

import json
import os
import sys
import time
import unittest

DOUBLES = os.path.abspath(sys.argv.pop(2))

from parity_process import MPIRUN, PROGRAM, ReportCase, execute, parity  # noqa: E402

TINY = "--seq-len=150 --chunk-tokens=64 --heads=2 --kv-heads=1 --head-dim=16 --timeout=30".split()
BENCH = [
    *"bench --suite=gpu --seq-lens=96 --heads=2 --kv-heads=1 --head-dims=32".split(),
    *f"--masks=causal --repetitions=2 --cuda-backend={DOUBLES}".split(),
]
SCRIPT = os.path.join(os.path.dirname(__file__), "../../launch/check_gpu.sh")
TESTS = os.path.dirname(DOUBLES)
NO_BACKEND = "--cuda-backend=/nowhere/backend.so"


class ParityTest(ReportCase):
    def lanes(self, *arguments, transport):
        result = self.parity(*TINY, *arguments, f"--cuda-backend={DOUBLES}")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        lanes = self.report()["lanes"]
        for lane in lanes:
            self.assertTrue(lane["pass"], lane)
            self.assertEqual(lane["transport"], transport)
            self.assertTrue(lane["isa"].startswith("doubles of cuda/"), lane["isa"])
        return lanes

    def test_every_size_and_type_gives_the_bits_of_one_rank(self):
        lanes = self.lanes(
            "--device=cuda", "--cp=1,2,3", "--dtype=f32,bf16", "--direction=forward",
            transport="nccl",
        )  # fmt: skip
        self.assertEqual([lane["cp"] for lane in lanes], [1, 1, 2, 2, 3, 3])
        lanes = self.lanes(
            "--device=cuda", "--cp=2,4", "--dtype=bf16", "--exchange=host", transport="mpi, staged"
        )
        self.assertEqual([lane["cp"] for lane in lanes], [1, 2, 4])
        names = {tensor["name"] for lane in lanes for tensor in lane["tensors"]}
        self.assertEqual(names, {"out", "lse", "dq", "dk", "dv"})
        for lane in lanes:
            self.assertEqual(lane["bit_mismatch"], 0)

    def test_f32_has_the_bits_of_the_cpu(self):
        for exchange, transport in (("nccl", "nccl"), ("host", "mpi, staged")):
            for lane in self.lanes(
                "--device=cpu-vs-cuda", "--cp=2", f"--exchange={exchange}", "--direction=forward",
                transport=transport,
            ):  # fmt: skip
                self.assertEqual(lane["bit_mismatch"], 0)

    def on_machine(self, machine, *arguments):
        return self.parity(
            *TINY, "--device=cuda", "--dtype=bf16", "--direction=forward", *arguments,
            f"--cuda-backend={DOUBLES}", CPATTN_FAKE_MACHINE=machine,
        )  # fmt: skip

    def test_BC093_two_ranks_on_one_gpu(self):
        started = time.monotonic()
        result = self.on_machine("num_devices=1", "--cp=2", "--exchange=nccl")
        self.assertLess(time.monotonic() - started, 10.0)
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertIn("ranks 0 and 1 have the same GPU, cuda:0 ", result.stdout + result.stderr)
        self.assertIn("exchange host lets ranks share one", result.stdout + result.stderr)
        # One rank, and two that let the host carry, work on it.
        result = self.on_machine("num_devices=1", "--cp=1,2")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        transports = {lane["cp"]: lane["transport"] for lane in self.report()["lanes"]}
        self.assertEqual(transports[2], "mpi, staged")
        # Two GPUs and nothing in the environment that says which is whose: one for each.
        result = self.on_machine("num_devices=2", "--cp=2", "--exchange=nccl")
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_without_a_backend_nothing_is_run(self):
        for device in ("cuda", "cpu-vs-cuda"):
            result = parity(*TINY, f"--device={device}", "--cp=1,2", NO_BACKEND)
            self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
            self.assertIn("/nowhere/backend.so", result.stdout + result.stderr)


class PlanTest(unittest.TestCase):
    def plan(self, *arguments, code=0):
        result = execute([PROGRAM, "plan", *TINY, "--device=cuda", *arguments])
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result

    def plans(self, *arguments):
        result = self.plan(f"--cuda-backend={DOUBLES}", "--json", *arguments)
        return json.loads(result.stdout)["plans"]

    def test_it_is_of_the_gpu_found_or_of_the_one_asked_for(self):
        found, = self.plans("--cp=2", "--dtype=bf16")
        self.assertIn("cuda:0", found["gpu"]["origin"])
        blocks = 2 * found["gpu"]["multiprocessors"]
        self.assertEqual(found["thread_blocks"], blocks)
        self.assertEqual(found["gpu"]["exchange"], "nccl")
        hopper, = self.plans("--cp=2", "--dtype=bf16", "--gpu-arch=sm_90")
        self.assertEqual(hopper["kernels"], "doubles of cuda/sm90")
        self.assertEqual((hopper["gpu"]["multiprocessors"], hopper["thread_blocks"]), (132, 264))
        portable, = self.plans("--cp=2", "--dtype=bf16", "--gpu-arch=sm_86", "--multiprocessors=84")
        self.assertEqual(portable["kernels"], "doubles of cuda/sm80")
        self.assertEqual(portable["gpu"]["architecture"], "sm_86")
        for plan in (hopper, portable):
            results = [launch["result"] for launch in plan["gpu"]["launches"]]
            self.assertEqual(results, ["out", "dk, dv", "dq"])
            for rank in plan["ranks"]:
                parts = {key: rank["memory"][key] for key in
                         ("ring_slots", "carried", "workspace", "images", "maxima")}
                self.assertGreater(min(parts["images"], parts["maxima"]), 0)
                total = sum(parts.values()) + rank["backward"]["memory"]["total"]
                self.assertEqual(rank["own_memory"]["total"], total)

    def test_the_exchange_is_as_asked(self):
        plan, = self.plans("--cp=2", "--exchange=host")
        self.assertIn(plan["gpu"]["exchange"], ("host, staged", "host, cuda-aware"))
        plan, = self.plans("--cp=64")
        self.assertTrue(plan["gpu"]["exchange"].startswith("host"), "more ranks than GPUs")
        result = self.plan(f"--cuda-backend={DOUBLES}", "--cp=2", "--verify-checksum", code=2)
        self.assertIn("verify_checksum is true, expected false", result.stderr)

    def test_what_is_missing_is_said(self):
        self.assertIn("/nowhere/backend.so", self.plan(NO_BACKEND, code=3).stderr)
        result = self.plan(f"--cuda-backend={DOUBLES}", "--gpu-arch=sm_75", code=3)
        self.assertIn("sm_75: the kernels need sm_80 or newer", result.stderr)
        result = self.plan(f"--cuda-backend={DOUBLES}", "--gpu-arch=sm_87", code=2)
        self.assertIn("--multiprocessors says it", result.stderr)
        self.plan(f"--cuda-backend={DOUBLES}", "--gpu-arch=hopper", code=2)


class BenchTest(ReportCase):
    def bench(self, *launcher, passes="forward,backward"):
        path = os.path.join(self.folder.name, "bench.json")
        result = execute([*launcher, PROGRAM, *BENCH, f"--passes={passes}", f"--json={path}"])
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertIn("on: doubles on the CPU, no GPU", result.stdout)
        with open(path, encoding="utf-8") as file:
            return json.load(file)

    def test_a_rank_is_measured(self):
        document = self.bench()
        self.assertTrue(document["gpu"].startswith("doubles on the CPU, no GPU"), document["gpu"])
        records = document["records"]
        expected = {(p, s) for p in ("forward", "backward") for s in ("canonical", "arrival")}
        self.assertEqual({(r["pass"], r["schedule"]) for r in records}, expected)
        for record in records:
            self.assertGreater(record["gflops"], 0.0)
            self.assertGreater(record["peak_gflops"], 0.0)
            self.assertIsNone(record["target_fraction"], "a double is not judged")
            is_canonical = record["schedule"] == "canonical"
            self.assertEqual(record["cost_over_arrival"] is not None, is_canonical)
            self.assertEqual(record["call_overhead_seconds"] is not None, is_canonical)
            has_overhead = is_canonical and record["call_overhead_seconds"] > 0
            self.assertEqual(record["removed_overhead"] is not None, has_overhead)
        copies = {copy["name"]: copy for copy in document["copies"]}
        self.assertEqual(set(copies), {"copy", "pack_kv", "shard_rows"})
        self.assertEqual(copies["copy"]["fraction_of_copy"], 1.0)

    def test_ranks_share_the_sequence(self):
        document = self.bench(*MPIRUN, "-n", "2", passes="forward")
        self.assertEqual({record["ranks"] for record in document["records"]}, {2})
        self.assertEqual({record["transport"] for record in document["records"]}, {"nccl"})

    def test_without_a_backend_it_says_that_it_was_not_run(self):
        result = execute([PROGRAM, "bench", "--suite=gpu", NO_BACKEND])
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertIn("suite gpu: not run: ", result.stderr)
        self.assertIn("/nowhere/backend.so", result.stderr)

    def test_a_rank_without_a_backend_stops_all_of_them(self):
        command = [*MPIRUN, "-n", "1", PROGRAM, *BENCH, ":", "-n", "1", PROGRAM, *BENCH[:-1]]
        result = execute([*command, NO_BACKEND])
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertGreaterEqual(result.stderr.count("not run: rank 1: CUDA backend"), 1)
        self.assertNotIn("kernels ", result.stdout)

    def test_knobs_of_the_cpu_are_refused(self):
        for knob in ("--isas=generic", "--thread-counts=2"):
            result = execute([PROGRAM, *BENCH, knob])
            self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
            self.assertIn("suite gpu uses the kernels of the GPU", result.stderr)
        result = execute([PROGRAM, "bench", f"--cuda-backend={DOUBLES}"])
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertIn("device cpu uses no GPU", result.stderr)


class CheckGpuTest(ReportCase):
    """launch/check_gpu.sh, as far as there is something to check without a GPU."""

    def check(self, *arguments, program=PROGRAM):
        return execute(
            [SCRIPT, f"--backend={DOUBLES}", f"--program={program}", f"--tests={TESTS}", "--quick",
             f"--out={self.folder.name}", *arguments]
        )  # fmt: skip

    def test_all_of_it_passes_on_the_doubles(self):
        result = self.check()

        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        with open(os.path.join(self.folder.name, "summary.txt"), encoding="utf-8") as file:
            lines = [line.split()[:3] for line in file if line.strip()]
        passed = {line[1] for line in lines if line[0] == "passed"}
        self.assertEqual(
            passed, {"doctor", "tests", "parity_bits", "parity_against_cpu", "parity_odd", "bench"}
        )
        not_run = {line[2] for line in lines if line[0] == "not"}
        self.assertEqual(not_run, {"conformance", "sanitizers", "torch"})
        self.assertIn("on: doubles on the CPU, no GPU", result.stdout)

    def test_what_fails_is_told_and_the_rest_is_still_run(self):
        result = self.check(program="/bin/false")

        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertRegex(result.stdout, r"FAILED +parity_bits")
        self.assertRegex(result.stdout, r"passed +tests")
        self.assertRegex(result.stdout, r"FAILED +bench")

    def summary(self):
        with open(os.path.join(self.folder.name, "summary.txt"), encoding="utf-8") as file:
            return file.read()

    def check_with(self, device_test, *arguments):
        """Of a program that stands in for gpu_device_test, and of no other."""
        path = os.path.join(self.folder.name, "gpu_device_test")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\n{device_test}\n")
        os.chmod(path, 0o755)
        return execute(
            [SCRIPT, f"--backend={DOUBLES}", "--program=/nowhere/cpattn", "--quick",
             f"--tests={self.folder.name}", f"--out={self.folder.name}", *arguments]
        )  # fmt: skip

    def test_a_test_that_hangs_takes_no_more_time_than_there_is(self):
        hangs = "case $* in *list_tests*) printf 'A.\\n  One\\n  Two\\n';; *One) sleep 60;; esac"

        result = self.check_with(hangs, "--seconds=12")

        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertRegex(self.summary(), r"FAILED +tests")
        self.assertIn("A.One: status 124", result.stdout)

    def test_what_was_not_run_is_no_success(self):
        result = self.check_with("echo 'not run: no CUDA driver'; exit 77")
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertRegex(self.summary(), r"not run +tests +- +no CUDA driver")
        self.assertRegex(self.summary(), r"not run +program")
        result = self.check_with("", "--tests=/nowhere")
        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertIn("nothing was run", result.stderr)

    def test_bad_usage(self):
        for arguments in (["--backend"], ["--nothing"], ["--tests=/x"], ["--seconds=soon"]):
            self.assertEqual(execute([SCRIPT, *arguments]).returncode, 2)


if __name__ == "__main__":
    unittest.main(verbosity=2)
