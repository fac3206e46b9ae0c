#!/usr/bin/env python3
"""Every command and flag that the pages and configurations show is one that the program offers."""

import re
import subprocess
import sys

from tree import Finding, Tree, report

_COMMAND = re.compile(
    r"(?:(?<![\w./-])(?:build/bin/)?cpattn|quickstart\.sh)\s+([a-z]+)\b([^#`|\n]*)"
)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_CODE_SPAN = re.compile(r"`([^`]+)`")
_QUICKSTART = {"parity", "test", "build", "help"}


def _code(tree, name):
    """(number, text) of what is set as code: fenced, indented, or in backticks."""
    in_fence = False
    for number, line in tree.lines(name):
        if line.startswith("```"):
            in_fence = not in_fence
        elif in_fence or line.startswith("    ") or not name.endswith(".md"):
            yield number, line
        else:
            for span in _CODE_SPAN.findall(line):
                yield number, span


def commands(text):
    """(program, subcommand, flags) of each command in a line of code."""
    for match in _COMMAND.finditer(text):
        program = "quickstart" if match[0].startswith("quickstart") else "cpattn"
        yield program, match[1], _FLAG.findall(match[2])


def check(tree, flags_of):
    """`flags_of(subcommand)` is the set of flags it takes, or None when there is no such one."""
    findings = []
    pages = tree.files((".md",)) + [f for f in tree.files((".yaml",)) if f.startswith("configs/")]
    for name in pages:
        for number, text in _code(tree, name):
            for program, subcommand, flags in commands(text):
                if program == "quickstart":
                    if subcommand not in _QUICKSTART:
                        message = f"quickstart.sh has no command {subcommand}"
                        findings.append(Finding(name, number, message))
                    if subcommand != "parity":
                        continue
                offered = flags_of(subcommand)
                if offered is None:
                    findings.append(Finding(name, number, f"cpattn has no {subcommand}"))
                    continue
                for flag in flags:
                    if flag not in offered:
                        message = f"cpattn {subcommand} has no {flag}"
                        findings.append(Finding(name, number, message))
    return findings


def offered_by(program):
    known = {}

    def flags_of(subcommand):
        if subcommand not in known:
            run = subprocess.run(
                [program, subcommand, "--help"], capture_output=True, text=True, timeout=30
            )
            known[subcommand] = set(_FLAG.findall(run.stdout)) if run.returncode == 0 else None
        return known[subcommand]

    return flags_of


if __name__ == "__main__":
    checkout = Tree(sys.argv[1])
    sys.exit(report(checkout, check(checkout, offered_by(sys.argv[2])), "commands"))
