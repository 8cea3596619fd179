"""A user's own script around paceline.Trainer, for tests: `python script.py [fault]`, alone or under torchrun."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import paceline


class Points:
    """Points of a plane and the side of a line they lie on. With `fault`, sample 5 kills the process that reads it."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.fault == "worker" and index == 5 and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGBUS)
        x = np.random.default_rng(index).normal(size=4).astype(np.float32)
        return {"inputs": x, "label": np.int64(x.sum() > 0)}


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, batch["label"], reduction="sum"), torch.tensor(float(len(output)))


def loss_of_model(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return loss(model(batch["inputs"]), batch)


def main(fault: str) -> None:
    torch.manual_seed(int(os.environ.get("RANK", 0)))  # rank 0's weights must win
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    objective = loss_of_model if fault == "loss of model" else loss
    trainer = paceline.Trainer(
        model, objective, data=Points(fault), global_batch=24, evals={"all": Points()}, run="runs/points",
        optimizer={"lr": 0.05, "warmup_steps": 0}, log_every=5, microbatch=3,
    )  # fmt: skip
    result = trainer.fit(steps=12)
    if fault == "twice":
        again = trainer.fit(steps=12)
        assert again["loss"] == result["loss"] and again["steps"] == 12
    weights = [float(p.detach().double().sum()) for p in model.parameters()]
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps({**result, "weights": weights}))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
