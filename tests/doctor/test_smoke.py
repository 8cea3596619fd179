"""The smoke test runs a small version of the job, says what failed, and never outlives its limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.cluster.probe import probe_host
from paceline.config import Setting
from paceline.doctor import smoke
from paceline.job.load import Job, job_of_settings
from paceline.job.resolve import resolve_job
from paceline.model.spec import parameter_count
from paceline.workers.processes import descendants


def _job(**values: object) -> Job:
    return job_of_settings({key.replace("__", "."): Setting(value, "test") for key, value in values.items()})


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("every cloud has a silver lining, and every pipe a leak. " * 400)
    return str(tmp_path / "text.txt")


@pytest.mark.limit(150)
def test_a_job_that_runs_is_tried_in_five_steps_on_two_ranks(text: str) -> None:
    found = smoke.try_out(_job(data__source=text, data__eval_fraction=0, run__steps=100_000, run__name="mine"), 120)
    assert found.finding is None, found.finding
    assert found.figures["steps"] == 5 and found.figures["exit"] == 0 and found.figures["loss"] > 0
    assert not Path("runs/mine").exists()


@pytest.mark.limit(60)
def test_a_source_that_is_not_there_is_the_finding() -> None:
    found = smoke.try_out(_job(data__source="/nowhere/text.txt"), 50)
    assert found.finding is not None and found.finding.id == "smoke"
    assert (
        "there is no file or folder /nowhere/text.txt" in found.finding.found and "exit code 78" in found.finding.found
    )


@pytest.mark.limit(60)
def test_a_job_that_hangs_is_ended_at_the_limit_with_all_its_processes(text: str) -> None:
    before = set(descendants(os.getpid()))
    found = smoke.try_out(_job(data__source=text, data__eval_fraction=0), 1.0)
    assert found.finding is not None and "did not end within 1.00 s" in found.finding.found
    assert found.figures["exit"] is None
    assert set(descendants(os.getpid())) == before


@pytest.mark.parametrize("preset", ["llama3-8b", "qwen3-0.6b", "gpt2-xl"])
def test_a_large_model_is_made_small_and_keeps_its_family(preset: str, tmp_path: Path) -> None:
    settings = smoke.small_version(_job(model__preset=preset, parallel__tp=8, parallel__dp_shard=4), tmp_path)
    small = resolve_job(job_of_settings(settings), 2, probe_host())
    assert parameter_count(small.spec) < smoke.SMALL_PARAMETERS and small.steps == 5
    large = resolve_job(_job(model__preset=preset), 2, probe_host())
    for kept in ("norm", "mlp", "positions", "vocab_size", "qk_norm", "tie_embeddings"):
        assert getattr(small.spec, kept) == getattr(large.spec, kept)
    assert (small.layout.tp, small.layout.dp_shard) == (1, 1), "a layout for 32 ranks does not go on two"


def test_a_layout_that_goes_on_two_ranks_is_kept(tmp_path: Path) -> None:
    settings = smoke.small_version(_job(parallel__dp_shard=2, parallel__zero_stage=2), tmp_path)
    layout = resolve_job(job_of_settings(settings), 2, probe_host()).layout
    assert layout.dp_shard == 2 and settings["parallel.zero_stage"].value == 2
