"""Ranks as processes, with and without mpi4py: the same bits for every number of them."""

import os
import re
import unittest

from launch import outcome, run

FOLDER = os.path.dirname(os.path.abspath(__file__))
PARITY = os.path.join(FOLDER, "parity_program.py")


class Parity(unittest.TestCase):
    def test_bits_are_those_of_one_rank(self):
        def lines(job, ranks):
            self.assertEqual(job.returncode, 0, outcome(job))
            found = sorted(re.findall(r"rank (\d+) of (\d+): (.*)", job.stdout))
            self.assertEqual([r for r, _, _ in found], [str(r) for r in range(ranks)], outcome(job))
            self.assertEqual({size for _, size, _ in found}, {str(ranks)})
            return {text for _, _, text in found}

        alone = lines(run(0, PARITY), 1)
        # One digest for both shardings, through numpy and through torch.
        self.assertRegex(alone.copy().pop(), r"^causal [0-9a-f]{64}, full [0-9a-f]{64}$")
        self.assertEqual(lines(run(0, PARITY, "--mpi4py"), 1), alone)
        for ranks in (1, 2, 3, 4):
            for arguments in ((), ("--mpi4py",)):
                with self.subTest(ranks=ranks, arguments=arguments):
                    self.assertEqual(lines(run(ranks, PARITY, *arguments), ranks), alone)


if __name__ == "__main__":
    unittest.main()
