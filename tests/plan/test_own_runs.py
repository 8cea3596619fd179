"""A run of ours as a row of the scoreboard: measured step and peak beside what its job is predicted to need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.cluster.probe import probe_host
from paceline.errors import UsageError
from paceline.job.load import load_job
from paceline.job.resolve import resolve_job
from paceline.plan.against import against
from paceline.plan.own_runs import measured_figures, read_own_run
from tests.report.samples import simple_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """2 ranks, 10 steps of 0.1 s, peaks of 300 and 310 MB."""
    monkeypatch.chdir(tmp_path)
    simple_run(tmp_path / "run")
    return tmp_path / "run"


def row(document: dict[str, Any], quantity: str) -> dict[str, Any]:
    return next(row for row in document["rows"] if row["quantity"] == quantity)


def test_a_run_is_weighed_by_its_own_job_on_this_machine(run: Path) -> None:
    document = against(run)
    resolved = resolve_job(load_job(run / "job.toml"), 2, probe_host())
    step, memory = row(document, "step_seconds"), row(document, "memory_device_bytes")
    assert step["measured"] == pytest.approx(0.1, abs=0.01)
    assert step["predicted"] > 0 and step["reason"] is None
    assert memory["measured"] == 310_000_000
    assert memory["predicted"] == resolved.memory.total_bytes
    assert row(document, "fits")["predicted"] == 1.0
    assert document["summary"]["by_source"]["own"]["rows"] == 1


def test_the_first_steps_do_not_count() -> None:
    steps = [{"seconds": seconds} for seconds in (9.0, 7.0, 5.0, 0.1, 0.3, 0.2)]
    ended = [
        {"kind": "run_finished", "peak_memory_bytes": [1, 3]},
        {"kind": "run_finished", "peak_memory_bytes": [2, 2]},
    ]
    assert measured_figures(ended, steps, "cuda") == {"step_seconds": 0.2, "memory_allocated_bytes": 3.0, "fits": 1.0}


def test_a_run_that_did_not_end_has_no_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    simple_run(tmp_path / "cut", finished=False)
    assert set(read_own_run(tmp_path / "cut").measured) == {"step_seconds", "fits"}


def test_a_directory_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        read_own_run(tmp_path)
    assert cli.main(["plan", "--against", str(tmp_path), "--json"]) == 2
    assert "Give the directory of a run" in json.dumps(json.loads(capsys.readouterr().out)["error"])
