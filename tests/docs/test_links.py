"""Links lead somewhere, and no document knows the machine that it was written on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown import documents, links, name_of
from tests.pool.pool import ROOT

DOCUMENTS = documents()
OWN_PLACES = re.compile(r"(?<![\w.])/(?:work|home|root|tmp|Users|mnt|opt)/\w+")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_relative_link_leads_to_a_file(path: Path) -> None:
    for target in links(path):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{name_of(path)} links to {target}"
        assert there.is_relative_to(ROOT), f"{name_of(path)} leaves the repository with {target}"
        if anchor:
            assert anchor in _anchors(there), f"{name_of(path)}: no heading for {target}"


@pytest.mark.parametrize(
    "path", [*DOCUMENTS, *sorted((ROOT / "examples").rglob("*.toml")), ROOT / "Makefile"], ids=name_of
)
def test_no_document_names_a_place_on_its_writers_machine(path: Path) -> None:
    assert not OWN_PLACES.findall(path.read_text())


def test_every_file_that_a_document_names_is_there() -> None:
    for path in DOCUMENTS:
        named = re.findall(r"`((?:docs|examples|tests|src|benchmarks)/[\w./-]+?)/?`", path.read_text())
        missing = {name for name in named if not (ROOT / name).exists()}
        assert not missing, f"{name_of(path)} names {missing}"


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
