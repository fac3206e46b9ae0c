#!/usr/bin/env python3
"""The C++ example trainer: the bits of its loss at every CP size, and when the size changes."""

import re
import subprocess
import sys
import unittest

MPIRUN = [
    "mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
    "--mca", "pml", "ob1", "--mca", "btl", "vader,self", "--mca", "mpi_yield_when_idle", "1",
]  # fmt: skip
TRAINER = ""
TEXT = ""


def run(ranks, *options):
    command = [*MPIRUN, "-np", str(ranks), TRAINER, "--text", TEXT, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def last_line(ranks, *options):
    done = run(ranks, *options)
    if done.returncode != 0:
        raise AssertionError(f"{done.args}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout.splitlines()[-1]


class TrainerTest(unittest.TestCase):
    def test_loss_has_the_same_bits_at_every_cp_size(self):
        lines = [last_line(ranks) for ranks in (1, 2, 3, 4)]
        self.assertRegex(lines[0], r"^loss_hex=0x[0-9a-f]{8}$")
        self.assertEqual(len(set(lines)), 1, lines)

    def test_a_run_goes_on_at_another_cp_size(self):
        straight = last_line(1, "--phases", "1:12")
        self.assertEqual(last_line(4, "--phases", "4:4,1:2,3:4,2:2"), straight)
        self.assertNotEqual(last_line(1, "--phases", "1:11"), straight)

    def test_documents_that_are_not_a_multiple_of_anything(self):
        lines = {last_line(ranks, "--tokens", "333") for ranks in (1, 3, 4)}
        self.assertEqual(len(lines), 1, lines)

    def test_it_learns(self):
        done = run(2)
        losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", done.stdout)]
        self.assertGreater(losses[0], 5.0)  # about ln(256) before the first step
        self.assertLess(losses[-1], 3.2)  # knowing how often each byte occurs is worth 3.1

    def test_what_it_cannot_do(self):
        done = run(2, "--phases", "3:1")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("CP size 3, there are only 2 ranks", done.stderr)
        done = run(1, "--phases", "3")
        self.assertEqual(done.returncode, 2)
        self.assertIn("expected CP:STEPS", done.stderr)


if __name__ == "__main__":
    TRAINER, TEXT = sys.argv[1:3]
    unittest.main(argv=sys.argv[:1])
