"""This rank's part of a micro-batch whose sequences are split.

Labels are shifted, and positions counted, on the whole sequence: a batch comes with both tokens and labels, and each
position keeps its own label and its own number wherever it goes. Borders of documents stay those of the whole batch,
since a query's keys come from all ranks.

Shapes: B sequences, L positions of the whole sequence, P = L / cp positions of a rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.parallel.context.config import check_length, chunks_of

PER_POSITION = ("tokens", "labels")
"""Tensors of a batch with a dim of positions (the second), which are split; everything else stays whole."""


def own_positions(rank: int, degree: int, length: int, device: torch.device | None = None) -> Tensor:
    """Positions (P) of the whole sequence that a rank holds, in the order in which it holds them.

    Raises:
        JobError: the sequence does not divide.
    """
    check_length(length, degree)
    chunk = length // (2 * degree)
    return torch.cat([torch.arange(n * chunk, (n + 1) * chunk, device=device) for n in chunks_of(rank, degree)])


def split_batch(batch: dict[str, Any], rank: int, degree: int) -> dict[str, Any]:
    """The batch with this rank's positions of `tokens` and `labels`; beside them `positions` (1, P) and `whole_length` (L).

    Raises:
        JobError: the sequence does not divide; every rank finds so alike, before anything is sent.
    """
    tokens_BL = batch["tokens"]
    positions_P = own_positions(rank, degree, tokens_BL.shape[1], tokens_BL.device)
    parts = {key: batch[key].index_select(1, positions_P) for key in PER_POSITION if key in batch}
    own = {"positions": positions_P.unsqueeze(0), "whole_length": tokens_BL.shape[1]}
    return type(batch)({**batch, **parts, **own})
