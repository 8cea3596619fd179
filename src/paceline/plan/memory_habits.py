"""What a generation of software keeps in memory: bytes for a parameter, a token and a logit, and what its allocator adds.

The figures stand in `memory_habits.toml`, each generation with its sources. A key of `Setting.software` that has no entry
takes that of the longest entry that it begins with, and `mixed` where there is none. Imports no torch.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.cluster.device import ProductType

FILE = Path(__file__).parent / "memory_habits.toml"
DEFAULT = "mixed"

OVERRIDES = ("fp16", "fp32", "fp8", "fp4")
"""Element types of products under which a generation may keep other things: tables of its entry."""


RESERVE_PRIOR = 0.06
"""By how much an allocator rounds up and fragments, where no runs of a generation say it."""

RESERVE_SIGMA = 0.05
"""Standard deviation of that share."""


class Kept(NamedTuple):
    """Bytes for each parameter, and the stage of ZeRO from which on they are split over the data ranks."""

    size: float
    split_from: int


class Habits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation.

    parameters, gradients, master, moments: standing, for each parameter; `step` is what an update holds beside them, and
        `norm` what the gradient's norm needs for each element of the largest tensor.
    gradients_freed: gradients are gone between an update and the next backward.
    bucket_elements, bucket_bytes: reduction buffers, in elements and bytes of one.
    gathered_blocks: blocks whose weights stand whole at once under ZeRO-3, the rest of the model beside them.
    summed_bytes: of an element of a whole gradient that ZeRO-3 sums over the micro-batches of a pipeline.
    reduced_bytes: of an element of a block's whole gradient on its way into a reduce-scatter, the gradient counted.
    gathered_inputs: under sequence parallelism the inputs of products are kept whole, not gathered again.
    input_bytes: of a number that is kept as the input of a product.
    swiglu: numbers kept for each of `ffn_dim`, eager and compiled.
    stage_outputs: a pipeline's stage keeps its output beside its input for each micro-batch.
    all_logits: a pipeline's last stage keeps the logits of all micro-batches until the end of a step.
    logit_bytes: at the loss's peak for each logit, eager and compiled, and under a split vocabulary (0: as eager).
    phases_add: the share of what the step's lesser moments need that is reserved beside the peak: 1 where a freed block
        is not used for a larger one, 0 with expandable segments.
    reserve: share of all that, by which the allocator rounds up and fragments.
    fragments: share of the allocated peak that an interleaved pipeline's blocks of many sizes may waste without expandable
        segments; it makes no prediction, but leaves open whether a run fits.
    context_bytes: of a device's context with its libraries; `communicator_bytes` for each group that a rank is in.
    sigma: standard deviation of ln(measured / predicted) that is to be expected of device memory.
    rows: what the figures were fitted on, where they were.
    """

    sources: tuple[str, ...]
    parameters: Kept = Kept(2, 3)
    gradients: Kept = Kept(2, 2)
    master: Kept = Kept(4, 1)
    moments: Kept = Kept(8, 1)
    step: Kept = Kept(0, 1)
    norm: float = 0.0
    norm_split: bool = False
    gradients_freed: bool = False
    bucket_elements: int = 0
    bucket_bytes: float = 0.0
    gathered_blocks: float = 2.0
    summed_bytes: float = 4.0
    reduced_bytes: float = 6.0
    gathered_inputs: bool = False
    input_bytes: float = 2.0
    swiglu: tuple[float, float] = (4.0, 2.0)
    stage_outputs: bool = False
    all_logits: bool = False
    logit_bytes: tuple[float, float, float] = (12.0, 12.0, 0.0)
    phases_add: float = 1.0
    reserve: float = RESERVE_PRIOR
    fragments: float = 0.0
    context_bytes: float = 0.8e9
    communicator_bytes: float = 0.25e9
    sigma: float = 0.10
    rows: str = ""


def habits_of(software: str, precision: ProductType = "bf16") -> Habits:
    """The habits of a generation under a type of products; see the module for keys that have no entry."""
    return _habits(software, precision if precision in OVERRIDES else "bf16")


@cache
def _habits(software: str, precision: str) -> Habits:
    entries = _entries()
    near = [key for key in entries if software.startswith(key)]
    entry = dict(entries[max(near, key=len) if near else DEFAULT])
    overrides = {kind: entry.pop(kind, {}) for kind in OVERRIDES}
    return msgspec.convert({**entry, **overrides.get(precision, {})}, Habits)


@cache
def _entries() -> dict[str, dict[str, Any]]:
    """All entries, those that extend another one filled up."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {key: _filled(key, table) for key in table}


def _filled(key: str, table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    entry = dict(table[key])
    base = entry.pop("extends", None)
    return entry if base is None else {**_filled(base, table), **entry}
