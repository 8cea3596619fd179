"""Evaluation: each sample once over all ranks, one reduction at the end whatever share of the samples a rank holds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.data.evaluation import Filler
from paceline.parallel.collectives import sum_over_ranks
from paceline.train.step import Batch, Forward, Loss


@dataclass(frozen=True)
class Evaluation:
    """The objective over an eval set: `loss` = sum / weight over all ranks (nan where the weight is zero)."""

    loss: float
    weight: float


def evaluate(
    model: nn.Module,
    forward: Forward,
    loss: Loss,
    batches: Iterable[Batch],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[Any]],
    wait_for_all: Callable[[], None],
    settle: Callable[[], None] = lambda: None,
    counts: bool = True,
) -> Evaluation:
    """Evaluate on this rank's batches, which may be none, and agree on the result.

    The number of collectives is one. Ranks may drift apart by more than a collective's timeout while they evaluate, so
    `wait_for_all` (a barrier on the host, with a limit of its own) comes first. Where a forward pass is a collective, the
    batches are as many on all ranks, some of them `Filler`; `settle` gives back what strategies left gathered.
    A rank that does not count has the same batches as one that does.

    Compiled blocks run eagerly here: one more graph per shape would cost more than it saves.
    """
    total = torch.zeros(2, dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), eagerly(), autocast():
            for batch in batches:
                loss_sum, weight = loss(forward(model, batch), batch)
                if isinstance(batch, Filler) or not counts:
                    continue
                total += torch.stack([loss_sum.double(), torch.as_tensor(weight, device=device).double()])
    finally:
        model.train(training)
        settle()
    wait_for_all()
    loss_total, weight_total = sum_over_ranks(total.tolist(), group, device)
    return Evaluation(loss_total / weight_total if weight_total else math.nan, weight_total)


def eagerly() -> AbstractContextManager[Any]:
    """Compiled blocks run eagerly inside. Where nothing is compiled torch's compiler is not loaded, which takes seconds."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
