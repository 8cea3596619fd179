"""`[checkpoint]`: every key has an effect or is refused, and the resolved file reads back the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster.probe import probe_host
from paceline.errors import JobError
from paceline.job.load import load_job
from paceline.job.resolve import resolve_job
from paceline.job.write import resolved_toml


@pytest.mark.parametrize(
    ("word", "steps", "seconds"),
    [("auto", None, None), ("end", None, None), ("100", 100, None), ("10m", None, 600.0), ("1h30m", None, 5400.0)],
)
def test_every_is_steps_a_time_or_a_word(word: str, steps: int | None, seconds: float | None) -> None:
    section = load_job(None, [f"checkpoint.every={word}"]).checkpoint
    assert (section.every_steps, section.every_seconds) == (steps, seconds)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["checkpoint.every=0"], ">= 1"),
        (["checkpoint.every=0s"], "more than 0s"),
        (["checkpoint.every=-5"], ">= 1"),
        (["checkpoint.every=2.5"], "2.5"),
        (["checkpoint.every=true"], "True"),
        (["checkpoint.every=often"], "auto, end, a number of steps such as 100"),
        (["checkpoint.keep=0"], ">= 1"),
        (["checkpoint.keep_best=-1"], ">= 0"),
        (["checkpoint.storage_timeout=0s"], "more than 0s"),
        (["checkpoint.storage_timeout=60"], "no unit"),
        (["checkpoint.dir="], "1"),
        (["checkpoint.best_of=eval"], "keep_best"),
        (['checkpoint.allow_missing=["model/head.*"]'], "resume"),
        (['checkpoint.allow_unexpected=["model/head.*"]', "checkpoint.resume=never"], "resume"),
        (["checkpoint.keep_best=2"], "run.eval_every"),
        (["checkpoint.keep_best=2", "run.eval_every=10", "data.eval_fraction=0"], "eval"),
        (["checkpoint.keep_best=2", "run.eval_every=10", "checkpoint.best_of=other"], "eval"),
    ],
)
def test_what_has_no_effect_or_no_sense_is_refused(words: list[str], named: str) -> None:
    with pytest.raises(JobError, match=r"checkpoint") as raised:
        load_job(None, words)
    assert named in str(raised.value) and raised.value.exit_code == 78


def test_several_eval_sets_need_a_name() -> None:
    words = ["checkpoint.keep_best=1", "run.eval_every=10", 'data.eval={code = "stdlib"}']
    with pytest.raises(JobError, match=r"checkpoint\.best_of") as raised:
        load_job(None, words)
    assert "code" in str(raised.value) and "eval" in str(raised.value)
    assert load_job(None, [*words, "checkpoint.best_of=code"]).checkpoint.best_of == "code"


def test_patterns_belong_to_another_runs_checkpoint() -> None:
    section = load_job(
        None, ["checkpoint.resume=runs/old", 'checkpoint.allow_missing=["model/head.*"]', "checkpoint.dir=s3://b/run"]
    ).checkpoint
    assert section.start_from == "runs/old" and section.place(Path("runs/new")) == "s3://b/run"
    assert load_job(None).checkpoint.place(Path("runs/new")) == "runs/new/checkpoints"


def test_the_resolved_file_reads_back_the_same(tmp_path: Path) -> None:
    words = ["checkpoint.every=10m", "checkpoint.keep=2", "checkpoint.keep_best=1", "run.eval_every=5",
             "checkpoint.best_of=eval", "checkpoint.dir=/mnt/x", "checkpoint.storage_timeout=90s",
             "checkpoint.resume=runs/a", 'checkpoint.allow_missing=["model/head.*"]']  # fmt: skip
    for given in (words, ["checkpoint.every=50"], ["checkpoint.every=end"], []):
        job = load_job(None, [*given, "run.name=x"])
        (tmp_path / "job.toml").write_text(resolved_toml(resolve_job(job, 2, probe_host())))
        assert load_job(tmp_path / "job.toml").checkpoint == job.checkpoint
