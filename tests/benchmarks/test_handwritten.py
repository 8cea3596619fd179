"""The hand-written loop's schedule, which it writes for itself, against the product's."""

from __future__ import annotations

import msgspec
import pytest
from benchmarks.handwritten import Handwritten
from benchmarks.recipe import recipe_of

from paceline.cluster.probe import probe_host
from paceline.job.load import load_job
from paceline.job.resolve import resolve_job
from paceline.optim.schedule import learning_rate


def test_the_hand_written_schedule_is_the_jobs() -> None:
    job = load_job(None, ["run.steps=40", "optimizer.warmup_steps=7", "optimizer.min_lr_ratio=0.2"])
    loop = object.__new__(Handwritten)
    loop.recipe = recipe_of(resolve_job(job, 1, probe_host()))
    for step in range(45):
        assert loop.learning_rate(step) == pytest.approx(learning_rate(job.optimizer, step, 40, 24), rel=1e-12)


def test_a_job_that_the_loop_cannot_train_is_refused() -> None:
    job = load_job(None, ["optimizer.schedule=linear"])
    with pytest.raises(ValueError, match="cosine"):
        recipe_of(resolve_job(msgspec.structs.replace(job), 1, probe_host()))
