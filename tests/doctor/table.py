"""On which snapshots each check is proven, for docs/guide/doctor.md: `python -m tests.doctor.table PAGE`."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.doctor.reference import with_sections
from tests.doctor.hosts import healthy_hosts
from tests.doctor.sick import sick


def proven() -> str:
    """Per check its sick snapshots, by what is said of them."""
    rows = [
        f"All are silent on these healthy snapshots: {', '.join(healthy_hosts())}; alone, in pairs, and with a healthy job.",
        "",
        "| check | sick snapshots | what is said of them |",
        "|---|---|---|",
    ]
    for name, cases in sorted(sick().items()):
        said = "; ".join(case.says[0] for case in cases).replace("|", "\\|")
        rows.append(f"| `{name}` | {len(cases)} | {said} |")
    return "\n".join(rows)


SECTIONS = {"proven": proven}

if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_sections(path.read_text(encoding="utf-8"), SECTIONS), encoding="utf-8")
