"""paceline.Trainer in a user's script: one process, several, and what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import JobError
from paceline.run.records import read_records
from tests.pool.launch import Completed, Launcher

SCRIPT = str(Path(__file__).parent / "script.py")


def torchrun(launch: Launcher, ranks: int, *words: str, timeout: float = 60.0) -> Completed:
    return launch(["--nproc-per-node", str(ranks), SCRIPT, *words], module="torch.distributed.run", timeout=timeout)


def result(done: Completed) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_a_script_walks_one_curve_on_any_number_of_processes(launch: Launcher, tmp_path: Path) -> None:
    alone = result(torchrun(launch, 1))
    (tmp_path / "runs" / "points").rename(tmp_path / "runs" / "alone")
    both = result(torchrun(launch, 2))
    for key in ("loss", "grad_norm"):
        assert both[key] == pytest.approx(alone[key], rel=1e-5)
    assert both["evals"]["all"] == pytest.approx(alone["evals"]["all"], rel=1e-5) and alone["evals"]["all"] < 0.5
    assert both["weights"] == pytest.approx(alone["weights"], rel=1e-4)
    losses = [
        [r["loss"] for r in read_records(tmp_path / "runs" / name, kinds=("step",))] for name in ("alone", "points")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and len(losses[0]) == 12


def test_a_loss_of_the_model_is_accepted(launch: Launcher) -> None:
    assert result(torchrun(launch, 1, "loss of model"))["steps"] == 12


def test_a_finished_run_is_not_trained_again(launch: Launcher, tmp_path: Path) -> None:
    assert result(torchrun(launch, 1, "twice"))["steps"] == 12
    assert len(list(read_records(tmp_path / "runs" / "points", kinds=("step",)))) == 12


@pytest.mark.limit(90)
def test_a_loader_worker_that_dies_ends_the_job_and_is_named(launch: Launcher) -> None:  # BL-30
    done = torchrun(launch, 2, "worker", timeout=60)
    assert done.returncode != 0 and done.seconds < 30
    assert "WorkerFailed" in done.stderr and "loader worker" in done.stderr
    first = done.stderr.index("WorkerFailed")
    assert "rank 1" in done.stderr[first : first + 300] and "SIGBUS" in done.stderr[first : first + 300]


class Nothing:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": index}


def squared(output: torch.Tensor, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return output.square().sum(), torch.tensor(1.0)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"optimizer": {"lrr": 0.1}}, "Did you mean optimizer.lr?"),
        ({"layout": {"tpp": 2}}, "parallel.tp"),
        ({"optimizer": {"lr": -1.0}}, ">= 0"),
        ({"optimizer": {"momentum": 0.9}}, "no effect on adamw"),
        *(
            ({"layout": {axis: 2}}, f"parallel.{axis}: {axis} = 2 needs a model whose parts say how they are split")
            for axis in ("tp", "cp", "pp")
        ),
        ({"layout": {"pp_schedule": "gpipe"}}, "no effect on a module of one's own"),
        ({"layout": {"cp_method": "alltoall"}}, "no effect on a module of one's own"),
        ({"forward": lambda model, batch: None, "loss": lambda model, batch: None}, "forward has no effect"),
    ],
)
def test_wrong_arguments_are_told_why(keywords: dict[str, Any], text: str) -> None:
    arguments = {"loss": squared, "data": Nothing(), "global_batch": 2, **keywords}
    with pytest.raises(JobError) as error:
        paceline.Trainer(torch.nn.Linear(1, 1), **arguments)
    assert text in str(error.value)
