"""torch.compile of each block: one graph serves all layers, and communication between blocks stays as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module], **options: Any) -> None:
    """Compile each block in place, before strategies wrap or hook it. Shapes are fixed: another one is another graph.

    Args:
        blocks: the repeated parts of a model.
        options: of torch.compile, such as `backend`.
    """
    for block in blocks:
        block.compile(dynamic=False, **options)


def recompiles() -> int:
    """Graphs that this process compiled beyond the first."""
    return max(0, int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) - 1)
