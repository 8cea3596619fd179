"""The tables of docs/guide/doctor.md, from checks and variables: `python -m paceline.doctor.reference PAGE`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.doctor.examine import all_checks
from paceline.doctor.variables import Wrong, table

PLACED = {
    "rdma": "with RDMA devices",
    "infiniband": "on InfiniBand",
    "efa": "on EFA",
    "gpus": "with GPUs",
    "nvlink": "with NVLink",
    "mi300": "on MI300",
    "no_roce": "without RoCE ports",
    "no_amd": "without AMD GPUs",
    "rails": "with a card per GPU",
    "virtual": "in a virtual machine",
    "bare_metal": "on bare metal",
    "several_ranks": "with several ranks",
}


def checks() -> str:
    """The table of checks."""
    rows = ["| check | severity | what it finds | why it matters | source |", "|---|---|---|---|---|"]
    rows += [
        f"| `{c.id}` | {c.severity} | {_cell(c.title)} | {_cell(c.why)} | {_cell(c.source)} |" for c in all_checks()
    ]
    return "\n".join(rows)


def variables() -> str:
    """The table of variables."""
    rows = ["| variable | wrong value | severity | why it matters | mend | source |", "|---|---|---|---|---|---|"]
    rows += [
        f"| `{r.name}` | {_cell(_said(r.wrong, r.said))} | {r.severity} | {_cell(r.why)} "
        f"| {_cell(r.mend or f'unset {r.name}')} | {_cell(r.source)} |"
        for r in table().variable
    ]
    return "\n".join(rows)


SECTIONS: Mapping[str, Callable[[], str]] = {"checks": checks, "variables": variables}


def with_sections(page: str, sections: Mapping[str, Callable[[], str]]) -> str:
    """A page whose parts between `<!-- NAME -->` and `<!-- end -->` are made anew."""
    for name, make in sections.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.S)
        text = make()
        page = pattern.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page)  # type: ignore[misc]
    return page


def _said(wrong: Wrong, said: str) -> str:
    """A row's condition in words."""
    words = [said] if said else _conditions(wrong)
    if wrong.unless:
        words.append(f"without {' and '.join(wrong.unless)}")
    if wrong.where is not None:
        words.append(PLACED[wrong.where])
    return ", ".join(words)


def _conditions(wrong: Wrong) -> list[str]:
    words = []
    if wrong.any:
        words.append("any")
    if wrong.is_ is not None:
        words.append(" or ".join(f"`{value}`" for value in wrong.is_))
    if wrong.is_not is not None:
        words.append(f"not {' or '.join(f'`{v}`' for v in wrong.is_not if v) or 'unset'}")
    if wrong.matches is not None:
        words.append(f"of the form `{wrong.matches}`")
    if wrong.not_matches is not None:
        words.append(f"not of the form `{wrong.not_matches}`")
    if wrong.below is not None:
        words.append(f"below {wrong.below:.0f}")
    if wrong.above is not None:
        words.append(f"above {wrong.above:.0f}")
    if wrong.below_variable is not None:
        words.append(f"below {wrong.below_variable[0]} ({wrong.below_variable[1]:.0f} unless set)")
    if wrong.options_beyond is not None:
        words.append("an option that is not known")
    if wrong.file is not None:
        words.append("a file that is missing")
    return words


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_sections(path.read_text(encoding="utf-8"), SECTIONS), encoding="utf-8")
