"""Which sizes of which collectives are measured, and what they need. Size and count are those of nccl-tests. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from paceline.errors import UsageError
from paceline.parallel.strategy import CollectiveKind
from paceline.units import KiB, MiB, format_bytes

COLLECTIVES: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send_recv",
)
REDUCING = ("all_reduce", "reduce_scatter")
ROOTED = ("broadcast",)
PARTED = ("all_gather", "reduce_scatter", "all_to_all")
"""Their size is that of all parts together, their count that of one part."""

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
TYPE_NAMES = {"fp32": "float", "bf16": "bfloat16", "fp16": "half", "fp64": "double"}
"""As nccl-tests call them."""

ALIGNMENT_BYTES = 16
MIN_BYTES, FACTOR = 1 * KiB, 2
MAX_BYTES = {"cpu": 32 * MiB, "cuda": 1024 * MiB}
"""Largest size unless given, by kind of device."""


class Point(msgspec.Struct, frozen=True):
    """One size of one collective: `size_bytes` and `count` (elements) as nccl-tests print them."""

    collective: CollectiveKind
    size_bytes: int
    count: int


class Options(NamedTuple):
    """What is measured; plain data, so that ranks read it from a file."""

    collectives: tuple[CollectiveKind, ...] = COLLECTIVES
    min_bytes: int = MIN_BYTES
    max_bytes: int = MAX_BYTES["cpu"]
    factor: int = FACTOR
    dtype: str = "fp32"
    iterations: int = 20
    warmup: int = 5
    seconds: float = 1.0
    """Longest time for the timed calls of one size; more rounds than the first four are made only as long as it lasts."""
    pairs: bool = False
    tiers: tuple[str, ...] = ()


def sizes(min_bytes: int, max_bytes: int, factor: int) -> list[int]:
    """`min_bytes`, times `factor` as long as it is at most `max_bytes`.

    Raises:
        UsageError: there is none.
    """
    if min_bytes < 1 or max_bytes < min_bytes or factor < 2:
        raise UsageError(
            f"--min {format_bytes(min_bytes)} --max {format_bytes(max_bytes)} --factor {factor} name no sizes",
            values={"min_bytes": min_bytes, "max_bytes": max_bytes, "factor": factor},
            hint="--max is at least --min, which is at least 1B; --factor is 2 or more.",
        )
    found = [min_bytes]
    while found[-1] * factor <= max_bytes:
        found.append(found[-1] * factor)
    return found


def points(collective: CollectiveKind, wanted: Sequence[int], ranks: int, element_bytes: int) -> list[Point]:
    """The sizes as the collective can have them, each once; those without an element per rank are left out.

    Where each rank has a part, parts are whole multiples of 16 bytes, as in nccl-tests.
    """
    found: list[Point] = []
    for size in wanted:
        count = size // element_bytes
        if collective in PARTED:
            step = max(1, ALIGNMENT_BYTES // element_bytes)
            count = count // ranks // step * step
        whole = count * (ranks if collective in PARTED else 1) * element_bytes
        if count and whole not in {point.size_bytes for point in found}:
            found.append(Point(collective, whole, count))
    return found


def memory_bytes(collective: CollectiveKind, size_bytes: int, ranks: int, backend: str) -> int:
    """What one rank holds at the peak of a size: source, result, and the copy that Gloo's reductions make."""
    part = -(-size_bytes // ranks)
    buffers = {
        "all_reduce": size_bytes,
        "broadcast": size_bytes,
        "all_gather": size_bytes + part,
        "reduce_scatter": size_bytes + part,
    }.get(collective, 2 * size_bytes)
    return buffers + (size_bytes if backend == "gloo" and collective in REDUCING else 0)


def check_memory(options: Options, ranks: int, ranks_here: int, backend: str, available_bytes: int) -> None:
    """Refuse sizes that this host, or each of its devices, cannot hold.

    Args:
        ranks_here: ranks that share `available_bytes`.

    Raises:
        UsageError: with what is needed and what is there.
    """
    for collective in options.collectives:
        needed = memory_bytes(collective, options.max_bytes, ranks, backend) * ranks_here
        if needed <= available_bytes:
            continue
        fitting = options.max_bytes
        while fitting > 1 and memory_bytes(collective, fitting, ranks, backend) * ranks_here > available_bytes:
            fitting //= 2
        shared = f" by {ranks_here} ranks" if ranks_here > 1 else ""
        raise UsageError(
            f"{collective} of {format_bytes(options.max_bytes)} needs {format_bytes(needed)}{shared}, and "
            f"{format_bytes(available_bytes)} are there",
            key="--max",
            values={"collective": collective, "needed_bytes": needed, "available_bytes": available_bytes},
            hint=f"Give --max {_written(fitting)} or less, or leave out {collective} with --collectives.",
        )


def _written(size_bytes: int) -> str:
    """A size as `parse_bytes` reads it, rounded down to whole units."""
    for unit, scale in (("GiB", 2**30), ("MiB", MiB), ("KiB", KiB)):
        if size_bytes >= scale:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B"
