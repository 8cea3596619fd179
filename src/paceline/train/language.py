"""The user's two functions for a decoder over packed text: what `paceline train` gives to the step.

Batch (one micro-batch): `tokens`, `labels` (B, L), `sample_ids` (B), and where documents begin inside a sample also
`cumulative` and `max_length` (see `paceline.data.dataset`). With dropout the loop adds `step`. Where ranks share a
sequence, `tokens` and `labels` are a rank's part of it, with `positions` (1, L) and `whole_length` beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.loss.chunked import head_cross_entropy
from paceline.loss.cross_entropy import token_cross_entropy
from paceline.loss.split_cross_entropy import split_cross_entropy
from paceline.loss.vocabulary import WHOLE_VOCABULARY, VocabularyPart
from paceline.model.attention import Documents
from paceline.model.dropout import DropoutKey
from paceline.model.spec import ModelSpec
from paceline.model.transformer import Head
from paceline.train.step import Batch, Forward, Loss

IGNORE = -100
"""Label of a token that is not predicted."""

Pass = Callable[[Batch], Any]


class Relay(Protocol):
    """A forward pass of a batch through all stages; see `parallel.pipeline.apply.Pipeline`."""

    def relay(self, batch: Batch, through: Pass, last: Pass) -> Any: ...


def language_functions(
    spec: ModelSpec,
    seed: int,
    loss: Loss | None = None,
    chunk_tokens: int = 0,
    part: VocabularyPart = WHOLE_VOCABULARY,
    split_backward: bool = False,
) -> tuple[Forward, Loss]:
    """`forward` and `loss` of a decoder; `loss` is a sum over labels and their number.

    With `chunk_tokens` the head is taken together with the loss, so many tokens at a time: `forward` then returns the
    sum itself, and the logits never stand whole. So it does where a rank has a `part` of the vocabulary: it returns the sum
    over all of it, equal on the ranks that share it. A loss of one's own needs the logits.
    """
    summing = chunk_tokens > 0 or part.group is not None
    drops = spec.dropout > 0 or spec.attention_dropout > 0
    if summing and loss is not None:
        raise ValueError("chunks and a split vocabulary belong to the loss of this file")

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        documents = None
        if "cumulative" in batch:
            documents = Documents(batch["cumulative"], int(batch["max_length"]))
            if batch["tokens"].is_cuda:
                documents = documents.padded(batch.get("whole_length", batch["tokens"].shape[1]))
        key = DropoutKey(seed, batch["step"], batch["sample_ids"]) if drops and model.training else None
        head = _summing_head(batch["labels"], chunk_tokens, part, split_backward) if summing else None
        output: Tensor = model(
            batch["tokens"], documents=documents, positions_BL=batch.get("positions"), dropout_key=key, head=head
        )
        return output

    return forward, loss or (_count if summing else _loss)


def _summing_head(labels_BL: Tensor, chunk_tokens: int, part: VocabularyPart, split_backward: bool) -> Head:
    def head(h_BLD: Tensor, weight_VD: Tensor) -> Tensor:
        if chunk_tokens:
            return head_cross_entropy(h_BLD, weight_VD, labels_BL, chunk_tokens, IGNORE, part, split_backward)
        return split_cross_entropy(F.linear(h_BLD, weight_VD), labels_BL, part, IGNORE)

    return head


def _count(loss_sum: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return loss_sum, (batch["labels"] != IGNORE).sum()


def _loss(logits_BLV: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return token_cross_entropy(logits_BLV, batch["labels"], IGNORE)


def relayed(stages: Relay, forward: Forward, loss: Loss) -> tuple[Forward, Loss]:
    """`forward` and `loss` of an evaluation through the stages of a pipeline: ranks that do not end it add nothing."""

    def through(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros((), device=batch["labels"].device)
        found: tuple[Tensor, Tensor] | None = stages.relay(
            batch, lambda held: forward(model, held), lambda held: loss(forward(model, held), held)
        )
        return (nothing, nothing) if found is None else found

    return through, lambda found, batch: found
