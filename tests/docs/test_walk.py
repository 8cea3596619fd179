"""ARCHITECTURE.md leads a reader along names that are there, and the walk stays short enough to be walked."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.pool.pool import ROOT

SOURCE = ROOT / "src/paceline"
WALK = re.findall(r"^\d+\. `([\w/]+\.py): ([\w.]+)` ", (ROOT / "ARCHITECTURE.md").read_text(), re.M)
MOST_LINES = 3300
"""All lines of the walk's files."""
MOST_LINES_READ = 700
"""Lines of the functions that the walk names, which is what a reader reads."""


def test_the_walk_goes_from_the_command_to_the_reduction() -> None:
    assert WALK[0] == ("cli/__init__.py", "main")
    assert WALK[-1][0] == "parallel/ddp/apply.py"
    assert len(WALK) >= 12


@pytest.mark.parametrize(("file", "name"), WALK, ids=[f"{file}:{name}" for file, name in WALK])
def test_each_name_of_the_walk_is_defined_where_it_says(file: str, name: str) -> None:
    assert (SOURCE / file).is_file(), f"there is no {file}"
    assert _definition(SOURCE / file, name) is not None, f"{file} defines no {name}"


@pytest.mark.parametrize("place", range(1, len(WALK)), ids=[f"{f}:{n}" for f, n in WALK[1:]])
def test_each_station_is_named_by_one_before_it(place: int) -> None:
    file, name = WALK[place]
    before = "".join((SOURCE / earlier).read_text() for earlier in dict.fromkeys(f for f, _ in WALK[:place]))
    # A module that is started or loaded by its dotted name, or a function or class that is called.
    module = "paceline." + file.removesuffix(".py").replace("/", ".")
    called = re.search(rf"\b{name.split('.')[0]}\b", before)
    assert called or module in before, f"nothing before {file} leads to {name}"


def test_the_walk_is_short_enough_to_be_read() -> None:
    files = dict.fromkeys(file for file, _ in WALK)
    whole = sum(len((SOURCE / file).read_text().splitlines()) for file in files)
    read = sum(_length(SOURCE / file, name) for file, name in WALK)
    print(f"the walk: {len(WALK)} stations of {read} lines, in {len(files)} files of {whole} lines")
    assert whole <= MOST_LINES
    assert read <= MOST_LINES_READ


def test_the_nouns_and_seams_are_the_folders_that_are_there() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    named = set(re.findall(r"`(\w+)`", page.partition("## The nouns")[2].partition("## The seams")[0]))
    picture = set(re.findall(r"\w+", page.partition("```")[2].partition("```")[0]))
    verbs = {"train", "plan", "bench", "doctor", "prove", "report", "cli"}
    assert folders - verbs <= named, f"ARCHITECTURE.md leaves out {folders - verbs - named}"
    assert folders <= picture, f"the picture leaves out {folders - picture}"


def _definition(path: Path, name: str) -> ast.AST | None:
    """The function, class or method of a dotted name."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    found: ast.AST | None = None
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((node for node in body if isinstance(node, kinds) and node.name == part), None)
        if found is None:
            return None
        body = found.body
    return found


def _length(path: Path, name: str) -> int:
    node = _definition(path, name)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef) and node.end_lineno
    return node.end_lineno - node.lineno + 1
