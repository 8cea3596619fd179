"""torch.compile of each block: one graph serves all layers, and communication between blocks stays as it is."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterable
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
    kinds: dict[str, Callable[..., Any]] = {}
    for block in blocks:
        # One that is computed anew has a forward of ours already.
        if getattr(block.forward, "__module__", "").startswith("torch.nn."):
            _compile_forward(block, kinds, options)
        else:
            block.compile(dynamic=False, **options)
    tell_of_compilers()


def _compile_forward(block: nn.Module, kinds: dict[str, Callable[..., Any]], options: dict[str, Any]) -> None:
    """Compile a block of one of the engine's own classes, such as nn.Sequential.

    The tracer passes over frames of torch.nn (2.13: `torch._dynamo.trace_rules`), and `Module.compile` leaves such a block
    as it is, without a word; a frame of ours around it is traced with all that it calls. Each kind of block has a code object
    of its own: the engine counts graphs by it, and compiles no more than eight of one.
    """
    kind = repr(block)
    if kind not in kinds:
        own = types.FunctionType(_forward.__code__.replace(), globals(), "forward")
        kinds[kind] = torch.compile(own, dynamic=False, **options)
    # A method, so that a copy of the block computes with its own weights.
    block.forward = types.MethodType(kinds[kind], block)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


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
