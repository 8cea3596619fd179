"""The documents of the repository as tests read them: fenced blocks, commands, tables and links."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.pool.pool import ROOT

_FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.M)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A fenced block: the words behind its opening fence, and its lines."""

    words: tuple[str, ...]
    lines: list[str]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def documents() -> list[Path]:
    """Every Markdown file of the repository that is its own."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(path: Path) -> str:
    """The path as a test's name shows it."""
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[Block]:
    """Fenced blocks of one language, in order."""
    found = (Block(tuple(m[1].split()), m[2].splitlines()) for m in _FENCE.finditer(path.read_text()))
    return [block for block in found if block.words[:1] == (language,)]


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each line that is a command; what stands behind a # is for the reader."""
    for line in block.lines:
        if words := shlex.split(line, comments=True):
            yield words


def tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells, the header first and the rule left out."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                found[-1].append(cells)
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def links(path: Path) -> list[str]:
    """Targets of the links outside of fenced blocks."""
    return _LINK.findall(_FENCE.sub("", path.read_text()))


def make_recipe(target: str) -> list[str]:
    """The words of the one command that `make TARGET` runs once everything is installed."""
    match = re.search(rf"^{target}:.*\n\t(.+)$", (ROOT / "Makefile").read_text(), re.M)
    assert match, f"the Makefile has no target {target!r}"
    return shlex.split(match[1].replace("$(BIN)/", ""))


def copy_examples(folder: Path) -> None:
    """The examples where a command that runs in `folder` finds them, and `text`, a folder with little to read."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "text").mkdir()
    words = (ROOT / "README.md").read_text().split()
    for number in range(80):
        (folder / f"text/{number:03d}.txt").write_text(" ".join(words[number:] + words[:number]))
