"""Context parallelism: the axis it brings, its settings, and which sequences and heads it takes. Imports no torch.

A sequence of L positions is cut into 2 x cp chunks of equal length, and rank r holds chunks r and 2 cp - 1 - r: under a
causal mask late queries see more keys than early ones, and so each rank has the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec

from paceline.errors import JobError
from paceline.model.spec import ModelSpec
from paceline.parallel.config import ParallelSection
from paceline.parallel.layout import Layout
from paceline.units import MiB

AXIS = "cp"

GATHER_BYTES = 8 * MiB
"""Keys and values that are gathered at once, as whole heads: what is there for a moment does not fall by the degree, and a
message of this size is long enough to fill a link."""

Method = Literal["gather", "alltoall"]


class ContextConfig(msgspec.Struct, frozen=True):
    """Settings of the split sequence.

    method: gather: keys and values of the whole sequence are gathered for each block, queries stay. alltoall: each rank
        exchanges its positions of all heads for all positions of its heads, and back.
    """

    method: Method = "gather"


def context_config(
    parallel: ParallelSection, spec: ModelSpec, layout: Layout, sequence_length: int, is_set: Callable[[str], bool]
) -> ContextConfig:
    """The settings that `[parallel]` asks for.

    Raises:
        JobError: the sequence or the heads do not divide, or a setting has no effect; says what would do.
    """
    config = ContextConfig(parallel.cp_method)
    if layout.cp == 1 and is_set("parallel.cp_method"):
        raise JobError(
            "has no effect with cp = 1: one rank holds the whole sequence",
            key="parallel.cp_method",
            values={"cp_method": parallel.cp_method, "cp": 1},
            hint="Remove it, or set parallel.cp.",
        )
    check_length(sequence_length, layout.cp)
    check_heads(spec, layout, config)
    return config


def chunks_of(rank: int, degree: int) -> tuple[int, int]:
    """The two chunks, of 2 x degree, that a rank holds, in the order in which it holds them."""
    return rank, 2 * degree - 1 - rank


def natural_order(degree: int) -> list[int]:
    """Where each chunk stands in the ranks' parts laid end to end: the n-th number is the place of chunk n."""
    held = [chunk for rank in range(degree) for chunk in chunks_of(rank, degree)]
    return [held.index(chunk) for chunk in range(2 * degree)]


def heads_at_once(kv_heads: int, batch: int, length: int, head_dim: int, element_bytes: int) -> int:
    """Key and value heads that are gathered together; at least one."""
    return max(1, min(kv_heads, GATHER_BYTES // (2 * batch * length * head_dim * element_bytes)))


def exchanged_kv_heads(kv_heads: int, degree: int) -> int:
    """Key and value heads that an all-to-all sends: fewer than ranks are repeated, one for each rank."""
    return max(kv_heads, degree)


def check_length(length: int, degree: int) -> None:
    """Refuse a sequence that does not divide into 2 x degree chunks.

    Raises:
        JobError: with the lengths next to it that do, and the degrees that would.
    """
    multiple = 2 * degree
    if degree == 1 or length % multiple == 0:
        return
    below, above = length // multiple * multiple, (length // multiple + 1) * multiple
    lengths = f"{below} or {above}" if below else f"{above}"
    fitting = [d for d in range(1, length // 2 + 1) if length % (2 * d) == 0] or [1]
    raise JobError(
        f"a sequence of {length} tokens does not divide into the {multiple} chunks of cp = {degree} (two for each rank)",
        key="data.sequence_length",
        values={"sequence_length": length, "cp": degree, "multiple": multiple},
        hint=f"Set data.sequence_length={lengths}, or parallel.cp={_listed(fitting)}.",
    )


def check_heads(spec: ModelSpec, layout: Layout, config: ContextConfig) -> None:
    """Refuse heads that an all-to-all cannot hand out evenly. Gathered keys and values take any number.

    Raises:
        JobError: with the degrees that the heads allow.
    """
    if layout.cp == 1 or config.method == "gather":
        return
    heads, kv_heads = spec.num_heads // layout.tp, max(1, spec.num_kv_heads // layout.tp)
    allowed = [d for d in range(1, heads + 1) if _handed_out(heads, kv_heads, d)]
    if layout.cp in allowed:
        return
    per_rank = f", {heads} and {kv_heads} of them on a tensor-parallel rank," if layout.tp > 1 else ""
    raise JobError(
        f"{spec.num_heads} heads with {spec.num_kv_heads} key and value heads{per_rank} cannot be handed out to "
        f"cp = {layout.cp} ranks",
        key="parallel.cp_method",
        values={"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "tp": layout.tp, "cp": layout.cp},
        hint=f"Set parallel.cp_method=gather, which takes any number of heads, or parallel.cp={_listed(allowed)}.",
    )


def _handed_out(heads: int, kv_heads: int, degree: int) -> bool:
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def _listed(numbers: list[int]) -> str:
    shown = [str(n) for n in (numbers if len(numbers) <= 8 else [*numbers[:4], *numbers[-4:]])]
    return " or ".join(shown)
