"""The programs of docs/python.md run as written, and print what the page says they do."""

import os
import re
import tempfile
import unittest

from launch import outcome, run

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")


class Docs(unittest.TestCase):
    def setUp(self):
        with open(os.path.join(ROOT, "docs", "python.md"), encoding="ascii") as page:
            self.page = page.read()
        self.first, self.maxima = re.findall(r"```python\n(.*?)```", self.page, re.DOTALL)

    def printed_by(self, program, all_ranks):
        """What it prints, which is the same for every number of ranks."""
        self.assertLess(program.count("\n"), 25)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "program.py")
            with open(file, "w", encoding="ascii") as out:
                out.write(program)
            lines = set()
            for ranks in all_ranks:
                job = run(ranks, file)
                self.assertEqual(job.returncode, 0, outcome(job))
                lines.add(job.stdout)
        self.assertEqual(len(lines), 1, lines)
        return lines.pop()

    def test_the_first_program(self):
        printed = self.printed_by(self.first, (0, 2, 3))
        self.assertRegex(printed, r"^1000 rows, norm [0-9]+\.[0-9]{12}\n$")

    def test_the_largest_logits(self):
        self.assertIn(f"\n    {self.printed_by(self.maxima, (0, 2))}", self.page)


if __name__ == "__main__":
    unittest.main()
