"""Running out of memory, said with the parts of what was needed and the cheapest change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paceline.errors import OutOfMemory
from paceline.job.memory_advice import memory_advice
from paceline.job.resolve import Resolved
from paceline.units import format_bytes

_CPU_ALLOCATOR_SAYS = ("can't allocate memory", "not enough memory")
"""torch 2.13's `c10/core/impl/alloc_cpu.cpp`, on Linux and elsewhere."""


@contextmanager
def explain_out_of_memory(resolved: Resolved) -> Iterator[None]:
    """Turn an allocation failure of the device or the host into `OutOfMemory`.

    Raises:
        OutOfMemory: an allocation failed inside the block.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _explained(resolved, str(error)) from None
    except RuntimeError as error:
        if not any(words in str(error) for words in _CPU_ALLOCATOR_SAYS):
            raise
        raise _explained(resolved, str(error)) from None


def _explained(resolved: Resolved, said: str) -> OutOfMemory:
    parts, change = memory_advice(resolved)
    first = said.strip().splitlines()[0] if said.strip() else "allocation failed"
    return OutOfMemory(
        f"out of memory: {first}. Planned per rank: {format_bytes(resolved.memory.total_bytes)} of "
        f"{format_bytes(resolved.memory_available_bytes)} ({parts})",
        values={**resolved.memory.to_record(), "available_bytes": resolved.memory_available_bytes},
        hint=change,
    )
