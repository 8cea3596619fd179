"""Layouts and settings that cannot run, or have no effect, are refused by the command itself: nothing is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.audited import STARTED, TORCH
from tests.cli.job import SMALL, TEXT
from tests.pool.launch import Launcher

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Else the probe of the host asks nvidia-smi, which is a process as well."""


@pytest.mark.parametrize(
    ("procs", "words", "texts"),
    [
        (4, ["parallel.dp_shard=3"], ["dp_shard 3 = 3", "4 ranks", "1 or 2 or 4"]),
        (
            4,
            ["parallel.dp_replicate=3", "parallel.dp_shard=2"],
            ["3 x dp_shard 2 = 6", "4 ranks", "6 ranks with --procs"],
        ),
        (4, ["parallel.dp_replicate=-1", "parallel.dp_shard=-1"], ["only one axis can be -1"]),
        (1, ["parallel.zero_stage=2"], ["parallel.zero_stage", "no effect", "one rank"]),
        (2, ["parallel.zero_stage=1"], ["parallel.zero_stage", "no effect", "parallel.dp_shard=2"]),
        (2, ["parallel.reduce_every=microbatch"], ["parallel.reduce_every", "whole gradients"]),
        (1, ["parallel.reduce_every=step"], ["parallel.reduce_every", "one data rank"]),
        (1, ["parallel.reduce_dtype=bf16"], ["parallel.reduce_dtype", "one data rank"]),
        (1, ['parallel.bucket_bytes="4MiB"'], ["parallel.bucket_bytes", "one data rank"]),
        (1, ["parallel.overlap=false"], ["parallel.overlap", "one data rank"]),
        (2, ["parallel.dp_shard=2", "parallel.overlap=false"], ["parallel.overlap", "dp_shard = 2"]),
        (
            2,
            ["parallel.dp_shard=2", "parallel.parameter_dtype=bf16", "parallel.precision=bf16"],
            ["parallel.parameter_dtype", "gathered in bf16 already"],
        ),
        (
            2,
            ["parallel.dp_shard=2", "parallel.zero_stage=1", "parallel.reduce_dtype=bf16", "batch.microbatch=1"],
            ["parallel.reduce_dtype", "reduce_every=microbatch"],
        ),
        (2, ["parallel.offload=host"], ["parallel.offload"]),
        (4, ["parallel.tp=4"], ["parallel.tp", "2 query heads cannot be split over 4 ranks", "1, 2"]),
        (2, ["parallel.tp=2", "model.ffn_dim=33"], ["33 numbers of the feed-forward layer"]),
        (3, ["parallel.cp=3"], ["32 tokens does not divide into the 6 chunks of cp = 3", "30 or 36"]),
        (2, ["parallel.pp=2"], ["2 stages, and the model has 1 blocks", "at most 1"]),
        (
            2,
            ["parallel.pp=2", "model.num_layers=2", "batch.microbatch=8"],
            ["1f1b takes at least as many micro-batches as stages, 2, and there are 1", "1 or 2 or 4"],
        ),
        (2, ["parallel.pp=2", "model.num_layers=2", "batch.microbatch=3"], ["3 does not divide the 8 sequences"]),
        (2, ["parallel.cuda_graphs=true"], ["parallel.cuda_graphs", "on a processor", "Remove it"]),
        (2, ["parallel.precision=fp8"], ["parallel.precision", "no float8 products", "bf16"]),
    ],
)
def test_nothing_is_started_for_a_job_that_is_refused(
    launch: Launcher, tmp_path: Path, procs: int, words: list[str], texts: list[str]
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    before = set(tmp_path.iterdir())
    done = launch(["train", *SMALL, *words, "--procs", procs], module="tests.cli.audited", env=NO_GPU)
    assert done.returncode == 78, done.stderr
    for text in texts:
        assert text in done.stderr
    assert STARTED not in done.stderr and TORCH not in done.stderr and "Traceback" not in done.stderr
    assert {path for path in set(tmp_path.iterdir()) - before if not path.name.startswith(".command")} == set()


def test_the_audit_sees_what_a_good_job_starts(launch: Launcher, tmp_path: Path) -> None:
    """And the defaults of what is refused above are not judged."""
    (tmp_path / "text.txt").write_text(TEXT)
    words = [*SMALL, "run.steps=1", "data.eval_fraction=0", 'parallel.reduce_every="auto"', 'parallel.overlap="auto"']
    done = launch(["train", *words, "--procs", "1"], module="tests.cli.audited", env=NO_GPU)
    assert done.returncode == 0, done.stderr
    assert STARTED in done.stderr
