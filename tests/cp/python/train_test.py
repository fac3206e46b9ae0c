"""docs/examples/train_torch.py: the same bits of loss at every number of ranks, also resumed."""

import os
import re
import tempfile
import unittest

from launch import outcome, run

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")
TRAINER = os.path.join(ROOT, "docs", "examples", "train_torch.py")
STEPS = 6


class Train(unittest.TestCase):
    def train(self, ranks, *arguments):
        """Losses of the steps, and the last line."""
        job = run(ranks, TRAINER, "--steps", str(STEPS), *arguments)
        self.assertEqual(job.returncode, 0, outcome(job))
        last = job.stdout.rstrip("\n").split("\n")[-1]
        self.assertRegex(last, r"^loss_hex=0x[0-9a-f]{8}$")
        return [float(x) for x in re.findall(r"step \d+  loss ([0-9.]+)", job.stdout)], last

    def test_one_loss(self):
        losses, alone = self.train(0)
        self.assertEqual(len(losses), STEPS)
        self.assertLess(losses[-1], losses[0])  # bytes at first sight cost 5.5 nats
        for ranks in (1, 2, 3, 4):
            with self.subTest(ranks=ranks):
                self.assertEqual(self.train(ranks)[1], alone)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "half.bin")
            self.assertNotEqual(self.train(4, "--save-at", "2", file)[1], alone)
            for ranks in (0, 3):
                with self.subTest(resumed_by=ranks):
                    losses, last = self.train(ranks, "--resume", file)
                    self.assertEqual((len(losses), last), (STEPS - 2, alone))

    def test_ranks_without_rows(self):
        """Two chunks of one document for four ranks."""
        alone = self.train(1, "--tokens", "64")
        self.assertEqual(self.train(4, "--tokens", "64"), alone)


if __name__ == "__main__":
    unittest.main()
