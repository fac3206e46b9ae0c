"""Runs a Python program under mpirun, as a user would, and hands back what it printed."""

import os
import subprocess
import sys

# Without root's ban, pinned cores and busy waiting: tests share their machine.
_MPIRUN = (
    "mpirun --oversubscribe --bind-to none --mca pml ob1 --mca btl vader,self "
    "--mca mpi_yield_when_idle 1"
).split()


def environment():
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def run(ranks, *arguments, timeout=60, **variables):
    """The completed process of `python ARGUMENTS` on this many ranks; 0: without mpirun."""
    command = [] if ranks == 0 else [*_MPIRUN, "-np", str(ranks)]
    return subprocess.run(
        [*command, sys.executable, "-B", *arguments],
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_together(*jobs, timeout=60):
    """As run(), of several (ranks, arguments) at once; their results in order."""
    started = [
        subprocess.Popen(
            [*_MPIRUN, "-np", str(ranks), sys.executable, "-B", *arguments],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for ranks, arguments in jobs
    ]
    try:
        results = []
        for job in started:
            out, err = job.communicate(timeout=timeout)
            results.append(subprocess.CompletedProcess(job.args, job.returncode, out, err))
        return results
    finally:  # of a job that ran out of time the others still run, too
        for job in started:
            if job.poll() is None:
                job.terminate()  # mpirun ends its ranks
                job.wait()


def outcome(job):
    """All that a finished job has to say, for messages."""
    return f"exit code {job.returncode}\n{job.stdout}{job.stderr}"
