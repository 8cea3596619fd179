"""Made-up run folders for tests of comparisons: records and a final checkpoint, with any fault in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.run.records import RecordWriter, Samples, Step
from tests.checkpoint.written import by_rows, numbers, write_split
from tests.run.samples import started

STEPS = 10
STATE = {"optimizer": {"steps": {"a": float(STEPS)}, "groups": [{"lr": 1e-3}]}, "loss_scale": None}


def loss_of(step: int) -> float:
    """Full of digits, as losses are."""
    return 5.0 / (step + 0.1)


def curve(steps: Sequence[int], changed: Mapping[int, Any] = {}) -> list[Step]:
    """Step records; `changed` holds another loss by step."""
    return [
        Step(step=s, loss=changed.get(s, loss_of(s)), grad_norm=1.0 / s, lr=1e-3, tokens=64, seconds=0.1,
             tokens_per_second=640.0, mfu=None, samples=8 * s)
        for s in steps
    ]  # fmt: skip


def ids_of(step: int) -> list[int]:
    return list(range(8 * step, 8 * step + 8))


def write_attempt(
    run: Path,
    attempt: int,
    begun_after: int,
    steps: Sequence[Step],
    ids: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """The records of an attempt; `ids` by step, those of `ids_of` unless given."""
    with RecordWriter(run, attempt, lambda: 1e9 + attempt) as writer:
        writer.write(started(begun_after))
        for record in steps:
            writer.write(record)
            found = ids_of(record.step) if ids is None else ids.get(record.step)
            if found is not None:
                writer.write(Samples(step=record.step, ids=list(found)))


def straight(run: Path) -> Path:
    write_attempt(run, 1, 0, curve(range(1, STEPS + 1)))
    return run


def state_tensors() -> dict[str, Tensor]:
    return {
        "model/a": numbers((3, 5), torch.float64, 1),
        "model/b": numbers((7,), torch.float64, 2),
        "optimizer/exp_avg/a": numbers((3, 5), torch.float64, 3),
    }


def final_state(run: Path, tensors: Mapping[str, Tensor], ranks: int = 2, state: Mapping[str, Any] = STATE) -> str:
    """The place of a run's checkpoints, with that of the last step."""
    write_split(run / "checkpoints", tensors, by_rows, ranks, STEPS, state=dict(state))
    return str(run / "checkpoints")
