#!/usr/bin/env python3
"""The linters can fail: every rule is fed a tree that breaks it, and one that does not."""

import contextlib
import io
import pathlib
import tempfile
import unittest

import commands
import layering
import links
import text
from tree import Tree, report

_HEADER = "#pragma once\n"


class LintTest(unittest.TestCase):
    def findings(self, linter, files):
        with tempfile.TemporaryDirectory() as root:
            for name, content in files.items():
                path = pathlib.Path(root) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode("utf-8"))
            return [str(finding) for finding in linter.check(Tree(root))]

    def assert_clean(self, linter, files):
        self.assertEqual([], self.findings(linter, files))

    def assert_found(self, linter, files, expected):
        """Exactly one finding, and it is this one."""
        found = self.findings(linter, files)
        self.assertEqual(1, len(found), found)
        self.assertIn(expected, found[0])


class ReportTest(LintTest):
    def test_exit_status(self):
        with tempfile.TemporaryDirectory() as root, contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(1, report(Tree(root), [], "an empty tree"))
            (pathlib.Path(root) / "cp").mkdir()
            (pathlib.Path(root) / "cp/a.h").write_text(_HEADER)
            self.assertEqual(0, report(Tree(root), [], "a clean tree"))
            self.assertEqual(1, report(Tree(root), ["cp/a.h:1: odd"], "one finding"))


class LayeringTest(LintTest):
    def include(self, name, header):
        """The tree in which `name` includes our `header`, which exists."""
        files = {header: _HEADER}
        files[name] = (_HEADER if name.endswith((".h", ".cuh")) else "") + f'#include "{header}"\n'
        return files

    def test_arrows_that_hold(self):
        for name, header in (
            ("src/device/a.h", "src/base/b.h"),
            ("src/comm/a.h", "src/device/b.h"),
            ("kernels/a.h", "src/base/b.h"),
            ("kernels/cpu/a.cpp", "kernels/b.h"),
            ("kernels/cpu/a.cpp", "kernels/cpu/b.h"),
            ("kernels/kernel_table.cpp", "kernels/cpu/b.h"),
            ("cp/a.cpp", "src/comm/b.h"),
            ("cp/a.cpp", "kernels/b.h"),
            ("kernels/cuda/a.cu", "kernels/cuda/a.cuh"),
            ("kernels/cuda/host/a.cpp", "kernels/cuda/b.h"),
            ("launch/a.cpp", "cp/b.h"),
            ("launch/a.cpp", "kernels/reference/b.h"),
            ("tests/cp/a_test.cpp", "launch/b.h"),
        ):
            with self.subTest(name=name, header=header):
                self.assert_clean(layering, self.include(name, header))

    def test_arrows_that_do_not_hold(self):
        for name, header in (
            ("src/base/a.h", "src/device/b.h"),
            ("src/device/a.h", "src/comm/b.h"),
            ("src/comm/a.cpp", "kernels/b.h"),
            ("src/base/a.cpp", "cp/b.h"),
            ("kernels/a.h", "src/comm/b.h"),
            ("kernels/a.h", "kernels/cpu/b.h"),
            ("kernels/cpu/a.cpp", "kernels/reference/b.h"),
            ("kernels/reference/a.cpp", "kernels/cpu/b.h"),
            ("kernels/cpu/a.cpp", "cp/b.h"),
            ("kernels/cuda/a.cuh", "kernels/cpu/b.h"),
            ("cp/a.cpp", "kernels/cpu/b.h"),
            ("cp/a.cpp", "launch/b.h"),
            ("launch/a.cpp", "tests/support/b.h"),
        ):
            with self.subTest(name=name, header=header):
                self.assert_found(layering, self.include(name, header), "may not look there")

    def test_includes_are_spelled_from_the_root(self):
        files = {"cp/b.h": _HEADER, "cp/a.cpp": '#include "b.h"\n'}
        self.assert_found(layering, files, "spell it from the repository root")

    def test_third_party_rooms(self):
        for name, header in (
            ("cp/a.cpp", "mpi.h"),
            ("src/comm/loopback_comm.cpp", "mpi.h"),
            ("cp/a.cpp", "omp.h"),
            ("kernels/a.cpp", "immintrin.h"),
            ("cp/a.cpp", "nlohmann/json.hpp"),
            ("src/base/a.cpp", "yaml-cpp/yaml.h"),
            ("kernels/a.cpp", "boost/program_options.hpp"),
            ("launch/a.cpp", "gtest/gtest.h"),
            ("cp/a.cpp", "unistd.h"),
            ("cp/a.cpp", "cuda_runtime.h"),
            ("src/device/cuda_stream.cpp", "cuda_runtime.h"),
            ("src/comm/a.cpp", "cuda_runtime_api.h"),
            ("src/device/cuda_stream.cpp", "nccl.h"),
            ("kernels/cuda/a.cu", "sys/mman.h"),
        ):
            with self.subTest(name=name, header=header):
                files = {name: f"#include <{header}>\n"}
                self.assert_found(layering, files, "not in this room")
        files = {"launch/a.h": _HEADER + "#include <fmt/format.h>\n"}
        self.assert_found(layering, files, "not in this room")
        self.assert_found(layering, {"cp/a.cpp": "#include <torch/torch.h>\n"}, "has no room")
        files = {
            "src/comm/mpi_comm.cpp": "#include <mpi.h>\n#include <span>\n",
            "src/comm/nccl_comm.cpp": "#include <nccl.h>\n",
            "src/device/cuda_stream.cpp": "#include <cuda_runtime_api.h>\n",
        }
        self.assert_clean(layering, files)

    def test_nothing_below_launch_prints_ends_or_reads_the_environment(self):
        for code, expected in (
            ('std::getenv("X");', "environment"),
            ('printf("x");', "prints"),
            ('std::fprintf(stderr, "x");', "prints"),
            ("std::cerr << 1;", "prints"),
            ("#include <iostream>", "prints"),
            ("std::exit(1);", "ends the process"),
            ("abort();", "ends the process"),
        ):
            for folder in ("src/base", "kernels", "cp"):
                with self.subTest(code=code, folder=folder):
                    self.assert_found(layering, {f"{folder}/a.cpp": code + "\n"}, expected)
            self.assert_clean(layering, {"launch/a.cpp": code + "\n"})

    def test_words_that_only_look_forbidden(self):
        self.assert_clean(
            layering,
            {
                "cp/a.cpp": "// exit(1) and printf(x) in a comment\n"
                'throw Error("do not abort() here");\n'
                "comm.abort(1, reason);\nvoid abort(int);\nFoo::abort(1);\n"
                "A& operator=(A&&) = default;\nconst int n = 1'000'000;\nsnprintf(p, n, q);\n"
            },
        )

    def test_headers(self):
        self.assert_found(layering, {"cp/a.h": "int f();\n"}, "#pragma once")
        self.assert_clean(layering, {"kernels/cpu/a-inl.h": "int f();\n"})
        files = {"cp/a.h": _HEADER + "using namespace std;\n"}
        self.assert_found(layering, files, "using namespace")

    def test_default_over_an_enum(self):
        files = {"launch/a.cpp": "  case Mode::fast:\n    break;\n  default:\n    break;\n"}
        self.assert_found(layering, files, "hides a new enumerator")
        files = {"launch/a.cpp": "  case Mode::fast:\n  case 1:\n  default:\n    break;\n"}
        self.assert_clean(layering, files)

    def test_assembly_room(self):
        files = {"kernels/cuda/a.cuh": _HEADER + 'asm volatile("bar.sync 1, 128;");\n'}
        self.assert_found(layering, files, "belongs to kernels/cuda/ptx")
        files = {"kernels/cuda/ptx_sm90.h": _HEADER + 'asm volatile("bar.sync 1, 128;");\n'}
        self.assert_clean(layering, files)

    def test_openmp_room(self):
        self.assert_found(layering, {"cp/a.cpp": "#pragma omp parallel\n"}, "kernels/cpu")
        self.assert_clean(layering, {"kernels/cpu/a.cpp": "#pragma omp parallel\n"})


class TextTest(LintTest):
    def test_lines_that_break_a_rule(self):
        for name, content, expected in (
            ("cp/a.cpp", "// caf\u00e9\n", "not ASCII: U+00E9"),
            ("cp/a.cpp", "\tint x;\n", "tab"),
            ("cp/a.cpp", "int x; \n", "trailing blanks"),
            ("cp/a.cpp", "int x;", "no newline at the end"),
            ("cp/a.cpp", "/" * 101 + "\n", "101 columns, at most 100"),
            ("docs/a.md", "x" * 121 + "\n", "121 columns, at most 120"),
            ("cp/a.cpp", "int x;\n" * 501, "501 lines, at most 500"),
            ("docs/a.md", "see /home/someone/file\n", "absolute path"),
            ("cp/a.cpp", "// TODO later\n", "left open"),
            ("cp/a.cpp", "#if 0\n", "left open"),
            ("tests/cp/a_test.cpp", "GTEST_SKIP();\n", "a test that does not run"),
            ("CMakeLists.txt", "add_compile_options(-ffast-math)\n", "fast-math"),
        ):
            with self.subTest(content=content[:40]):
                self.assert_found(text, {name: content}, expected)

    def test_lines_that_keep_to_them(self):
        self.assert_clean(
            text,
            {
                "cp/a.cpp": "/" * 100 + '\nauto s = R"(\n' + "x" * 120 + '\n)";\n',
                "docs/a.md": "```\n" + "x" * 200 + "\n```\n| " + "x" * 200 + " |\n",
                "CMakeLists.txt": "add_compile_options(-fno-fast-math)\n",
                "tests/data/story.txt": "caf\u00e9\n",
                "tests/__pycache__/a.py": "\t\n",
            },
        )


class LinksTest(LintTest):
    def test_targets_that_exist(self):
        self.assert_clean(
            links,
            {
                "README.md": "[a](docs/a.md#two-words) [b](https://a.org/x) [c](#top)\n# Top\n",
                "docs/a.md": "# Two words\n`cp/plan.*`, `cp/{plan,ring}.h`, `plan.h`, `cp/`\n",
                "docs/README.md": "[a](a.md)\n",
                "cp/plan.h": "// docs/a.md\n",
                "cp/ring.h": "",
            },
        )

    def test_targets_that_do_not(self):
        for page, expected in (
            ("[a](missing.md)", "does not exist"),
            ("[a](#nowhere)", "no such heading"),
            ("`cp/missing.h`", "`cp/missing.h` does not exist"),
            ("`cp/missing.*`", "`cp/missing.*` does not exist"),
            ("`cp/{plan,missing}.h`", "`cp/missing.h` does not exist"),
            ("`missing.h`", "no file has this name"),
        ):
            with self.subTest(page=page):
                self.assert_found(links, {"README.md": page + "\n", "cp/plan.h": ""}, expected)

    def test_code_that_names_a_page(self):
        self.assert_found(links, {"cp/a.h": "// docs/missing.md\n"}, "docs/missing.md")

    def test_a_page_nobody_links_to(self):
        files = {"docs/README.md": "# Docs\n", "docs/a.md": "# A\n"}
        self.assert_found(links, files, "does not link to docs/a.md")


class CommandsTest(LintTest):
    def findings(self, linter, files):
        offered = {"parity": {"--cp", "--help"}, "plan": {"--json"}}

        class Bound:
            @staticmethod
            def check(tree):
                return linter.check(tree, offered.get)

        return super().findings(Bound, files)

    def test_what_the_program_offers(self):
        page = (
            "`build/bin/cpattn parity --cp 1,2` and cpattn does more in prose\n"
            "```\n./launch/quickstart.sh parity --cp=3   # --not-a-flag\n"
            "./launch/quickstart.sh test -L fast\n```\n    cpattn plan --json\n"
        )
        self.assert_clean(commands, {"README.md": page})

    def test_what_it_does_not(self):
        for page, expected in (
            ("`cpattn parity --size 3`", "cpattn parity has no --size"),
            ("```\nbuild/bin/cpattn plan --cp 1\n```", "cpattn plan has no --cp"),
            ("    cpattn bake --json", "cpattn has no bake"),
            ("`launch/quickstart.sh parity --json`", "cpattn parity has no --json"),
            ("`launch/quickstart.sh bake`", "has no command bake"),
        ):
            with self.subTest(page=page):
                self.assert_found(commands, {"README.md": page + "\n"}, expected)
        files = {"configs/parity/a.yaml": "# cpattn parity --json\n"}
        self.assert_found(commands, files, "cpattn parity has no --json")


if __name__ == "__main__":
    unittest.main()
