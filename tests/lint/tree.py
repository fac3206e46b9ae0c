"""The files a linter reads: our own text, never what a build or a user left beside it."""

import pathlib
import re
from dataclasses import dataclass

FOLDERS = (".ci", "configs", "cp", "docs", "kernels", "launch", "src", "tests")
CODE_SUFFIXES = (".c", ".h", ".cpp", ".cu", ".cuh", ".inc")
_OTHER_SUFFIXES = (".cmake", ".in", ".json", ".md", ".py", ".sh", ".txt", ".yaml", ".yml")
TEXT_SUFFIXES = CODE_SUFFIXES + _OTHER_SUFFIXES
SCRIPTS = (".ci/run",)
SKIPPED = re.compile(r"tests/data/.*\.txt$|(?:.*/)?__pycache__/")  # words of others; caches


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    message: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.message}"


class Tree:
    """A checkout; paths are relative to its root, with forward slashes."""

    def __init__(self, root):
        self.root = pathlib.Path(root).resolve()
        self._texts = {}

    def files(self, suffixes=TEXT_SUFFIXES):
        candidates = [p for p in self.root.iterdir() if p.is_file()]
        for folder in FOLDERS:
            candidates += [p for p in (self.root / folder).rglob("*") if p.is_file()]
        names = (p.relative_to(self.root).as_posix() for p in candidates)
        return sorted(
            name
            for name in names
            if (name.endswith(suffixes) or (name in SCRIPTS and suffixes == TEXT_SUFFIXES))
            and not SKIPPED.match(name)
        )

    def code(self):
        return self.files(CODE_SUFFIXES)

    def text(self, name):
        if name not in self._texts:
            raw = (self.root / name).read_bytes()
            self._texts[name] = raw.decode("utf-8", errors="replace")
        return self._texts[name]

    def lines(self, name):
        """(number, line) pairs, from 1."""
        return enumerate(self.text(name).split("\n"), start=1)

    def exists(self, name):
        return (self.root / name).exists()

    def matches(self, pattern):
        return any(True for _ in self.root.glob(pattern))


# A comment, or a string or character literal; an apostrophe between digits separates them.
_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])*'""", re.DOTALL
)


def _blank(match):
    text = match.group(0)
    if text[0] in "\"'":
        return text[0] + text[0]
    return "".join(c if c == "\n" else " " for c in text)


def without_comments_and_strings(text):
    """C++ text with comments blanked and literals emptied; line numbers stay."""
    return _TOKEN.sub(_blank, text)


def report(tree, findings, what):
    """Prints what was found; the exit status. A tree without code was not looked at at all."""
    if not tree.code():
        findings = [*findings, Finding(".", 1, f"no code under {tree.root}")]
    for finding in findings:
        print(finding)
    print(f"{what}: {len(findings)} finding(s)")
    return 1 if findings else 0
