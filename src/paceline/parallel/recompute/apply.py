"""Activation recomputation of each block, by torch's own checkpointing. Comes before compilation and strategies.

Block by block the forward keeps only the input (full), or also the outputs of the operators whose arithmetic is dear for
the bytes they fill (selective): matrix products and attention. The backward runs the block again, from the input, with
the kept outputs in the place of the operators that made them. Dropout masks are a hash of (seed, step, sample, layer), so
that a second run draws the same ones without any generator's state being kept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.parallel.recompute.config import Recompute

_aten = torch.ops.aten

PRODUCTS = frozenset({_aten.mm.default, _aten.addmm.default, _aten.linear.default, _aten.bmm.default})
"""Products; `_aten.bmm` also carries attention that is written out."""

ATTENTION = frozenset(
    op.default
    for op in (
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
        _aten._scaled_dot_product_fused_attention_overrideable,
        _aten._scaled_dot_product_attention_math,
        _aten._flash_attention_forward,
        _aten._efficient_attention_forward,
    )
)


def recompute_blocks(blocks: Iterable[nn.Module], recompute: Recompute, *, preserve_random_state: bool = False) -> None:
    """Make each block recompute in its backward, in place; names of modules and parameters stay.

    Args:
        blocks: the repeated parts of a model, not yet compiled, wrapped or hooked.
        recompute: what is computed anew; with "none" nothing is touched.
        preserve_random_state: whether a block may draw random numbers, as `nn.Dropout` does: it must draw the same ones
            again. The decoder's masks are a hash and need nothing.
    """
    if recompute == "none":
        return
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": preserve_random_state}
    if recompute == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep_dear)
    for block in blocks:
        block.forward = functools.partial(_again, block.forward, settings)


def _again(forward: Any, settings: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The block's forward under checkpointing; plainly where no backward will come."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, **settings, **kwargs)


def keep_dear(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep attention, and products whose output is no larger than their inputs.

    The exception is a batch of scores of written-out attention (L x L numbers, each worth a head's width of
    multiplications): the largest tensors of a block and the cheapest products in it.
    """
    if op in ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    if op in PRODUCTS and not _is_scores(op, args):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is_scores(op: Any, args: tuple[Any, ...]) -> bool:
    """A batched product of (b, n, k) and (b, k, m) with n x m above what goes in: k is a head's width, n and m lengths."""
    if op is not _aten.bmm.default or not all(isinstance(a, Tensor) for a in args[:2]):
        return False
    (_, rows, inner), columns = args[0].shape, args[1].shape[2]
    return bool(rows * columns > inner * (rows + columns))
