"""A decoder whose sequences are split over ranks: its attention replaced, and what a rank sees of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.model.attention import sdpa
from paceline.model.transformer import Block, Decoder
from paceline.parallel.context.attention import ExchangedAttention, GatheredAttention, SplitAttention
from paceline.parallel.context.config import AXIS, ContextConfig
from paceline.parallel.context.split import split_batch
from paceline.parallel.layout import Layout
from paceline.parallel.mesh import Mesh

Batch = dict[str, Any]


def split_attention(model: Decoder, mesh: Mesh, config: ContextConfig, *, compiled: bool = False) -> None:
    """Let every block attend over the ranks that share its sequences, in place. Weights stay as they are.

    Everything else in a decoder treats positions one by one: it takes this rank's as they come, with their positions.
    Blocks that will be compiled are compiled around it.
    """
    group = mesh.group(AXIS)
    if group is None:
        return
    kind = GatheredAttention if config.method == "gather" else ExchangedAttention
    model.replace_attention(kind(group, compiled=compiled))


@contextmanager
def whole_sequences(model: Decoder) -> Iterator[None]:
    """Lets each rank attend over all that it is given, as for a text that no other rank has a part of."""
    attentions = [block.attention for block in model.blocks.values() if isinstance(block, Block)]
    split = [attention for attention in attentions if isinstance(attention.attend, SplitAttention)]
    kept = [attention.attend for attention in split]
    for attention in split:
        attention.attend = sdpa
    try:
        yield
    finally:
        for attention, attend in zip(split, kept, strict=True):
            attention.attend = attend


def batch_part(layout: Layout, rank: int) -> Callable[[Batch], Batch]:
    """From a micro-batch to the part of it that rank number `rank` sees: two chunks of each sequence, or all of it."""
    if layout.cp == 1:
        return lambda batch: batch
    return functools.partial(split_batch, rank=layout.coordinates(rank)[AXIS], degree=layout.cp)
