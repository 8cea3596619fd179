"""The user's two functions for a decoder over packed text: what `paceline train` gives to the step.

Batch (one micro-batch): `tokens`, `labels` (B, L), `sample_ids` (B), and where documents begin inside a sample also
`cumulative` and `max_length` (see `paceline.data.dataset`). With dropout the loop adds `step`.
"""

from __future__ import annotations

from torch import Tensor, nn

from paceline.loss.cross_entropy import token_cross_entropy
from paceline.model.attention import Documents
from paceline.model.dropout import DropoutKey
from paceline.model.spec import ModelSpec
from paceline.train.step import Batch, Forward, Loss


def language_functions(spec: ModelSpec, seed: int, loss: Loss | None = None) -> tuple[Forward, Loss]:
    """`forward` and `loss` of a decoder; `loss` is a sum over labels and their number."""
    drops = spec.dropout > 0 or spec.attention_dropout > 0
    objective = loss or _loss

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        documents = None
        if "cumulative" in batch:
            documents = Documents(batch["cumulative"], int(batch["max_length"]))
            if batch["tokens"].is_cuda:
                documents = documents.padded(batch["tokens"].shape[1])
        key = DropoutKey(seed, batch["step"], batch["sample_ids"]) if drops and model.training else None
        logits_BLV: Tensor = model(batch["tokens"], documents=documents, dropout_key=key)
        return logits_BLV

    return forward, objective


def _loss(logits_BLV: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return token_cross_entropy(logits_BLV, batch["labels"])
