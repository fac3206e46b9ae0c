#!/usr/bin/env python3
"""Which room may include what, and what may not happen below the roof.

The arrows: src/base <- src/device <- src/comm; src/{base,device} <- kernels;
{src, kernels/*.h} <- cp <- launch; a kernel backend sees kernels/*.h and itself; tests see all.
"""

import re
import sys

from tree import Finding, Tree, report, without_comments_and_strings

# (files, what they may include by quotes), first match wins; both are regular expressions.
_BACKENDS = r"kernels/(?:cpu|reference|cuda)/"
_ARROWS = (
    (r"src/base/", r"src/base/"),
    (r"src/device/", r"src/(?:base|device)/"),
    (r"src/comm/", r"src/(?:base|device|comm)/"),
    (r"kernels/cpu/", r"src/(?:base|device)/|kernels/[^/]+$|kernels/cpu/"),
    (r"kernels/reference/", r"src/(?:base|device)/|kernels/[^/]+$|kernels/reference/"),
    (r"kernels/cuda/", r"src/(?:base|device)/|kernels/[^/]+$|kernels/cuda/"),
    # The table is where backends are listed.
    (r"kernels/kernel_table\.cpp$", r"src/(?:base|device)/|kernels/"),
    (r"kernels/", r"src/(?:base|device)/|kernels/[^/]+$"),
    # gradcheck asks the reference directly.
    # Where the CUDA backend is put together.
    (r"cp/cuda/", r"src/|kernels/[^/]+$|kernels/cuda/|cp/(?!bindings/)"),
    (r"cp/bindings/", r"src/|kernels/[^/]+$|kernels/reference/|cp/"),
    (r"cp/", r"src/|kernels/[^/]+$|cp/(?!bindings/)"),
    (r"launch/", r"src/|kernels/|cp/|launch/"),
    (r"tests/", r""),
)

# Programs that stand for a user's: they see the public headers only.
_USERS = r"docs/examples/|tests/consumer/|tests/cp/c_api_"
# The C library by its C names: where C is spoken.
_C_HEADERS = r"(?:math|stddef|stdint|stdio|stdlib|string|threads)\.h"

# Third-party header -> the files that may include it.
_THIRD_PARTY_ROOMS = (
    (r"mpi\.h|mpi-ext\.h", r"src/comm/mpi_comm\.|tests/support/mpi_main\.cpp$|" + _USERS),
    (r"cpattn(?:\.h|/.*)", _USERS),
    (_C_HEADERS, r".*\.c$|cp/bindings/c_api\.h$|tests/cp/c_api_checks\.h$"),
    (r"omp\.h", r"kernels/cpu/|tests/kernels/cpu/"),
    (r"immintrin\.h|x86intrin\.h|arm_neon\.h|arm_sve\.h", r"kernels/cpu/|tests/kernels/cpu/"),
    (r"cpuid\.h|sys/auxv\.h|asm/hwcap\.h", r"kernels/|launch/"),
    (r"yaml-cpp/.*|boost/.*|nlohmann/.*", r"launch/|tests/launch/"),
    (r"fmt/.*", r".*\.cpp$"),
    (r"pybind11/.*", r"cp/bindings/"),
    (r"gtest/.*|gmock/.*", r"tests/"),
    (r"cblas\.h", r"launch/"),
    (
        r"(?:dlfcn|link)\.h",
        r"launch/|cp/cuda_backend\.cpp$|src/device/cuda_driver\.cpp$|tests/cp/c_api_",
    ),
    # The operating system: memory for the ground floor, processes and files for the roof.
    (r"sys/mman\.h", r"src/device/|kernels/cuda/host/|launch/|tests/"),
    (
        r"cuda_runtime_api\.h",
        r"kernels/cuda/|src/device/cuda_|cp/cuda/|tests/support/cuda/|tests/(?:src|cp)/cuda/",
    ),
    (r"cuda(?:_runtime)?\.h|vector_types\.h", r"kernels/cuda/|tests/support/cuda/fake_driver\."),
    (r"nccl\.h", r"src/comm/nccl_|cp/cuda/|tests/support/cuda/|tests/src/cuda/"),
    (r"linux/futex\.h", r"tests/support/cuda/"),
    (
        r"(?:sys|netinet|arpa)/\w+\.h|(?:unistd|malloc|fcntl|signal|spawn|poll|sched|time)\.h",
        r"launch/|tests/",
    ),
)
_STANDARD = re.compile(r"[a-z_]+$|c[a-z]+$")

_INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"(?P<ours>[^"]+)"|<(?P<system>[^>]+)>)')

_BELOW_LAUNCH = re.compile(r"(?:src|kernels|cp)/")
_CALL = r"(?<![\w.:>~])(?:std::|::)?"
# (pattern, what to do instead) in src, kernels and cp.
_FORBIDDEN_BELOW_LAUNCH = (
    (_CALL + r"(?:secure_)?getenv\s*\(", "reads the environment: pass the value down"),
    (_CALL + r"(?:set|put|unset)env\s*\(", "writes the environment"),
    (_CALL + r"(?:v?f?printf|f?puts|putchar|fputc|perror)\s*\(", "prints: only launch prints"),
    (r"\bstd::(?:cout|cerr|clog|printf|puts)\b|\bfmt::print\b", "prints: only launch prints"),
    (r"#\s*include\s*<(?:iostream|print)>", "prints: only launch prints"),
    (
        r"(?<!void )" + _CALL + r"(?:exit|_exit|_Exit|quick_exit|abort|terminate)\s*\(",
        "ends the process: throw an exception of src/base/error.h",
    ),
)
# Labels spelled Enum::value belong to a switch over an enum; its default hides a new value.
_CASE = re.compile(r"^\s*case\s+(?P<label>[^:]*(?:::[^:]+)*):(?!:)")
_DEFAULT = re.compile(r"^\s*default\s*:")
_PRAGMA_OMP = re.compile(r"^\s*#\s*pragma\s+omp\b|\b_Pragma\s*\(\s*\"omp\b")
# The host layer's one assembly is its stack switch; the CPU kernels' has no instructions.
_ASSEMBLY = re.compile(r"\basm\b")
_ASSEMBLY_ROOMS = re.compile(
    r"kernels/cuda/ptx\w*\.(?:h|inc)$|kernels/cuda/host/fiber\.cpp$|kernels/cpu/"
)
_USING_NAMESPACE = re.compile(r"^\s*using\s+namespace\b")


def _example_findings(tree, name):
    """An example is built as a user's program is: public headers, and what lies beside it."""
    folder = name.rsplit("/", 1)[0]
    for number, line in tree.lines(name):
        match = _INCLUDE.match(line)
        if match and match["ours"] and not tree.exists(f"{folder}/{match['ours']}"):
            yield Finding(name, number, f'"{match["ours"]}": not beside {name}')


def _arrow_findings(tree, name):
    if name.startswith("docs/examples/"):
        yield from _example_findings(tree, name)
        return
    allowed = next((ours for files, ours in _ARROWS if re.match(files, name)), None)
    if allowed is None:
        yield Finding(name, 1, "this folder has no place among the floors")
        return
    for number, line in tree.lines(name):
        match = _INCLUDE.match(line)
        if not match or not match["ours"]:
            continue
        target = match["ours"]
        if "../" in target or not tree.exists(target):
            yield Finding(name, number, f'"{target}": spell it from the repository root')
        elif not re.match(allowed, target):
            yield Finding(name, number, f'"{target}": {name} may not look there')


def _third_party_findings(tree, name):
    for number, line in tree.lines(name):
        match = _INCLUDE.match(line)
        if not match or not match["system"]:
            continue
        header = match["system"]
        room = next((r for h, r in _THIRD_PARTY_ROOMS if re.fullmatch(h, header)), None)
        if room is None and _STANDARD.match(header):
            continue
        if room is None:
            yield Finding(name, number, f"<{header}>: this library has no room")
        elif not re.match(room, name):
            yield Finding(name, number, f"<{header}>: not in this room")


def _code_findings(tree, name):
    code = without_comments_and_strings(tree.text(name)).split("\n")
    last_label = ""
    for number, line in enumerate(code, start=1):
        case = _CASE.match(line)
        last_label = case["label"] if case else last_label
        if _DEFAULT.match(line) and "::" in last_label and not name.startswith("tests/"):
            yield Finding(name, number, "`default:` hides a new enumerator from -Wswitch")
        if _BELOW_LAUNCH.match(name):
            for pattern, message in _FORBIDDEN_BELOW_LAUNCH:
                if re.search(pattern, line):
                    yield Finding(name, number, message)
        if _ASSEMBLY.search(line) and not _ASSEMBLY_ROOMS.match(name):
            yield Finding(name, number, "assembly of the device belongs to kernels/cuda/ptx*")
        if _PRAGMA_OMP.search(line) and not name.startswith(("kernels/cpu/", "tests/kernels/cpu/")):
            yield Finding(name, number, "OpenMP belongs to kernels/cpu")
        if name.endswith((".h", ".cuh")) and _USING_NAMESPACE.match(line):
            yield Finding(name, number, "`using namespace` in a header")
    # An -inl.h is included once per instruction set, on purpose.
    is_header = name.endswith((".h", ".cuh"))
    is_guarded = name.endswith("-inl.h") or "#pragma once" in code
    if is_header and not is_guarded:
        yield Finding(name, 1, "no `#pragma once`")


def check(tree):
    findings = []
    for name in tree.code():
        findings += _arrow_findings(tree, name)
        findings += _third_party_findings(tree, name)
        findings += _code_findings(tree, name)
    return findings


if __name__ == "__main__":
    checkout = Tree(sys.argv[1])
    sys.exit(report(checkout, check(checkout), "layering"))
