#!/usr/bin/env python3
"""compile_check.py on code with planted faults: each is found, and code without is passed.

usage: compile_check_test.py NVCC ROOT FLAG...
"""

import pathlib
import sys
import tempfile
import unittest

import compile_check

NVCC, ROOT, *FLAGS = sys.argv[1:]
SILENT = [flag for flag in FLAGS if "-warn-" not in flag]

CLEAN = "__global__ void clean(float* x) { x[threadIdx.x] *= 2.0f; }\n"

# An array that is indexed by what is known at run time only has addresses, so it lies in memory.
LOCAL_ARRAY = """
__global__ void local_array(float* x, const int* order) {
  float copy[32];
  for (int i = 0; i < 32; ++i) copy[i] = x[i];
  for (int i = 0; i < 32; ++i) x[i] = copy[order[i]];
}
"""

# 96 values that live across a barrier, with 64 registers for each of 1024 threads.
SPILL = """
__global__ void __launch_bounds__(1024) spill(float* x) {
  float held[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) held[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) x[(95 - i) * 1024 + threadIdx.x] = held[i] * held[(i + 7) % 96];
}
"""

# A branch that threads of a warp may take differently.
SERIALIZED = """
#include "kernels/cuda/ptx_sm90.h"
using namespace cpattn::cuda;
__global__ void serialized(float* x, std::uint64_t a, std::uint64_t b) {
  float sum[32] = {};
  ptx::products_fence();
  if (x[threadIdx.x] > 0.0f) {
    ptx::start_product<64, false, false>(sum, a, b, true, cpattn::bf16{});
  } else {
    ptx::start_product<64, false, false>(sum, b, a, true, cpattn::bf16{});
  }
  ptx::commit_products();
  ptx::wait_products<0>();
  for (int i = 0; i < 32; ++i) x[i] = sum[i];
}
"""

ONLY_LATER = """
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__global__ void only_later(float* x) { *x = 1.0f; }
#endif
"""


def compiled(text, architectures, flags=tuple(FLAGS)):
    """Device code and messages of a source with this text."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "planted.cu"
        source.write_text(text)
        return compile_check.compiled(NVCC, source, architectures, [*flags, f"-I{ROOT}"])


def problems(code, architectures, required=()):
    return list(compile_check.problems_of_code(code, architectures, architectures, required))


class CompileCheckTest(unittest.TestCase):
    def test_clean_code_is_passed(self):
        code, messages = compiled(CLEAN, ["80", "90a"])
        self.assertEqual(list(compile_check.problems_of_messages(messages)), [])
        self.assertEqual(problems(code, ["80", "90a"]), [])

    def test_spills_and_local_arrays_are_found_twice(self):
        for text, name in ((SPILL, "spill"), (LOCAL_ARRAY, "local_array")):
            with self.subTest(name):
                _, messages = compiled(text, ["80"])
                self.assertRegex(messages, "[Ss]pill" if text is SPILL else "[Ll]ocal memory")
                self.assertNotEqual(list(compile_check.problems_of_messages(messages)), [])
                code, _ = compiled(text, ["80"], SILENT)
                (problem,) = problems(code, ["80"])
                self.assertRegex(problem, f"sm_80 .*{name}.*: uses local memory")

    def test_serialized_products_are_found(self):
        _, messages = compiled(SERIALIZED, ["90a"], SILENT)
        self.assertIn("wgmma.mma_async instructions are serialized", messages)
        (problem,) = compile_check.problems_of_messages(messages)
        self.assertIn("serialized", problem)

    def test_architectures_must_be_the_expected_ones(self):
        code, _ = compiled(CLEAN, ["90"])
        self.assertEqual(problems(code, ["90"]), [])
        self.assertIn("machine code for 90, expected 90a", problems(code, ["90a"]))
        self.assertIn("machine code for 90, expected 80, 90", problems(code, ["80", "90"]))

    def test_a_kernel_and_an_operation_that_are_not_there_are_missed(self):
        code, _ = compiled(CLEAN + ONLY_LATER, ["80", "90"])
        found = problems(code, ["80", "90"], ["90:hmma"])
        self.assertEqual(len(found), 2, found)
        self.assertEqual(found[0], "sm_90: no hmma")
        self.assertRegex(found[1], "sm_80: no kernel .*only_later")
        self.assertEqual(problems(b"", []), ["no kernel"])

    def test_counts_that_differ_from_the_ptx_are_found(self):
        entries = compile_check.fatbin.read(compiled(CLEAN, ["80"])[0])
        machine_code, ptx = sorted(entries, key=lambda entry: entry.kind)
        self.assertEqual(list(compile_check.problems_of_counts(machine_code, ptx)), [])
        ptx.payload += b"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {};"
        self.assertEqual(
            list(compile_check.problems_of_counts(machine_code, ptx)),
            ["sm_80: 0 ldsm, but 1 in the PTX"],
        )

    def test_what_was_not_built_is_said(self):
        args = compile_check.parse(["built", "rows", "there_is_none/rows.cu.o"])
        self.assertIn("build the target cpattn_cuda", compile_check.check_built(args)[0])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
