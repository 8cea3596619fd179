"""The memory of a run of ours on the scoreboard: the peak of its ranks beside what its job is predicted to need."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.cluster.probe import probe_host
from paceline.job.load import load_job
from paceline.job.resolve import resolve_job
from paceline.plan import own_run
from paceline.plan.against import against
from tests.report.samples import simple_run


@pytest.fixture(autouse=True)
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the sample runs, in a folder without a measured cluster."""
    host = msgspec.structs.replace(probe_host(), name="box")
    monkeypatch.setattr(own_run, "probe_host", lambda: host)
    monkeypatch.chdir(tmp_path)


def test_the_peak_of_a_run_stands_beside_what_its_job_needs(tmp_path: Path) -> None:
    simple_run(tmp_path / "run")
    rows = {row["quantity"]: row for row in against(tmp_path / "run")["rows"]}
    resolved = resolve_job(load_job(tmp_path / "run/job.toml"), 2, probe_host())
    assert rows["memory_device_bytes"]["measured"] == 310_000_000
    assert rows["memory_device_bytes"]["predicted"] == resolved.memory.total_bytes
    assert rows["fits"]["predicted"] == 1.0
    assert rows["step_seconds"]["measured"] == pytest.approx(0.1, abs=0.01)


def test_a_run_that_did_not_end_has_no_peak(tmp_path: Path) -> None:
    simple_run(tmp_path / "cut", finished=False)
    assert set(own_run.own_run(tmp_path / "cut").measured) == {"step_seconds", "fits"}


def test_the_largest_peak_of_any_attempt_counts_by_the_kind_of_device() -> None:
    records = [{"kind": "run_finished", "peak_memory_bytes": peaks} for peaks in ([1, 3], [2, 2], [])]
    assert own_run.peak_memory([*records, {"kind": "step"}], "cuda") == {"memory_allocated_bytes": 3.0, "fits": 1.0}
    assert own_run.peak_memory(records, "cpu") == {"memory_device_bytes": 3.0, "fits": 1.0}
