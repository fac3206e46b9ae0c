#!/usr/bin/env python3
"""cpattn parity from the outside: each planted fault turns the verdict red."""

import unittest

from parity_process import SMALL, ReportCase, parity


class FaultTest(ReportCase):
    SEEN = {
        "scale_doubled": (1, r"out: relative L2 error .* exceeds"),
        "causal_off_by_one": (1, r"lse: \d+ elements? infinite on one side only"),
        "hop_dropped": (1, r"out: \d+ of \d+ elements differ in bits .* first at row \d+"),
        "hop_merged_twice": (1, r"lse: relative L2 error .* exceeds"),
        "lse_base2": (1, r"lse: 1200 of 1200 elements differ in bits .* first at row 0 "),
        "zigzag_wrong_half": (1, r"out: relative L2 error .* exceeds"),
        "kv_head_map_wrong": (1, r"out: relative L2 error .* exceeds"),
        "bit_flip": (1, r" 1 of \d+ elements differ in bits .*\(0x[0-9a-f]+\), expected"),
        "nan_row": (1, r"out: 64 elements NaN where the reference has a number, first at row"),
        "cu_seqlens_off_by_one": (1, r"1 row was not delivered exactly once, first row 299"),
        "dk_chunk_zeroed": (1, r"dk: \d+ of 9600 elements differ in bits .*: 0 \(0x0\), expected"),
        "dkv_piece_dropped": (1, r"dv: relative L2 error .* exceeds 5e-06"),
        "dkv_piece_added_twice": (1, r"dk: relative L2 error .* exceeds 5e-06"),
        "delta_from_partial_out": (1, r"dq: relative L2 error .* exceeds 5e-06"),
        "gradients_rounded_per_hop": (1, r"dk: relative L2 error 0\.00\d+ .* exceeds 5e-06"),
        "dq_head_group_wrong": (1, r"dq: relative L2 error .* exceeds 5e-06"),
        "rank_returns_early": (4, r"rank 1 \(pid \d+\) ended without a word"),
        "rank_never_answers": (4, r"step 0: .*rank 1 .*bytes"),
    }

    def test_the_list_is_the_list(self):
        result = parity("--list-faults")

        self.assertEqual(result.returncode, 0)
        self.assertEqual({line.split()[0] for line in result.stdout.splitlines()}, set(self.SEEN))

    def test_each_turns_the_verdict_red_and_says_what_was_seen(self):
        for fault, (code, message) in self.SEEN.items():
            with self.subTest(fault):
                result = self.parity(*SMALL, "--cp=1,2", f"--inject={fault}")

                self.assertEqual(result.returncode, code, result.stdout + result.stderr)
                self.assertRegex(result.stdout, message)
                self.assertRegex(result.stdout, r"verdict: FAIL: \d passed, [12] failed")
                report = self.report()
                self.assertEqual(report["verdict"], "FAIL")
                self.assertEqual(report["inject"], fault)
                self.assertNotIn("was planted and not seen", result.stdout)

    def test_those_of_the_backward_leave_the_rest_alone(self):
        spared = {"dk_chunk_zeroed": {"out", "lse", "dq", "dv"},
                  "dkv_piece_dropped": {"out", "lse", "dq"},
                  "dkv_piece_added_twice": {"out", "lse", "dq"},
                  "delta_from_partial_out": {"out", "lse", "dv"},
                  "gradients_rounded_per_hop": {"out", "lse", "dq"},
                  "dq_head_group_wrong": {"out", "lse", "dk", "dv"}}
        for fault, passing in spared.items():
            for extra in ([], ["--direction=backward", "--dtype=bf16", "--sharding=contiguous"]):
                with self.subTest((fault, extra)):
                    result = self.parity(*SMALL, "--cp=3", f"--inject={fault}", *extra)

                    self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
                    lane = self.report()["lanes"][-1]
                    passed = {tensor["name"] for tensor in lane["tensors"] if tensor["pass"]}
                    compared = {tensor["name"] for tensor in lane["tensors"]}
                    self.assertEqual(passed, passing & compared)
                    self.assertTrue(compared - passed, "no tensor saw the fault")

    def test_a_border_between_documents_is_seen_by_its_numbers(self):
        result = self.parity("--cp=2", "--cu-seqlens=0,100,200", "--chunk-tokens=32", "--heads=2",
                             "--kv-heads=1", "--head-dim=8", "--mask=full",
                             "--inject=cu_seqlens_off_by_one")

        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stdout, r"out: relative L2 error .* exceeds")

    def test_a_fault_that_fits_nowhere_is_refused(self):
        for arguments, need in (
            (["--cp=1", "--inject=hop_dropped"], "needs a cp size of 2 or more"),
            (["--sharding=contiguous", "--inject=zigzag_wrong_half"], "needs zigzag sharding"),
            (["--mask=full", "--inject=causal_off_by_one"], "needs a causal mask"),
            (["--inject=no_such_fault"], "is no fault"),
            (["--direction=forward", "--inject=dk_chunk_zeroed"],
             "needs a direction with gradients"),
            (["--direction=backward", "--inject=bit_flip"], "needs a direction that compares out"),
        ):
            with self.subTest(arguments):
                result = parity(*SMALL, *arguments)

                self.assertEqual(result.returncode, 2)
                self.assertIn(need, result.stderr)

    def test_a_fault_that_these_inputs_cannot_show_is_no_pass(self):
        result = self.parity(*SMALL, "--cp=2", "--softmax-scale=0", "--inject=scale_doubled")

        self.assertEqual(result.returncode, 1)
        self.assertIn("was planted and not seen", result.stdout)


if __name__ == "__main__":
    unittest.main(verbosity=2)
