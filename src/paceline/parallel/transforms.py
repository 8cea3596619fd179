"""Transforms: changes of a model that have no mesh axis, in the fixed order in which they are applied. Imports no torch.

    weights' type -> model axes (pp, tp, cp) -> recompute -> compile -> data axes -> offload

The model axes change what a block is. Recomputation comes before compilation, which then sees the checkpointed block; both
come before the strategies of data axes, whose hooks stay outside of what is compiled or run again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from paceline.cluster.probe import Host
from paceline.errors import JobError
from paceline.loss.cost import auto_chunk_tokens
from paceline.model.spec import ModelSpec
from paceline.parallel.config import ParallelSection
from paceline.parallel.gpu_only import check_gpu_only
from paceline.parallel.layout import Layout
from paceline.parallel.offload.config import NO_OFFLOAD, OffloadConfig, offload_config
from paceline.parallel.offload.cost import CHUNK_ELEMENTS
from paceline.parallel.precision.config import check_precision
from paceline.parallel.recompute.config import MEANING, Recompute
from paceline.parallel.recompute.cost import extra_flop_share
from paceline.parallel.registry import DATA_STRATEGIES
from paceline.units import format_bytes, format_percent


class Transforms(msgspec.Struct, frozen=True):
    """Resolved transforms. `loss_chunk_tokens` is 0 where a micro-batch's logits stand whole."""

    parameter_dtype: Literal["fp32", "bf16"] = "fp32"
    recompute: Recompute = "none"
    offload: OffloadConfig = NO_OFFLOAD
    loss_chunk_tokens: int = 0


NO_TRANSFORMS = Transforms()


def resolve_transforms(
    parallel: ParallelSection, layout: Layout, host: Host, precision: str, run_path: Path
) -> Transforms:
    """All but the loss's chunks, which follow the micro-batch: see `loss_chunk_tokens`.

    Raises:
        JobError: a transform cannot work here, or would have no effect.
    """
    check_gpu_only(parallel, layout, host)
    check_precision(parallel, precision, host)
    _check_parameter_dtype(parallel, layout, precision)
    return Transforms(
        parameter_dtype=parallel.parameter_dtype,
        recompute=parallel.recompute,
        offload=offload_config(parallel, host.device_kind, run_path),
    )


def loss_chunk_tokens(parallel: ParallelSection, spec: ModelSpec, tokens: int, device_kind: str) -> int:
    """Tokens of a chunk for micro-batches of `tokens`; 0: their logits stand whole."""
    asked = parallel.loss_chunk_tokens
    if asked is None:
        return auto_chunk_tokens(tokens, spec.vocab_size, device_kind)
    return asked if asked < tokens else 0


def check_loss_chunk(parallel: ParallelSection, tokens: int) -> None:
    """Refuse a chunk that was set and holds a whole micro-batch.

    Raises:
        JobError: it does.
    """
    asked = parallel.loss_chunk_tokens
    if asked is not None and asked >= tokens:
        raise JobError(
            f"a chunk of {asked} tokens holds the whole micro-batch of {tokens} and so has no effect",
            key="parallel.loss_chunk_tokens",
            values={"loss_chunk_tokens": asked, "microbatch_tokens": tokens},
            hint=f"Set it below {tokens}, or to 0 for whole logits, or remove it.",
        )


def describe_order(transforms: Transforms, compiled: bool, strategies: list[str]) -> tuple[str, str]:
    """The transforms in the order of their application, and the rule."""
    steps = [f"weights in {transforms.parameter_dtype}"] if transforms.parameter_dtype != "fp32" else []
    steps += [s for s in strategies if s not in DATA_STRATEGIES]
    steps += [f"recompute {transforms.recompute}"] if transforms.recompute != "none" else []
    steps += ["compile"] if compiled else []
    steps += [s for s in strategies if s in DATA_STRATEGIES]
    steps += [f"offload to {transforms.offload.place}"] if transforms.offload.place != "none" else []
    order = "weights' type, model axes, recompute, compile, data axes, offload"
    return " -> ".join(steps) or "none", f"always in the order: {order}"


def describe_offload(offload: OffloadConfig) -> str:
    if offload.place == "none":
        return "moments stay with the weights"
    where = f"a file of each rank in {offload.folder}" if offload.folder else "pinned host memory"
    return f"moments in {where}; each update moves them in chunks of {CHUNK_ELEMENTS} weights"


def describe_recompute(recompute: Recompute, spec: ModelSpec, sequence_length: int) -> str:
    if recompute == "none":
        return MEANING[recompute]
    share = extra_flop_share(spec, sequence_length, recompute)
    return f"{MEANING[recompute]}; {format_percent(share)} more matrix products than a step without"


def describe_chunks(chunk_tokens: int, tokens: int, vocab_size: int) -> str:
    whole = format_bytes(4 * tokens * vocab_size)
    if chunk_tokens == 0:
        return f"logits of a micro-batch stand whole: {whole} in fp32"
    return f"instead of {whole} of fp32 logits, {format_bytes(4 * chunk_tokens * vocab_size)} stand at a time"


def _check_parameter_dtype(parallel: ParallelSection, layout: Layout, precision: str) -> None:
    if parallel.parameter_dtype == "fp32":
        return
    if precision != "bf16":
        raise JobError(
            f"bf16 weights need bf16 arithmetic, and precision is {precision}",
            key="parallel.parameter_dtype",
            values={"parameter_dtype": "bf16", "precision": precision},
            hint="Set parallel.precision=bf16, or remove parallel.parameter_dtype.",
        )
    if layout.dp_shard > 1:
        raise JobError(
            f"has no effect with dp_shard = {layout.dp_shard}: the shards are the fp32 masters, and weights are gathered "
            "in bf16 already",
            key="parallel.parameter_dtype",
            values={"parameter_dtype": "bf16", "dp_shard": layout.dp_shard},
            hint="Remove parallel.parameter_dtype.",
        )
