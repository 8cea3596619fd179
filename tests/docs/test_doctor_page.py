"""The tables of docs/guide/doctor.md are those that the checks, the table of variables and the snapshots give."""

from __future__ import annotations

from paceline.doctor import reference
from tests.doctor import table
from tests.pool.pool import ROOT

PAGE = ROOT / "docs/guide/doctor.md"


def test_the_tables_of_the_page_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    made = reference.with_sections(page, {**reference.SECTIONS, **table.SECTIONS})
    assert page == made, "run make docs"
    for name in (*reference.SECTIONS, *table.SECTIONS):
        assert f"<!-- {name} -->" in page
