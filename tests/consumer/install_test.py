#!/usr/bin/env python3
"""Installs what was built, moves it, and uses it as a stranger would: with CMake, with pkg-config.

usage: install_test.py BUILD_FOLDER SOURCE_FOLDER VERSION HAS_MPI MPIEXEC NCCL

NCCL: the library that the CUDA backend was linked with; "" where that was not built.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

BUILD, SOURCE, VERSION, HAS_MPI, MPIEXEC, NCCL = sys.argv[1:]
WORK = pathlib.Path(BUILD) / "tests" / "installed"
PREFIX = WORK / "moved"
MPI_FLAGS = "--oversubscribe --bind-to none --mca pml ob1 --mca btl vader,self".split()
ENVIRONMENT = {
    **os.environ,
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMP_NUM_THREADS": "1",
}


def run(*command, status=0, **options):
    """The command's output; ends the test when its exit status is another."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env={**ENVIRONMENT, **options.pop("env", {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )
    if done.returncode != status:
        sys.exit(f"status {done.returncode}, not {status}: {' '.join(words)}\n{done.stdout}")
    return done.stdout


def expect(condition, what):
    if not condition:
        sys.exit(f"not so: {what}")


def install():
    """Through DESTDIR as packagers do, then moved: nothing may remember where it was built."""
    shutil.rmtree(WORK, ignore_errors=True)
    stage = WORK / "stage"
    run("cmake", "--install", BUILD, "--prefix", "/opt/cpattn", env={"DESTDIR": str(stage)})
    shutil.move(stage / "opt" / "cpattn", PREFIX)
    expect(not any(path.is_file() for path in stage.rglob("*")), "files outside the prefix")


def library_folder():
    (package,) = PREFIX.glob("lib*/**/cpattnConfig.cmake")
    return package.parent.parent.parent


def check_files():
    lib = library_folder()
    major, minor, _ = VERSION.split(".")
    interface = f"{major}.{minor}" if major == "0" else major
    expect((lib / f"libcpattn.so.{VERSION}").is_file(), "a library with its version")
    expect(
        os.readlink(lib / "libcpattn.so") == f"libcpattn.so.{interface}",
        "a link to the version of the interface",
    )
    dynamic = run("readelf", "-d", lib / "libcpattn.so")
    expect(
        f"soname: [libcpattn.so.{interface}]" in dynamic,
        "a soname with the version of the interface",
    )
    expect("RUNPATH" not in dynamic and "RPATH" not in dynamic, "no path of the build machine")
    run(PREFIX / "bin" / "cpattn", "plan", "--cp", "2", "--seq-len", "64")
    texts = [path for path in PREFIX.rglob("*") if path.suffix in (".h", ".cmake", ".pc")]
    for path in texts:
        expect(SOURCE not in path.read_text(), f"no path of the build machine in {path}")
    include = PREFIX / "include"
    found = sorted(path.name for path in include.iterdir())
    expect(found == ["cpattn", "cpattn.h"], f"cpattn and cpattn.h in include/, not {found}")


def built_with_cmake(source, name, *settings):
    build = WORK / name
    run("cmake", "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={PREFIX}", *settings)
    run("cmake", "--build", build)
    return build


def check_cmake():
    consumer = pathlib.Path(SOURCE) / "tests" / "consumer"
    build = built_with_cmake(consumer, "consumer", f"-DWANTED_VERSION={VERSION}")
    expect(f"cpattn {VERSION}: {{" in run(build / "no_mpi"), "the version that was installed")
    check_backend(build / "opens_backend")
    later = subprocess.run(
        ["cmake", "-S", str(consumer), "-B", str(WORK / "later")]
        + [f"-DCMAKE_PREFIX_PATH={PREFIX}", "-DWANTED_VERSION=99.0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    text = " ".join(later.stdout.split())  # CMake breaks lines where it likes
    reason = 'configuration file for package "cpattn" that is compatible with requested version'
    expect(
        later.returncode != 0 and reason in text and f"version: {VERSION}" in text,
        f"a later version is not found:\n{later.stdout}",
    )


def needed(file):
    """Names of the libraries that a program or a library cannot be started without."""
    return re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", file))


def check_backend(program):
    """Of what is installed only the CUDA backend needs NCCL, and nothing needs the toolkit."""
    lib = library_folder()
    backend = lib / "libcpattn_cuda.so"
    for file in (lib / "libcpattn.so", PREFIX / "bin" / "cpattn", program):
        names = [name for name in needed(file) if re.match("lib(cuda|nccl|nv)", name)]
        expect(not names, f"{file} needs nothing of CUDA, not {names}")
    expect(backend.exists() == bool(NCCL), f"a CUDA backend where it was built: {backend}")
    if NCCL:
        check_backend_opens(program, backend)
        backend.rename(WORK / "backend.so")
    said = run(program, status=3)
    expect(f"unsupported: CUDA backend {backend.name}: not installed with {lib}/" in said, said)
    cpattn = PREFIX / "bin" / "cpattn"
    text = f"CUDA backend {backend.name}: not installed with {cpattn}"
    expect(text in run(cpattn, "doctor"), f"doctor says: {text}")
    if HAS_MPI == "1":
        said = run(cpattn, "parity", "--device", "cuda", "--cp", "1", status=3)
        expect(text in said, said)


def check_backend_opens(program, backend):
    places = {"LD_LIBRARY_PATH": os.path.dirname(NCCL)}
    said = run(program, env=places)
    expect(f"opened {backend}: CUDA runtime " in said, said)
    expect("CUDA runtime" in run(PREFIX / "bin" / "cpattn", "doctor", env=places), "doctor")
    names = needed(backend)
    expect("libnccl.so.2" in names, f"NCCL is that of the machine, not {names}")
    expect(not any("cuda" in name for name in names), f"no CUDA library is needed, not {names}")
    dynamic = run("readelf", "-d", backend)
    expect("RUNPATH" not in dynamic and "RPATH" not in dynamic, "no path of the build machine")
    exported = run("nm", "-D", "--defined-only", backend).split()[2::3]
    expect(exported == ["cpattn_cuda_backend"], f"one name is exported, not {exported}")
    # The same on a machine without NCCL: the name of one that no machine has.
    without = WORK / "without_nccl.so"
    without.write_bytes(backend.read_bytes().replace(b"libnccl.so.2\0", b"libnccl.so.0\0"))
    said = run(program, without, status=3)
    expect(f"unsupported: CUDA backend {without}: libnccl.so.0: cannot open" in said, said)
    expect("LD_LIBRARY_PATH" in said, said)


def check_pkg_config():
    lib = library_folder()
    settings = {"PKG_CONFIG_PATH": str(lib / "pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", "cpattn", env=settings).split()
    expect(run("pkg-config", "--modversion", "cpattn", env=settings).strip() == VERSION, "version")
    program = WORK / "by_pkg_config"
    source = pathlib.Path(SOURCE) / "tests" / "consumer" / "no_mpi.cpp"
    run("c++", "-std=c++20", "-Wall", "-Wextra", "-Werror", source, "-o", program, *flags)
    expect("cpattn" in run(program, env={"LD_LIBRARY_PATH": str(lib)}), "its output")


def check_examples():
    """The programs of the documentation, alone and on two ranks."""
    build = built_with_cmake(pathlib.Path(SOURCE) / "docs" / "examples" / "minimal", "minimal")
    for name in ("attention_cpp", "attention_c"):
        for ranks in (1, 2):
            output = run(MPIEXEC, "-np", ranks, *MPI_FLAGS, build / name)
            lines = [line for line in output.splitlines() if line.startswith("rank ")]
            expect(len(lines) == ranks, f"one line per rank:\n{output}")
            rows = sum(int(line.split()[4]) for line in lines)
            expect(rows == 4096, f"every token on one rank:\n{output}")
            # All weights are equal and sum to 1, so out is v.
            expect(all(line.endswith("out 0.010000") for line in lines), output)


def main():
    install()
    check_files()
    check_cmake()
    check_pkg_config()
    if HAS_MPI == "1":
        check_examples()
    print("installed, moved and used")


main()
