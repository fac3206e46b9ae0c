#!/usr/bin/env python3
"""What the pages point at exists: link targets, anchors, and paths and file names in backticks."""

import posixpath
import re
import sys

from tree import FOLDERS, Finding, Tree, report

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE_SPAN = re.compile(r"`([^`]+)`")
_FILE_NAME = re.compile(r"[\w-]+\.(?:h|cpp|md|py|sh|cmake|yaml|safetensors)$")
_TOP = "|".join(re.escape(folder) for folder in FOLDERS)
_PATH = re.compile(rf"(?:{_TOP})/[\w./*{{}},-]*$")
_DOC_MENTION = re.compile(r"\bdocs/[\w-]+\.md\b")


def slug(heading):
    """The anchor a heading gets: as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def _prose(tree, name):
    """(number, line) pairs outside fenced blocks."""
    in_fence = False
    for number, line in tree.lines(name):
        if line.startswith("```"):
            in_fence = not in_fence
        elif not in_fence:
            yield number, line


def anchors(tree, name):
    return {slug(line.lstrip("#")) for _, line in _prose(tree, name) if line.startswith("#")}


def expand_braces(pattern):
    match = re.search(r"\{([^{}]*)\}", pattern)
    if not match:
        return [pattern]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [p for part in match[1].split(",") for p in expand_braces(head + part + tail)]


def _link_findings(tree, name, number, line):
    for target in _LINK.findall(line):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
        if not tree.exists(file):
            yield Finding(name, number, f"link to {target}: {file} does not exist")
        elif anchor and file.endswith(".md") and anchor not in anchors(tree, file):
            yield Finding(name, number, f"link to {target}: no such heading")


def _span_findings(tree, name, number, line, file_names):
    for span in _CODE_SPAN.findall(line):
        if _PATH.fullmatch(span):
            for path in expand_braces(span):
                if not tree.matches(path.rstrip("/")):
                    yield Finding(name, number, f"`{path}` does not exist")
        elif _FILE_NAME.fullmatch(span) and span not in file_names:
            yield Finding(name, number, f"`{span}`: no file has this name")


def check(tree):
    findings = []
    pages = tree.files((".md",))
    file_names = {posixpath.basename(p) for p in tree.files()} | {
        p.name for p in (tree.root / "tests/data").glob("*")
    }
    for name in pages:
        for number, line in _prose(tree, name):
            findings += _link_findings(tree, name, number, line)
            findings += _span_findings(tree, name, number, line, file_names)
    for name in tree.code():
        for number, line in tree.lines(name):
            for mention in _DOC_MENTION.findall(line):
                if not tree.exists(mention):
                    findings.append(Finding(name, number, f"{mention} does not exist"))
    if tree.exists("docs/README.md"):
        index = tree.text("docs/README.md")
        for name in pages:
            if name.startswith("docs/") and name != "docs/README.md":
                if f"({posixpath.basename(name)}" not in index:
                    findings.append(Finding("docs/README.md", 1, f"does not link to {name}"))
    return findings


if __name__ == "__main__":
    checkout = Tree(sys.argv[1])
    sys.exit(report(checkout, check(checkout), "links"))
