"""`paceline prove` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.run.records import read_records
from tests.cli.job import SMALL, TEXT
from tests.pool.launch import Launcher

HARD = ["model.dropout=0.1", "data.workers=1", "run.eval_every=2"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.mark.limit(320)
def test_a_small_job_resumes_without_a_trace(launch: Launcher, text: Path) -> None:
    # In float64 from the start, so that the straight and the killed run serve both comparisons.
    words = ["prove", *SMALL, *HARD, "parallel.dp_shard=2", "parallel.precision=fp64", "--steps", "3,3", "--procs", "2"]
    done = launch([*words, "--json"], timeout=300)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema"] == "paceline.prove/1" and document["verdict"] == "pass"
    assert document["bitwise"] is True and document["samples_equal"] is True
    assert 0.0 <= document["largest_difference"] <= 1e-9
    assert (document["procs"], document["other"], document["steps"]) == (2, 1, [3, 3])
    assert document["other_ranks"]["changes"] == [
        "batch.microbatch=4",
        "parallel.dp_replicate=1",
        "parallel.dp_shard=-1",
    ]
    folder = text / "runs" / "default-prove"
    assert json.loads((folder / "certificate.json").read_text()) == document
    assert not (text / "runs" / "default").exists()  # never in the run's own directory
    # The killed run left no verdict and at least its supervisor and both ranks behind; the resumed ones began after it.
    assert document["killed_processes"] and min(document["killed_processes"]) >= 3
    assert not list(read_records(folder / "killed", kinds=("run_finished",)))
    for name in ("resumed", "other"):
        begun = [record["step"] for record in read_records(folder / name, kinds=("run_started",))]
        assert begun == [0, 3]
    assert "verdict: pass" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--steps", "5"], 2, "--steps"),
        (["--steps", "0,5"], 2, "--steps"),
        (["--procs", "2", "--other", "2"], 2, "--other"),
        (["--other", "0"], 2, "--other"),
        (["--procs", "2", "--other", "3"], 78, "batch.global_batch"),
        (["optimizer.lrr=1"], 78, "optimizer.lr"),
    ],
)
def test_what_cannot_be_proven_is_told_before_anything_runs(
    launch: Launcher, text: Path, words: list[str], code: int, told: str
) -> None:
    done = launch(["prove", *SMALL, *words, "--json"])
    assert done.returncode == code and told in done.stderr and "Traceback" not in done.stderr
    assert json.loads(done.stdout)["exit"] == code
    assert not (text / "runs").exists()


@pytest.mark.soak
@pytest.mark.limit(900)
@pytest.mark.parametrize("procs", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_on_one_to_four_ranks(launch: Launcher, text: Path, procs: int, stage: int) -> None:
    if stage and procs == 1:
        pytest.skip("nothing is sharded over one rank")
    sharded = [f"parallel.dp_shard={procs}", f"parallel.zero_stage={stage}"] if stage else []
    words = ["prove", *SMALL, *HARD, *sharded, "batch.global_batch=24", "--procs", str(procs), "--json"]
    done = launch(words, timeout=800)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass"
