"""Many faults from one seed: the figures of a handful that are made up, and the long run itself under `make soak`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.faults import figures_of
from benchmarks.launch import environment
from benchmarks.record import ROOT

from paceline.drill.result import Trial


def trial(kind: str, **fields: Any) -> Trial:
    values = {
        "kind": kind, "survived": True, "detect_seconds": 1.0, "recover_seconds": 4.0, "steps_redone": 2, "equal": True,
        "attempts": 2, "struck_rank": 1, "struck_step": 9, "named_rank": 1, "named": "stopped",
    }  # fmt: skip
    return Trial(**{**values, **fields})


def test_a_fault_that_is_lost_or_late_or_blamed_on_another_rank_makes_a_figure_fall_short() -> None:
    sound = [trial("stop") for _ in range(10)]
    assert all(figure.reached is not False for figure in figures_of(sound, 0.1))
    for spoilt, name in (
        (trial("stop", survived=False), "faults survived"),
        (trial("stop", equal=False), "equal bit for bit (other ranks: losses)"),
        (trial("stop", detect_seconds=3.5), "longest until a hang is on record"),
    ):
        short = [figure.name for figure in figures_of([*sound, spoilt], 0.1) if figure.reached is False]
        assert short == [name]
    # A tenth may be blamed wrongly, not a fifth; a slow step gives a slower look.
    assert all(f.reached is not False for f in figures_of([*sound, trial("stop", named_rank=0)], 0.1))
    assert any(f.reached is False for f in figures_of([*sound, *[trial("stop", named_rank=0)] * 3], 0.1))
    assert all(f.reached is not False for f in figures_of([*sound, trial("stop", detect_seconds=3.5)], 1.0))


# R29
@pytest.mark.soak
@pytest.mark.limit(2 * 3600)
def test_two_hundred_faults_from_one_seed_are_survived(tmp_path: Path) -> None:
    output = tmp_path / "faults.json"
    command = [sys.executable, "-m", "benchmarks.faults", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), check=False)
    figures = json.loads(output.read_text())["figures"]
    assert done.returncode == 0 and all(figure["reached"] is not False for figure in figures), figures
