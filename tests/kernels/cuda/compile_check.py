#!/usr/bin/env python3
"""Reads what nvcc made of device source, for every architecture the project ships.

compile_check.py built STEM OBJECT... [--arch 80,90a,...] [--ptx 80,120] [--require 90a:hgmma]
    STEM.cu.o among the objects of the CUDA backend, and what nvcc said when it made it.
compile_check.py linked MODULE OBJECT...
    The backend has the kernels of its objects, all of them.
compile_check.py source NVCC SOURCE [--arch ...] [--require ...] [--count-as-ptx] [--host-only]
        --flags FLAG...
    Compiles what is not part of the backend, and reads that.

Whatever nvcc says is an error: a warning, and also what ptxas tells as information only, as that
it had to serialise wgmma. So is a register spill, any use of local memory, an architecture too few
or too many, a kernel that some of them lack. --require: kernels of that architecture contain the
operation. --count-as-ptx: each operation occurs in the machine code as often as in the PTX (for
straight code without loops), which also proves the table of cubin.py.
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

import cubin
import fatbin

ARCHITECTURES = "80,90a,100,120"

# Operation -> what it is in PTX.
PTX_PATTERNS = {
    "hmma": r"mma\.sync\.",
    "hgmma": r"wgmma\.mma_async\.",
    "utmaldg": r"cp\.async\.bulk\.tensor\.",
    "ublkcp": r"cp\.async\.bulk\.shared",
    "ldsm": r"ldmatrix\.",
    "ldgsts": r"cp\.async\.(?:ca|cg)\.",
}


def problems_of_kernel(name, kernel):
    if kernel.local_accesses() or kernel.stack_bytes:
        yield f"{name}: uses local memory"
    if not 0 < kernel.registers <= 255:
        yield f"{name}: {kernel.registers} registers"


def problems_of_cubin(entry, required):
    """What is wrong with one architecture's machine code; prints its report."""
    kernels = cubin.read(entry.payload)
    for kernel in kernels:
        counts = " ".join(f"{name}={n}" for name, n in sorted(kernel.operations.items()))
        name = f"sm_{entry.architecture} {kernel.name}"
        print(
            f"{name}: registers={kernel.registers} stack={kernel.stack_bytes} "
            f"instructions={kernel.num_instructions} {counts}"
        )
        yield from problems_of_kernel(name, kernel)
    for name in required:
        if not any(kernel.operations[name] for kernel in kernels):
            yield f"sm_{entry.architecture}: no {name}"


def problems_of_counts(machine_code, ptx):
    text = ptx.payload.decode(errors="replace")
    kernels = cubin.read(machine_code.payload)
    for name, pattern in PTX_PATTERNS.items():
        found, expected = sum(k.operations[name] for k in kernels), len(re.findall(pattern, text))
        if found != expected:
            yield f"sm_{machine_code.architecture}: {found} {name}, but {expected} in the PTX"


def problems_of_set(what, found, expected):
    if sorted(found) != sorted(expected):
        yield f"{what} for {', '.join(sorted(found)) or 'none'}, expected {', '.join(expected)}"


def problems_of_kernels(cubins):
    """Kernels that some architecture lacks."""
    names = {e.architecture: {k.name for k in cubin.read(e.payload)} for e in cubins}
    every = set().union(*names.values())
    if not every:
        yield "no kernel"
    for architecture, present in names.items():
        for name in sorted(every - present):
            yield f"sm_{architecture}: no kernel {name}"


def problems_of_code(data, architectures, ptx_architectures, required):
    """What is wrong with the device code in an object file or a .fatbin."""
    entries = fatbin.read(data)
    cubins = [e for e in entries if e.kind == "cubin"]
    ptx = [e.architecture for e in entries if e.kind == "ptx"]
    yield from problems_of_set("machine code", [e.architecture for e in cubins], architectures)
    yield from problems_of_set("PTX", ptx, ptx_architectures)
    for entry in cubins:
        own = [r.split(":")[1] for r in required if r.split(":")[0] == entry.architecture]
        yield from problems_of_cubin(entry, own)
    yield from problems_of_kernels(cubins)


def problems_of_messages(text):
    if text.strip():
        yield f"nvcc said:\n{text.strip()}"


def check_built(args):
    found = [o for o in map(pathlib.Path, args.objects) if o.name == f"{args.stem}.cu.o"]
    if len(found) != 1 or not found[0].exists():
        return [f"no object {args.stem}.cu.o: build the target cpattn_cuda"]
    (built,) = found
    messages = pathlib.Path(f"{built}.log").read_text()
    ptx = [a for a in args.ptx.split(",") if a]
    problems = list(problems_of_messages(messages))
    return problems + list(
        problems_of_code(built.read_bytes(), args.arch.split(","), ptx, args.require)
    )


def kernels_in(files):
    return sorted(
        (entry.architecture, kernel.name)
        for file in files
        for entry in fatbin.read(pathlib.Path(file).read_bytes())
        if entry.kind == "cubin"
        for kernel in cubin.read(entry.payload)
    )


def check_linked(args):
    if not pathlib.Path(args.module).exists():
        return [f"no {args.module}: build the target cpattn_cuda"]
    linked, compiled = kernels_in([args.module]), kernels_in(args.objects)
    print(f"{len(linked)} kernels")
    if not linked or linked != compiled:
        return [f"{len(linked)} kernels in the backend, {len(compiled)} in its objects"]
    return []


def compiled(nvcc, source, architectures, flags):
    """The device code of a source, PTX of every architecture with it, and what nvcc said."""
    targets = [f"-gencode=arch=compute_{a},code=[sm_{a},compute_{a}]" for a in architectures]
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "out.fatbin"
        command = [nvcc, *flags, "--no-compress", *targets, "-x", "cu", "-fatbin", "-o", out]
        print(" ".join(map(str, [*command, source])), flush=True)
        result = subprocess.run([*command, source], check=False, text=True, capture_output=True)
        return out.read_bytes() if out.exists() else b"", result.stdout + result.stderr


def check_source(args):
    architectures = args.arch.split(",")
    code, messages = compiled(args.nvcc, args.source, architectures, args.flags)
    problems = list(problems_of_messages(messages))
    if not code:
        return problems + ["not compiled"]
    if args.host_only:
        return problems
    problems += problems_of_code(code, architectures, architectures, args.require)
    if args.count_as_ptx:
        entries = fatbin.read(code)
        ptx = {e.architecture: e for e in entries if e.kind == "ptx"}
        for entry in entries:
            if entry.kind == "cubin":
                problems += problems_of_counts(entry, ptx[entry.architecture])
    return problems


def parse(words):
    parser = argparse.ArgumentParser()
    modes = parser.add_subparsers(dest="mode", required=True)
    built = modes.add_parser("built")
    built.add_argument("stem")
    built.add_argument("objects", nargs="+")
    built.add_argument("--ptx", default="")
    linked = modes.add_parser("linked")
    linked.add_argument("module")
    linked.add_argument("objects", nargs="+")
    source = modes.add_parser("source")
    source.add_argument("nvcc")
    source.add_argument("source")
    source.add_argument("--count-as-ptx", action="store_true")
    source.add_argument("--host-only", action="store_true", help="a source without kernels")
    source.add_argument("--flags", nargs=argparse.REMAINDER, default=[])
    for mode in (built, source):
        mode.add_argument("--arch", default=ARCHITECTURES)
        mode.add_argument("--require", action="append", default=[])
    return parser.parse_args(words)


def main():
    args = parse(sys.argv[1:])
    checks = {"built": check_built, "linked": check_linked, "source": check_source}
    problems = checks[args.mode](args)
    for problem in problems:
        print(f"error: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
