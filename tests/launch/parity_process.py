"""Running cpattn parity from the outside: what the tests of it share."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

PROGRAM = os.path.abspath(sys.argv.pop(1))
SMALL = "--seq-len=300 --chunk-tokens=64 --heads=4 --kv-heads=2 --head-dim=16 --timeout=3".split()
MPIRUN = (
    "mpirun --oversubscribe --bind-to none --mca pml ob1 --mca btl vader,self "
    "--mca mpi_yield_when_idle 1"
).split()
PATIENCE = 120


def environment(**changes):
    variables = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    for name, value in changes.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    return variables


def execute(command, **changes):
    return subprocess.run(
        command,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def parity(*arguments, **changes):
    return execute([PROGRAM, "parity", *arguments], **changes)


class ReportCase(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.report_path = os.path.join(self.folder.name, "report.json")

    def report(self):
        with open(self.report_path, encoding="utf-8") as file:
            return json.load(file)

    def parity(self, *arguments, **changes):
        return parity(*arguments, f"--report={self.report_path}", **changes)
