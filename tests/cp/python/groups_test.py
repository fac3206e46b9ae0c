"""Groups of ranks, what one rank refuses and all hear, and how jobs end."""

import os
import time
import unittest

from launch import outcome, run, run_together

FOLDER = os.path.dirname(os.path.abspath(__file__))
GROUPS = os.path.join(FOLDER, "groups_program.py")


class Groups(unittest.TestCase):
    def check(self, ranks, *cases):
        job = run(ranks, GROUPS, *cases)
        self.assertEqual(job.returncode, 0, outcome(job))
        self.assertEqual(sorted(job.stdout.split("\n"))[1:], [f"ok {r}" for r in range(ranks)])

    def test_several_groups(self):
        self.check(4, "two_groups", "backwards_in_reverse", "identity")

    def test_refusals(self):
        for ranks in (2, 3):
            self.check(ranks, "refusals", "no_bfloat16")

    def test_small_problems(self):
        self.check(4, "closed_forms", "idle_ranks", "dual_chunk")

    def test_late_peer(self):
        self.check(3, "late_peer")


class World(unittest.TestCase):
    """Processes that were started together and do not find each other are no world each."""

    PROGRAM = "import cpattn; g = cpattn.world(); print(g.rank, g.size)"

    def test_processes_that_do_not_find_each_other_are_refused(self):
        for launcher, variables in (
            ("mpirun", dict(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1")),
            ("mpiexec", dict(PMI_SIZE="2", PMI_RANK="1")),
            ("srun", dict(SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")),
            ("torchrun", dict(WORLD_SIZE="2", RANK="1", TORCHELASTIC_RUN_ID="x")),
        ):
            for first in ("", "from mpi4py import MPI; "):
                with self.subTest(launcher, first=first):
                    job = run(0, "-c", first + self.PROGRAM, **variables)
                    self.assertEqual(job.returncode, 1, outcome(job))
                    self.assertRegex(
                        job.stderr,
                        rf"UnsupportedError: {launcher} started 2 processes \(\w+\), of which "
                        r"cpattn \(Open MPI .*\) finds 1: .*self_group\(\)",
                    )

    def test_what_says_nothing_about_this_job_is_no_matter(self):
        for ranks, variables in (
            (0, dict(WORLD_SIZE="4", SLURM_NTASKS="4", SLURM_PROCID="0")),
            (0, dict(SLURM_STEP_NUM_TASKS="1")),
            (0, dict(SLURM_STEP_NUM_TASKS="many")),
            (2, dict(SLURM_STEP_NUM_TASKS="4", WORLD_SIZE="4", TORCHELASTIC_RUN_ID="x")),
        ):
            with self.subTest(variables):
                job = run(ranks, "-c", self.PROGRAM, **variables)
                self.assertEqual(job.returncode, 0, outcome(job))
                size = max(ranks, 1)
                self.assertEqual(
                    sorted(job.stdout.split("\n"))[1:], [f"{rank} {size}" for rank in range(size)]
                )


class Ends(unittest.TestCase):
    def test_a_rank_that_raises_ends_the_job(self):
        """Nobody waits in MPI_Finalize for a rank that will never come."""
        program = "import cpattn; g = cpattn.world(); 1 / (g.rank - 1); g.all_gather(b'', 50.0)"
        started = time.monotonic()
        job = run(3, "-c", program)
        self.assertNotEqual(job.returncode, 0)
        self.assertIn("ZeroDivisionError", job.stderr)
        self.assertLess(time.monotonic() - started, 30)

    def test_two_jobs_at_once(self):
        program = "import cpattn; print(cpattn.world())"
        for job in run_together((2, ("-c", program)), (3, ("-c", program))):
            self.assertEqual(job.returncode, 0, outcome(job))


if __name__ == "__main__":
    unittest.main()
