#!/usr/bin/env python3
"""What every text file keeps to: ASCII, line length, no tabs, no long files, nothing left open."""

import re
import sys

from tree import CODE_SUFFIXES, Finding, Tree, report

MAX_LINES = 500
MAX_CODE_COLUMNS = 100
MAX_PROSE_COLUMNS = 120

# One of our own machines' folders; a reader has none of them.
_PRIVATE_PATH = re.compile(r"(?<![\w.$}~*])/(?:home|root|tmp|work|Users)/\w")
_LEFT_OPEN = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b|^\s*#\s*if\s+0\b")
_SKIPPED_TEST = re.compile(r"\bGTEST_SKIP\b|\bDISABLED_\w|@unittest\.skip|\bWILL_FAIL\b")
_FAST_MATH = re.compile(r"-ffast-math|-Ofast|use_fast_math|-funsafe-math|-fassociative-math")
_OWN_FOLDER = "tests/lint/"  # these files spell out what they look for


_RAW_STRING = re.compile(r'R"\(.*?\)"', re.DOTALL)


def _raw_string_lines(text):
    """Numbers of the lines that a raw string literal covers: prose inside code."""
    numbers = set()
    for match in _RAW_STRING.finditer(text):
        first = text.count("\n", 0, match.start()) + 1
        numbers.update(range(first, first + match.group(0).count("\n") + 1))
    return numbers


def _is_prose(name):
    return not name.endswith(CODE_SUFFIXES + (".py", ".sh"))


def _is_generated_text(name):
    return name.startswith("tests/goldens/")


def _may_be_long(name, line):
    """Tables, links and fenced program output do not wrap."""
    return name.endswith(".md") and (line.startswith(("|", "    ")) or "](" in line)


def _column_findings(name, number, line, is_prose):
    limit = MAX_PROSE_COLUMNS if is_prose else MAX_CODE_COLUMNS
    if len(line) > limit and not _is_generated_text(name) and not _may_be_long(name, line):
        yield Finding(name, number, f"{len(line)} columns, at most {limit}")


def _line_findings(name, number, line):
    if not line.isascii():
        odd = next(c for c in line if not c.isascii())
        yield Finding(name, number, f"not ASCII: U+{ord(odd):04X}")
    if "\t" in line:
        yield Finding(name, number, "tab")
    if "\r" in line:
        yield Finding(name, number, "carriage return")
    if line != line.rstrip() and not _is_generated_text(name):
        yield Finding(name, number, "trailing blanks")
    if name.startswith(_OWN_FOLDER):
        return
    for pattern, message in (
        (_PRIVATE_PATH, "an absolute path of one machine"),
        (_LEFT_OPEN, "left open: finish it or take it out"),
        (_SKIPPED_TEST, "a test that does not run is not a test"),
        (_FAST_MATH, "fast-math changes bits"),
    ):
        if pattern.search(line):
            yield Finding(name, number, message)


def check(tree):
    findings = []
    for name in tree.files():
        text = tree.text(name)
        if text and not text.endswith("\n"):
            findings.append(Finding(name, text.count("\n") + 1, "no newline at the end"))
        if text.count("\n") > MAX_LINES:
            findings.append(Finding(name, 1, f"{text.count(chr(10))} lines, at most {MAX_LINES}"))
        raw_lines = _raw_string_lines(text) if name.endswith(CODE_SUFFIXES) else set()
        in_fence = False
        for number, line in tree.lines(name):
            if name.endswith(".md") and line.startswith("```"):
                in_fence = not in_fence
            findings += _line_findings(name, number, line)
            if not in_fence:
                is_prose = _is_prose(name) or number in raw_lines
                findings += _column_findings(name, number, line, is_prose)
    return findings


if __name__ == "__main__":
    checkout = Tree(sys.argv[1])
    sys.exit(report(checkout, check(checkout), "text"))
