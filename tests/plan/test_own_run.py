"""A run of ours as the scoreboard reads it: the job that it kept, the steps of its last attempt."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.cluster.probe import probe_host
from paceline.errors import UsageError
from paceline.plan.against import against
from paceline.plan.own_run import WARM, own_run
from paceline.run.records import RecordWriter, RunStarted, Step
from tests.pool.pool import ROOT


def write_run(folder: Path, seconds: list[float], host: str) -> Path:
    """A run directory of two ranks on a processor, with a step of each length."""
    run = folder / "tiny"
    run.mkdir()
    shutil.copy(ROOT / "examples" / "tiny.toml", run / "job.toml")
    with RecordWriter(run, 1) as writer:
        writer.write(
            RunStarted(
                step=0, run_id="r", job_digest="d", world_size=2, layout={"dp_replicate": 2}, device="cpu",
                precision="fp32", compile=False, microbatch=12, accumulation=1, global_batch=24, sequence_length=128,
                parameters=1, flop_per_token=1.0, flop_convention="palm", host=host,
            )
        )  # fmt: skip
        for step, took in enumerate(seconds, 1):
            writer.write(
                Step(
                    step=step,
                    loss=1.0,
                    grad_norm=1.0,
                    lr=0.1,
                    tokens=3072,
                    seconds=took,
                    tokens_per_second=1.0,
                    mfu=None,
                    samples=24 * step,
                )
            )
    return run


def test_a_run_is_predicted_from_the_job_that_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path, [9.0] * WARM + [0.4, 0.5, 0.6], probe_host().name)
    found = own_run(run)
    assert found.setting is not None and found.setting.layout.dp == 2 and found.setting.global_batch == 24
    # The first steps do not count.
    assert found.measured["step_seconds"] == 0.5
    (row,) = [row for row in against(run)["rows"] if row["quantity"] == "step_seconds"]
    assert row["relative_error"] == pytest.approx(row["predicted"] / 0.5 - 1)


@pytest.mark.parametrize(
    ("seconds", "host", "reason"), [([1.0] * WARM, None, "do not count"), ([1.0] * 20, "elsewhere", "ran on elsewhere")]
)
def test_what_says_nothing_of_this_host_is_refused(
    seconds: list[float], host: str | None, reason: str, tmp_path: Path
) -> None:
    run = write_run(tmp_path, seconds, host or probe_host().name)
    with pytest.raises(UsageError, match=reason) as refused:
        own_run(run)
    assert refused.value.hint
