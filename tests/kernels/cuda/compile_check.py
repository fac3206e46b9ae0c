#!/usr/bin/env python3
"""Compiles device source for every architecture the project ships, and reads what came out.

compile_check.py NVCC ROOT SOURCE [--arch 80,90a,...] [--require 90a:hgmma] [--count-as-ptx]

A warning is an error, and so is a register spill, any use of local memory, or a wgmma that the
assembler had to serialise. --require: kernels of
that architecture contain the operation. --count-as-ptx: each operation occurs in the machine code
as often as in the PTX (for straight code without loops), which also proves the table of cubin.py.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

import cubin

ARCHITECTURES = ("80", "90a", "100", "120")
PTX_ARCHITECTURE = "120"  # later devices translate it

# Operation -> what it is in PTX.
PTX_PATTERNS = {
    "hmma": r"mma\.sync\.",
    "hgmma": r"wgmma\.mma_async\.",
    "utmaldg": r"cp\.async\.bulk\.tensor\.",
    "ublkcp": r"cp\.async\.bulk\.shared",
    "ldsm": r"ldmatrix\.",
    "ldgsts": r"cp\.async\.(?:ca|cg)\.",
}

FLAGS = (
    "-std=c++20",
    "-O3",
    "-fmad=false",  # fused only where the code says so
    "-Werror=all-warnings",
    # 186: a comparison that is pointless for one type of a template; 554: a conversion of a view
    # that only its writable kind has.
    "-diag-suppress=186,554",
    "-Xptxas=-warn-spills,-warn-lmem-usage,-Werror",
)


# What ptxas says, as information only, where it cannot tell that registers of a product are left
# alone until the wait for it.
SERIALIZED = "wgmma.mma_async instructions are serialized"


def compile_all(nvcc, root, source, architectures, folder):
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    if PTX_ARCHITECTURE in architectures:
        targets.append(f"-gencode=arch=compute_{PTX_ARCHITECTURE},code=compute_{PTX_ARCHITECTURE}")
    command = [nvcc, *FLAGS, *targets, f"-I{root}", "-x", "cu", "-fatbin", "--keep"]
    command += [f"--keep-dir={folder}", "-o", f"{folder}/out.fatbin", source]
    print(" ".join(command), flush=True)
    result = subprocess.run(command, check=False, text=True, capture_output=True)
    print(result.stdout + result.stderr, flush=True)
    return result.returncode == 0 and SERIALIZED not in result.stdout + result.stderr


def kept(folder, architecture, suffix):
    """The file of that kind that nvcc kept; the architecture is in its name if it had several."""
    files = [f for f in folder.glob(f"*{suffix}") if f"compute_{architecture}." in f.name]
    (file,) = files or folder.glob(f"*{suffix}")
    return file


def problems_of(folder, architecture, required, counts_as_ptx):
    """What is wrong with one architecture's machine code; prints its report."""
    binary = kept(folder, architecture, ".cubin")
    kernels = cubin.read(binary.read_bytes())
    for kernel in kernels:
        counts = " ".join(f"{name}={n}" for name, n in sorted(kernel.operations.items()))
        print(
            f"sm_{architecture} {kernel.name}: registers={kernel.registers} "
            f"stack={kernel.stack_bytes} instructions={kernel.num_instructions} {counts}"
        )
        if kernel.local_accesses() or kernel.stack_bytes:
            yield f"sm_{architecture} {kernel.name}: uses local memory"
        if not 0 < kernel.registers <= 255:
            yield f"sm_{architecture} {kernel.name}: {kernel.registers} registers"
    if not kernels:
        yield f"sm_{architecture}: no kernel in {binary.name}"
    total = {name: sum(k.operations[name] for k in kernels) for name in PTX_PATTERNS}
    for name in required:
        if total[name] == 0:
            yield f"sm_{architecture}: no {name}"
    if counts_as_ptx:
        ptx = kept(folder, architecture, ".ptx").read_text()
        for name, pattern in PTX_PATTERNS.items():
            expected = len(re.findall(pattern, ptx))
            if total[name] != expected:
                yield f"sm_{architecture}: {total[name]} {name}, but {expected} in the PTX"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("nvcc")
    parser.add_argument("root")
    parser.add_argument("source")
    parser.add_argument("--arch", default=",".join(ARCHITECTURES))
    parser.add_argument("--require", action="append", default=[])
    parser.add_argument("--count-as-ptx", action="store_true")
    parser.add_argument("--host-only", action="store_true", help="a source without kernels")
    args = parser.parse_args()
    architectures = args.arch.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if not compile_all(args.nvcc, args.root, args.source, architectures, folder):
            return 1
        problems = []
        for architecture in [] if args.host_only else architectures:
            required = [r.split(":")[1] for r in args.require if r.startswith(f"{architecture}:")]
            problems += problems_of(folder, architecture, required, args.count_as_ptx)
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
