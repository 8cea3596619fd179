"""Sharded runs as a user starts them: one curve, one set of first weights, a save that `generate` reads, a plan by stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.run.records import read_records
from tests.cli.job import SMALL, TEXT
from tests.pool.launch import Launcher

LAYOUTS = [
    ("2", ["parallel.dp_shard=2"]),
    ("3", ["parallel.dp_shard=-1", "parallel.zero_stage=1", "batch.microbatch=2", "parallel.reduce_every=step"]),
    ("4", ["parallel.dp_replicate=2", "parallel.dp_shard=2", "batch.microbatch=1"]),
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.limit(150)
def test_sharded_ranks_walk_the_curve_of_one_process(launch: Launcher, text: Path) -> None:
    curves, hashes, evals = [], set(), []
    for procs, words in [("1", []), *LAYOUTS]:
        # 12 sequences divide by 1 to 4 ranks; 7 eval sequences by none of them
        every = [*SMALL, "batch.global_batch=12", "data.eval_sequences=7", "run.steps=8", "run.eval_every=4",
                 "parallel.precision=fp32", f"run.name=p{procs}", "--json"]  # fmt: skip
        done = launch(["train", *every, *words, "--procs", procs], timeout=90)
        assert done.returncode == 0, done.stderr
        evals.append(json.loads(done.stdout)["eval_loss"])
        records = list(read_records(text / "runs" / f"p{procs}", kinds=("step", "run_started")))
        curves.append([float(r["loss"]) for r in records if r["kind"] == "step"])  # type: ignore[arg-type]
        hashes |= {r["weights_hash"] for r in records if r["kind"] == "run_started"}
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-5)
    assert evals == pytest.approx([evals[0]] * len(evals), rel=1e-5)
    assert len(hashes) == 1
    done = launch(["generate", "runs/p2", "--prompt", "the dog", "--tokens", "5"], timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("the dog"), done.stderr


@pytest.mark.limit(90)
def test_a_bf16_run_is_sharded_evaluated_sampled_and_saved(launch: Launcher, text: Path) -> None:
    words = [*SMALL, "run.steps=4", "parallel.precision=bf16", "parallel.dp_shard=2", "--procs", "2", "--json"]
    done = launch(["train", *words], timeout=80)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["eval_loss"] is not None and "sample:" in done.stderr
    resolved = (text / "runs" / "default" / "job.toml").read_text()
    assert "zero_stage = 3 # derived" in resolved and 'reduce_every = "microbatch"' in resolved


def test_a_plan_shows_the_bytes_of_each_stage(launch: Launcher) -> None:
    words = ["model.preset=llama3-8b", "batch.global_batch=64", "data.sequence_length=8192", "parallel.dp_shard=8"]
    done = launch(["plan", *words, "--cluster", "1x8xa100-sxm-80g", "--fixed", "--json"])
    document = json.loads(done.stdout)
    chosen = document["chosen"]
    held = [entry["memory"] for entry in chosen["zero_stages"]]
    assert [entry["zero_stage"] for entry in chosen["zero_stages"]] == [1, 2, 3]
    assert chosen["memory"]["stages"][0] == held[2]
    for memory in held:  # 8,030,261,248 parameters
        assert memory["parameters_bytes"] == 4 * 8_030_261_248 // 8
        assert memory["moments_bytes"] == pytest.approx(8 * 8_030_261_248 // 8, rel=1e-6)
    assert held[2]["gradients_bytes"] == 4 * 8_030_261_248 // 8
    assert held[0]["gathered_bytes"] > held[2]["gathered_bytes"]
    assert chosen["axes"] == {"dp_shard": {"degree": 8, "place": "inside a node"}}
