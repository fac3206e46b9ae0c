"""The first program of docs/python.md runs as written, and prints what the page says it does."""

import os
import re
import tempfile
import unittest

from launch import outcome, run

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")


class Docs(unittest.TestCase):
    def test_the_first_program(self):
        with open(os.path.join(ROOT, "docs", "python.md"), encoding="ascii") as page:
            (program,) = re.findall(r"```python\n(.*?)```", page.read(), re.DOTALL)
        self.assertLess(program.count("\n"), 25)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "first.py")
            with open(file, "w", encoding="ascii") as out:
                out.write(program)
            lines = set()
            for ranks in (0, 2, 3):
                job = run(ranks, file)
                self.assertEqual(job.returncode, 0, outcome(job))
                lines.add(job.stdout)
        self.assertEqual(len(lines), 1, lines)
        self.assertRegex(lines.pop(), r"^1000 rows, norm [0-9]+\.[0-9]{12}\n$")


if __name__ == "__main__":
    unittest.main()
