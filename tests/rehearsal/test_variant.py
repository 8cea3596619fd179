"""The jobs of a proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.job.load import load_job, split_words
from paceline.rehearsal.variant import base_words, other_variant, own_variant, precise_variant

FOLDER = Path("some folder/tiny-prove")


def words(*own: str) -> list[str]:
    return base_words(["examples/tiny.toml", *own], FOLDER, 10)


def test_the_job_is_the_users_own_but_for_its_length_and_place() -> None:
    variant = own_variant(words("run.epochs=3", "optimizer.lr=0.01", "checkpoint.dir=s3://bucket/x"), 3)
    job = load_job(*split_words(variant.words))
    assert job.run.steps == 10 and job.run.epochs is None and job.run.dir == "some folder/tiny-prove"
    assert job.optimizer.lr == 0.01 and job.checkpoint.dir == "auto" and job.run.record_samples
    assert variant.changes == () and variant.layout == "dp_replicate=3" and variant.procs == 3


def test_a_job_that_starts_from_another_run_is_proven_from_its_own_beginning() -> None:
    variant = own_variant(words("checkpoint.resume=runs/old", 'checkpoint.allow_missing=["model/head.*"]'), 2)
    section = load_job(*split_words(variant.words)).checkpoint
    assert section.start_from is None and section.allow_missing == ()


@pytest.mark.parametrize(
    ("own", "changes"),
    [
        ([], ("parallel.precision=fp64",)),
        (["parallel.precision=fp64"], ()),
        (["parallel.reduce_dtype=bf16"], ("parallel.precision=fp64", "parallel.reduce_dtype=auto")),
        (["parallel.reduce_dtype=fp32"], ("parallel.precision=fp64", "parallel.reduce_dtype=auto")),
        (
            ["parallel.precision=bf16", "parallel.parameter_dtype=bf16"],
            ("parallel.parameter_dtype=fp32", "parallel.precision=fp64"),
        ),
    ],
)
def test_float64_throughout(own: list[str], changes: tuple[str, ...]) -> None:
    variant = precise_variant(words(*own), 2)
    assert variant.changes == changes and variant.precision == "fp64"


@pytest.mark.parametrize(
    ("own", "procs", "layout", "changes"),
    [
        ([], 1, "one rank", ()),
        ([], 4, "dp_replicate=4", ()),
        (["parallel.dp_shard=-1"], 3, "dp_shard=3", ()),
        (["parallel.dp_shard=2"], 4, "dp_replicate=2 dp_shard=2", ()),
        (["parallel.dp_shard=2"], 3, "dp_shard=3", ("parallel.dp_replicate=1", "parallel.dp_shard=-1")),
        (["parallel.dp_shard=2", "parallel.dp_replicate=1"], 4, "dp_shard=4", ("parallel.dp_shard=-1",)),
        (["parallel.dp_shard=2"], 1, "one rank", ("parallel.dp_replicate=1", "parallel.dp_shard=-1")),
        (
            ["parallel.dp_shard=2", "parallel.zero_stage=2"],
            1,
            "one rank",
            ("parallel.dp_replicate=1", "parallel.dp_shard=-1", "parallel.zero_stage=auto"),
        ),
        (["batch.microbatch=12"], 4, "dp_replicate=4", ("batch.microbatch=auto",)),
        (["parallel.bucket_bytes=1MiB"], 1, "one rank", None),
    ],
)
def test_another_number_of_ranks_takes_the_fewest_changes(
    own: list[str], procs: int, layout: str, changes: tuple[str, ...] | None
) -> None:
    variant = other_variant(words(*own), procs)
    assert variant.layout == layout and variant.procs == procs
    if changes is not None:
        assert variant.changes == changes
    load_job(*split_words(variant.words))


def test_ranks_on_which_the_batch_does_not_divide_are_refused_before_anything_runs() -> None:
    with pytest.raises(JobError) as raised:
        other_variant(words(), 7)
    assert "24" in str(raised.value) and "7" in str(raised.value) and "--other" in str(raised.value)


@pytest.mark.parametrize(
    ("own", "given", "changes"),
    [
        ([], 8, ("batch.microbatch=8",)),
        ([], 7, ()),  # 24 sequences do not divide by it
        (["batch.microbatch=12"], 8, ()),
    ],
)
def test_the_microbatch_stays_where_it_can(own: list[str], given: int, changes: tuple[str, ...]) -> None:
    variant = other_variant(words(*own), 1, given)
    assert variant.changes == changes and (variant.microbatch == given) is ("batch.microbatch=8" in changes)
