#!/usr/bin/env python3
"""cpattn parity from the outside: verdicts, exit codes, ranks that die."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
import xml.etree.ElementTree as ElementTree

from parity_process import MPIRUN, PROGRAM, SMALL, ReportCase, environment, execute, parity


def ranks_of(launcher):
    """{rank: pid} of the ranks that a launcher has running."""
    ranks = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            with open(f"/proc/{name}/environ", "rb") as file:
                variables = dict(v.split(b"=", 1) for v in file.read().split(b"\0") if b"=" in v)
        except (OSError, ValueError):
            continue
        is_rank = any(word.startswith(b"--job-dir=") for word in words[2:])
        mark = variables.get(b"CPATTN_PARITY_TEST", b"").decode()
        if is_rank and b"OMPI_COMM_WORLD_RANK" in variables and mark == launcher:
            if os.path.basename(words[0]) == os.path.basename(PROGRAM).encode():
                ranks[int(variables[b"OMPI_COMM_WORLD_RANK"])] = int(name)
    return ranks


def heed_signals():
    """Under nohup, or in the background of a script, a process begins with signals ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s for {what}")


class VerdictTest(ReportCase):
    def test_every_size_sharding_mask_and_type_gives_the_bits_of_one_rank(self):
        result = self.parity(
            *SMALL,
            "--cp=1,2,3,4,7",
            "--sharding=contiguous,zigzag",
            "--mask=causal,full",
            "--dtype=f32,bf16",
            "--shuffle-arrival=11",
            "--verify-checksum=true",
        )

        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        report = self.report()
        self.assertEqual(report["verdict"], "PASS")
        self.assertEqual(len(report["lanes"]), 5 * 2 * 2 * 2)
        for lane in report["lanes"]:
            self.assertTrue(lane["pass"], lane)
            self.assertEqual(lane["bit_mismatch"], 0)
            sizes = {tensor["name"]: tensor["compared_elements"] for tensor in lane["tensors"]}
            self.assertEqual(sizes, {"out": 300 * 4 * 16, "lse": 300 * 4, "dq": 300 * 4 * 16,
                                     "dk": 300 * 2 * 16, "dv": 300 * 2 * 16})
            self.assertEqual(lane["compared_elements"], sum(sizes.values()))
            self.assertTrue(all(tensor["pass"] and tensor["rel_l2"] <= tensor["bound"]
                                and tensor["reference_rows"] == tensor["total_rows"] == 300
                                for tensor in lane["tensors"]), lane)
            self.assertEqual([rank["rank"] for rank in lane["ranks"]], list(range(lane["cp"])))
            self.assertEqual(sum(rank["rows"] for rank in lane["ranks"]), 300)
            self.assertEqual(lane["transport"], "mpi")
        errors = {
            (lane["mask"], lane["dtype"]): {str([tensor["rel_l2"] for tensor in other["tensors"]])
                                            for other in report["lanes"]
                                            if (other["mask"], other["dtype"])
                                            == (lane["mask"], lane["dtype"])}
            for lane in report["lanes"]
        }
        for values in errors.values():
            self.assertEqual(len(values), 1)  # the error does not grow with the number of ranks
        last = result.stdout.rstrip().splitlines()[-1]
        self.assertRegex(last, r"^verdict: PASS: 40 passed, 0 failed, 0 not evaluated; ")
        self.assertIn("bitwise across CP sizes", last)

    def test_the_direction_decides_what_is_compared(self):
        names = {"forward": ["out", "lse"], "backward": ["dq", "dk", "dv"],
                 "both": ["out", "lse", "dq", "dk", "dv"]}
        for direction, expected in names.items():
            with self.subTest(direction):
                result = self.parity(*SMALL, "--cp=2", f"--direction={direction}")

                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                for lane in self.report()["lanes"]:
                    self.assertEqual(lane["direction"], direction)
                    self.assertEqual([tensor["name"] for tensor in lane["tensors"]], expected)

    def test_an_incoming_gradient_of_lse_changes_gradients_and_keeps_their_bits(self):
        errors = []
        for dlse in ("false", "true"):
            result = self.parity(*SMALL, "--cp=1,2,3", f"--dlse={dlse}", "--direction=backward")

            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            errors.append([tensor["rel_l2"] for tensor in self.report()["lanes"][0]["tensors"]])
        self.assertNotEqual(errors[0][:2], errors[1][:2])
        self.assertEqual(errors[0][2], errors[1][2])  # dv does not know it

    def test_dlse_without_gradients_is_refused(self):
        result = parity(*SMALL, "--direction=forward", "--dlse")

        self.assertEqual(result.returncode, 2)
        self.assertIn("direction forward computes no gradients", result.stderr)

    def test_documents_of_any_length_and_ranks_without_tokens(self):
        result = self.parity(
            "--cp=1,4", "--cu-seqlens=0,0,1,70,70,200", "--chunk-tokens=64", "--heads=2",
            "--kv-heads=1", "--head-dim=8", "--mask=causal,full", "--out-dtype=same",
            "--dtype=f16,bf16", "--dlse",
        )

        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_arrival_is_judged_by_its_error_and_not_by_its_bits(self):
        result = self.parity(*SMALL, "--cp=2,3", "--schedule=arrival", "--mask=full")

        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        lanes = self.report()["lanes"]
        self.assertTrue(any(lane["bit_mismatch"] > 0 for lane in lanes))
        tensors = [tensor for lane in lanes for tensor in lane["tensors"]]
        self.assertTrue(any(tensor["bit_mismatch"] for tensor in tensors if tensor["name"] == "dk"))
        self.assertTrue(all(tensor["first_difference"] for tensor in tensors
                            if tensor["bit_mismatch"]))
        self.assertIn("whose schedule or sharding promises no bits differ from one rank",
                      result.stdout)

    def test_one_rank_that_was_not_asked_for_is_shown_as_the_baseline(self):
        result = self.parity(*SMALL, "--cp=2")

        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual([(lane["cp"], lane["baseline"]) for lane in self.report()["lanes"]],
                         [(1, True), (2, False)])
        self.assertIn("1 (baseline)", result.stdout)

    def test_junit_is_well_formed_and_counts(self):
        path = os.path.join(self.folder.name, "report.xml")
        result = self.parity(*SMALL, "--cp=1,2", "--inject=hop_dropped", f"--junit={path}")

        self.assertEqual(result.returncode, 1)
        suite = ElementTree.parse(path).getroot().find("testsuite")
        self.assertEqual((suite.get("tests"), suite.get("failures"), suite.get("errors")),
                         ("2", "1", "0"))
        failure = suite.find("testcase/failure")
        self.assertIn("differ in bits", failure.get("message"))

    def test_rounding_that_is_all_that_is_left_is_no_failure(self):
        """Weights below what f32 has; a single logit, and a single out, whose terms cancel."""
        cases = (
            "--distribution=outlier_channels --seed=851223 --heads=6 --kv-heads=2 --head-dim=5"
            " --value-dim=2 --softmax-scale=3 --cu-seqlens=0,1 --cu-seqlens-kv=0,33 --mask=full"
            " --chunk-tokens=16",
            "--distribution=large_logits --seed=822296 --heads=7 --kv-heads=1 --head-dim=31"
            " --value-dim=129 --seq-len=17 --kv-len=1 --chunk-tokens=100",
            "--distribution=outlier_channels --seed=32684 --heads=2 --kv-heads=1 --head-dim=2"
            " --value-dim=3 --softmax-scale=0.01 --seq-len=5 --kv-len=131 --chunk-tokens=1"
            " --schedule=arrival",
        )
        for case in cases:
            with self.subTest(case):
                result = self.parity("--cp=1", "--isa=generic", *case.split())

                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_nothing_to_compare_is_a_failure(self):
        result = self.parity("--cp=1", "--seq-len=0", "--heads=1", "--kv-heads=1", "--head-dim=8")

        self.assertNotEqual(result.returncode, 0)
        self.assertNotIn("verdict: PASS", result.stdout)

    def test_bc_097_the_exit_status_survives_a_pipe(self):
        command = (
            f'set -o pipefail; "{PROGRAM}" parity {" ".join(SMALL)} --cp=1,2 '
            f'--sharding=contiguous,zigzag --inject=zigzag_wrong_half | tee "{self.report_path}"'
        )
        result = execute(["bash", "-c", command])

        self.assertEqual(result.returncode, 1)
        self.assertIn("verdict: FAIL: 3 passed, 1 failed, 0 not evaluated", result.stdout)


class OutputTest(ReportCase):
    def shell(self, script):
        return execute(["bash", "-c", script, PROGRAM, "parity", *SMALL, "--cp=1,2",
                        f"--report={self.report_path}"], TMPDIR=self.folder.name)

    def test_standard_streams_that_are_closed_are_not_mistaken_for_files(self):
        result = self.shell('"$0" "$@" <&- >&- 2>&-')  # 4: the table could not be written

        self.assertEqual((result.returncode, self.report()["passed"]), (4, 2))

    def test_a_reader_that_leaves_early_costs_no_report_and_leaves_nothing_behind(self):
        result = self.shell('"$0" "$@" | true; exit ${PIPESTATUS[0]}')

        self.assertEqual((result.returncode, self.report()["passed"]), (128 + signal.SIGPIPE, 2))
        self.assertEqual(os.listdir(self.folder.name), ["report.json"])

    def test_a_full_device_is_no_pass(self):
        result = self.shell('"$0" "$@" >/dev/full')

        self.assertEqual(result.returncode, 4)
        self.assertIn("standard output cannot be written", result.stderr)

    def test_reports_that_cannot_be_written_are_refused_before_the_run(self):
        missing = os.path.join(self.folder.name, "missing", "report")
        for words in ([f"--report={missing}"], [f"--junit={self.folder.name}"],
                      [f"--report={self.report_path}", f"--junit={self.report_path}"]):
            with self.subTest(words):
                result = parity(*SMALL, "--cp=1", *words)

                self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertEqual(os.listdir(self.folder.name), [])


class RankFailureTest(ReportCase):
    """One rank of a job that hangs in the ring until its timeout is killed, stopped, or told to."""

    def start(self, cp, timeout, *arguments):
        self.mark = f"{os.getpid()}.{time.monotonic_ns()}"
        words = [word for word in SMALL if not word.startswith("--timeout")]
        process = subprocess.Popen(
            [PROGRAM, "parity", *words, f"--timeout={timeout}", f"--cp={cp}",
             f"--report={self.report_path}", *arguments],
            env=environment(CPATTN_PARITY_TEST=self.mark, TMPDIR=self.folder.name),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=heed_signals)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.stdout.close)
        self.addCleanup(lambda: process.poll() is None and process.kill())
        return process

    def ranks(self, count):
        def all_there():
            ranks = ranks_of(self.mark)
            return ranks if len(ranks) == count else None

        ranks = wait_for(all_there, 30, f"{count} ranks")
        time.sleep(1.0)  # past MPI_Init, into the ring
        return ranks

    def assert_ends(self, process, within):
        start = time.monotonic()
        out, err = process.communicate(timeout=within)
        self.assertLess(time.monotonic() - start, within)
        wait_for(lambda: not ranks_of(self.mark), 5, "the ranks to be gone")
        return out + err

    def test_bc_073_bc_095_killing_one_rank_ends_the_job_and_names_it(self):
        process = self.start(4, 60, "--inject=rank_never_answers")
        os.kill(self.ranks(4)[2], signal.SIGKILL)

        text = self.assert_ends(process, 20)

        self.assertEqual(process.returncode, 4, text)
        self.assertRegex(text, r"rank 2 \(pid \d+\) ended without a word: exited on signal 9")
        self.assertEqual(text.count("rank 2 (pid"), 1)
        self.assertEqual(self.report()["lanes"][-1]["status"], "failed")

    def test_stopping_one_rank_ends_the_job_within_the_timeout(self):
        # The last rank is the one that does not answer; stopped, it cannot even be asked to end.
        process = self.start(3, 5, "--inject=rank_never_answers")
        os.kill(self.ranks(3)[2], signal.SIGSTOP)

        text = self.assert_ends(process, 5 + 15)

        self.assertEqual(process.returncode, 4, text)
        self.assertRegex(text, r"rank 2\b")

    def test_stopping_mpirun_ends_the_job(self):
        process = self.start(2, 3, "--inject=rank_never_answers")
        ranks = self.ranks(2)
        with open(f"/proc/{ranks[0]}/stat", encoding="utf-8") as file:
            parent = int(file.read().rsplit(")", 1)[1].split()[1])
        os.kill(parent, signal.SIGSTOP)

        text = self.assert_ends(process, 3 + 20)

        self.assertEqual(process.returncode, 4, text)
        self.assertIn("mpirun has been stopped", text)

    def test_signals_are_passed_on_and_nothing_is_left(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(number):
                process = self.start(2, 60, "--inject=rank_never_answers")
                self.ranks(2)
                process.send_signal(number)

                text = self.assert_ends(process, 20)

                self.assertEqual(process.returncode, -number, text)
                self.assertNotIn("verdict: PASS", text)
                left = [name for name in os.listdir(self.folder.name) if "cpattn-" in name]
                self.assertEqual(left, [])

    def test_ranks_do_not_outlive_a_launcher_that_is_killed(self):
        process = self.start(2, 60, "--inject=rank_never_answers")
        self.ranks(2)
        process.kill()
        process.communicate(timeout=20)

        wait_for(lambda: not ranks_of(self.mark), 15, "the ranks to be gone")


class MpiEnvironmentTest(ReportCase):
    def test_bc_089_more_ranks_than_cores(self):
        core = str(min(os.sched_getaffinity(0)))
        result = execute(["taskset", "-c", core, PROGRAM, "parity", *SMALL, "--cp=1,4",
                          f"--report={self.report_path}"])

        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(self.report()["environment"]["cores"], "1")

    def test_bc_090_root_with_neither_one_or_both_variables(self):
        for one, both in ((None, None), ("1", None), ("1", "1")):
            with self.subTest((one, both)):
                result = self.parity(*SMALL, "--cp=1,2", OMPI_ALLOW_RUN_AS_ROOT=one,
                                     OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=both)

                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                self.assertEqual([lane["cp"] for lane in self.report()["lanes"]], [1, 2])

    def test_bc_094_long_messages_need_no_single_copy_and_are_checksummed(self):
        result = self.parity("--cp=2", "--seq-len=4096", "--heads=4", "--kv-heads=4",
                             "--reference-rows=16", "--verify-checksum=true")

        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        for rank in self.report()["lanes"][-1]["ranks"]:
            self.assertGreater(rank["bytes_sent"], 1 << 20)

    def test_bc_101_a_size_that_cannot_run_is_not_evaluated(self):
        result = self.parity(*SMALL, "--cp=1,2,4", PATH="/nonexistent")

        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertIn("1 passed, 0 failed, 2 not evaluated", result.stdout)
        self.assertIn("install openmpi-bin", result.stdout)
        self.assertEqual([lane["status"] for lane in self.report()["lanes"]],
                         ["passed", "not evaluated", "not evaluated"])

    def test_variables_of_a_batch_system_without_its_programs(self):
        # A container in a Slurm job: its variables, not its srun; nor is there an ssh.
        result = self.parity(*SMALL, "--cp=1,2", SLURM_JOBID="7", SLURM_JOB_ID="7",
                             SLURM_NODELIST="node[1-3]", SLURM_TASKS_PER_NODE="2(x3)",
                             PATH=os.path.dirname(shutil.which("mpirun")))

        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_an_mpirun_that_waits_for_nobody_is_ended(self):
        with tempfile.TemporaryDirectory() as folder:
            fake = os.path.join(folder, "mpirun")
            with open(fake, "w", encoding="utf-8") as file:
                file.write("#!/bin/sh\nexec sleep 600\n")
            os.chmod(fake, 0o755)
            started = time.monotonic()
            result = parity(*SMALL, "--cp=1", PATH=f"{folder}:/usr/bin:/bin")

        self.assertEqual(result.returncode, 4, result.stdout + result.stderr)
        self.assertIn("mpirun has had no rank running for 20 s", result.stdout)
        self.assertLess(time.monotonic() - started, 40)

    def test_one_rank_needs_no_mpirun(self):
        result = self.parity(*SMALL, "--cp=1", PATH="/nonexistent")

        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(self.report()["lanes"][0]["transport"], "loopback")

    def test_an_mpirun_that_fails_is_no_pass(self):
        for script in ("exit 0", "echo there are not enough slots >&2; exit 1"):
            with self.subTest(script), tempfile.TemporaryDirectory() as folder:
                fake = os.path.join(folder, "mpirun")
                with open(fake, "w", encoding="utf-8") as file:
                    file.write(f"#!/bin/sh\n{script}\n")
                os.chmod(fake, 0o755)
                result = parity(*SMALL, "--cp=1,2", PATH=f"{folder}:/usr/bin:/bin")

                self.assertEqual(result.returncode, 4, result.stdout + result.stderr)
                self.assertIn("no rank started", result.stdout)


class UnderMpirunTest(ReportCase):
    def mpirun(self, *words):
        return execute([*MPIRUN, *words])

    def test_is_one_size_of_the_comparison(self):
        result = self.mpirun("-n", "3", PROGRAM, "parity", *SMALL, "--mask=causal,full",
                             "--cp=1,3", f"--report={self.report_path}")

        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual({lane["cp"] for lane in self.report()["lanes"]}, {3})
        self.assertEqual((result.stdout.count("verdict:"), result.stderr.count("only 3")), (1, 1))

    def test_a_difference_is_the_exit_code(self):
        result = self.mpirun("-n", "2", PROGRAM, "parity", *SMALL, "--inject=bit_flip")

        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        self.assertIn("verdict: FAIL", result.stdout)

    def test_bc_075_different_sharding_is_refused_on_all_ranks(self):
        result = self.mpirun("-n", "1", PROGRAM, "parity", *SMALL, "--sharding=zigzag", ":",
                             "-n", "1", PROGRAM, "parity", *SMALL, "--sharding=contiguous")

        self.assert_refused_on_both(result, "sharding")

    def test_bc_075_different_files_are_refused_on_all_ranks(self):
        paths = []
        for seed in (1, 2):
            paths.append(os.path.join(self.folder.name, f"{seed}.yaml"))
            with open(paths[-1], "w", encoding="utf-8") as file:
                file.write(f"seed: {seed}\nseq_len: 100\n")
        result = self.mpirun("-n", "1", PROGRAM, "parity", f"--config={paths[0]}", ":",
                             "-n", "1", PROGRAM, "parity", f"--config={paths[1]}")

        self.assert_refused_on_both(result, "seed")

    def test_bc_075_another_size_than_was_started_is_refused(self):
        path = os.path.join(self.folder.name, "four.yaml")
        with open(path, "w", encoding="utf-8") as file:
            file.write("cp: [4]\n")
        for words in (["--cp=4"], [f"--config={path}"], ["--cp=1,3"]):
            with self.subTest(words):
                result = self.mpirun("-n", "2", PROGRAM, "parity", *SMALL, *words)

                self.assert_refused_on_both(result, "mpirun started 2 ranks")

    def test_the_mpirun_of_another_mpi_is_no_run_of_several_ranks(self):
        # What such an mpirun starts are processes that do not find each other.
        script = f'{PROGRAM} parity {" ".join(SMALL)} --report={self.report_path}'
        result = execute(["bash", "-c", script], OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1")

        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertRegex(result.stderr, "mpirun started 2 ranks, but Open MPI .* finds 1")
        self.assertFalse(os.path.exists(self.report_path))

        with tempfile.TemporaryDirectory() as folder:
            fake = os.path.join(folder, "mpirun")
            with open(fake, "w", encoding="utf-8") as file:
                file.write('#!/bin/bash\nn=$2\nwhile [[ $1 != "%s" ]]; do shift; done\n'
                           'for ((i = 0; i < n; i++)); do OMPI_COMM_WORLD_SIZE=$n '
                           'OMPI_COMM_WORLD_RANK=$i "$@" & done\nwait\n' % PROGRAM)
            os.chmod(fake, 0o755)
            result = self.parity(*SMALL, "--cp=1,2", PATH=f"{folder}:/usr/bin:/bin")

        self.assertEqual(result.returncode, 3, result.stdout + result.stderr)
        self.assertIn("mpirun started 2 ranks, but Open MPI", result.stdout)
        self.assertEqual([lane["status"] for lane in self.report()["lanes"]],
                         ["passed", "not evaluated"])

    def assert_refused_on_both(self, result, what):
        self.assertEqual(result.returncode, 2, result.stdout + result.stderr)
        self.assertNotIn("verdict", result.stdout)
        for rank in (0, 1):
            self.assertRegex(result.stderr, rf"cpattn: error: rank {rank}: .*{re.escape(what)}")

    def test_bc_076_variables_of_one_rank_change_nothing(self):
        # The library reads no environment: nothing a rank exports makes it differ from its peers.
        first = [word for flag in ("OMP_NUM_THREADS=3", "CPATTN_CHUNK_TOKENS=7", "CHUNK_TOKENS=7",
                                   "TIMEOUT=0", "OMP_SCHEDULE=dynamic")
                 for word in ("-x", flag)]
        case_a = self.mpirun("-n", "1", PROGRAM, "parity", *SMALL,
                             f"--report={self.report_path}", ":",
                             "-n", "1", *first, PROGRAM, "parity", *SMALL)
        self.assertEqual(case_a.returncode, 0, case_a.stdout + case_a.stderr)
        with_variables = self.report()["lanes"]
        case_b = self.mpirun("-n", "2", PROGRAM, "parity", *SMALL,
                             f"--report={self.report_path}")
        self.assertEqual(case_b.returncode, 0, case_b.stdout + case_b.stderr)

        for a, b in zip(with_variables, self.report()["lanes"], strict=True):
            self.assertEqual(a["bit_mismatch"], 0)
            self.assertEqual(a["tensors"], b["tensors"])

    def test_a_rank_that_never_answers_ends_the_job(self):
        result = self.mpirun("-n", "2", PROGRAM, "parity", *SMALL, "--inject=rank_never_answers",
                             f"--report={self.report_path}")

        self.assertEqual(result.returncode, 4, result.stdout + result.stderr)
        self.assertRegex(result.stderr, r"cpattn: error: rank 0: .*rank 1 .*3 s")
        self.assertIn("verdict: FAIL: 0 passed, 0 failed, 1 not evaluated", result.stdout)
        self.assertEqual(self.report()["verdict"], "FAIL")


if __name__ == "__main__":
    unittest.main(verbosity=2)
