"""torch.compile of each block: one graph serves all layers, and communication between blocks stays as it is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline.workers import heartbeat

_compiling = contextlib.ExitStack()


def compile_blocks(blocks: Iterable[nn.Module], **options: Any) -> None:
    """Compile each block in place, before strategies wrap or hook it. Shapes are fixed: another one is another graph.

    Args:
        blocks: the repeated parts of a model.
        options: of torch.compile, such as `backend`.
    """
    for block in blocks:
        block.compile(dynamic=False, **options)
    tell_of_compilers()


def tell_of_compilers() -> None:
    """Have the supervisor know when a compiler runs in this process, where one is there at all.

    One that runs in the midst of training, for another shape or after an evaluation, is no stall of a step: on a slow
    processor its stack hardly changes and its other threads hardly run. Source: torch 2.13, `torch._dynamo.callback`,
    which also covers backward graphs that are compiled late.
    """
    if "torch._dynamo" not in sys.modules:
        return
    from torch._dynamo.callback import callback_handler

    if _begin not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_begin)
        callback_handler.register_end_callback(_end)


def _begin(_: object) -> None:
    _compiling.enter_context(heartbeat.within("compiling", section="compile"))


def _end(_: object) -> None:
    _compiling.close()


def recompiles() -> int:
    """Graphs that this process compiled beyond the first."""
    return max(0, int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) - 1)
