"""The faults of a run that something was done about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.run.records import read_records
from paceline.train.attempts import SUSPECTED


def acted_on(run: Path) -> list[dict[str, Any]]:
    """All but suspicions: on a busy machine a supervisor may have one that turns out to be nothing."""
    return [r for r in read_records(run, kinds=("fault",)) if not r["message"].startswith(SUSPECTED)]
