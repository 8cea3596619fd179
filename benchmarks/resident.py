"""Ranks that train paceline and tell what is resident between steps and at the peak of one, beside what was stated.

Started by `launch.run_ranks` with the option

    steps: optimizer steps before the measured ones, and measured
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.one_side import memory_bytes
from benchmarks.ranks import Rank, join_ranks
from benchmarks.sides import PacelineSide
from paceline.parallel.collectives import gather_objects

# Replicas do without this import, which is a matter of time and not of what they keep.
from paceline.parallel.fsdp import apply as _sharding  # noqa: F401
from paceline.parallel.memory import layout_cost, parameter_sizes
from paceline.parallel.strategy import StateBytes

CLEAR_PEAK = "5"
"""Written to clear_refs, it sets VmHWM to VmRSS (proc_pid_clear_refs(5))."""


def give_back() -> None:
    """Let the allocator hand back what is free: glibc keeps freed blocks below its threshold, which grows to 32 MiB."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def kept_bytes(side: PacelineSide) -> dict[str, int]:
    """State of this rank, from the tensors themselves."""
    step = side.session.step
    gradients, buffers = step.reducer.state_bytes()
    return {
        "parameters": _bytes(step.parameters),
        "gradients": gradients,
        "moments": _bytes(t for state in step.optimizer.state.values() for t in state.values()),
        "buffers": buffers,
    }


def stated(rank: Rank) -> tuple[StateBytes, int]:
    """State between steps, and growth at the peak of a step, as the plan has them for this rank."""
    resolved = rank.resolved
    cost = layout_cost(
        parameter_sizes(resolved.spec, 4), resolved.layout, resolved.job.optimizer, resolved.ddp, resolved.fsdp,
        resolved.batch.accumulation, rank.world.rank,
    )  # fmt: skip
    return cost.at_rest or cost.state, resolved.memory.growth_bytes


def measure(rank: Rank, before: int) -> dict[str, Any]:
    """Growth of this rank over `before`: with the model made, between steps, and at the peak of a step and of its life."""
    side = PacelineSide(rank)
    steps = rank.options["steps"]
    found: dict[str, Any] = {"made_bytes": memory_bytes("VmRSS") - before}
    side.run(steps)
    start_peak = memory_bytes("VmHWM") - before
    give_back()
    Path("/proc/self/clear_refs").write_text(CLEAR_PEAK, encoding="ascii")
    began = time.perf_counter()
    side.run(steps)
    found["seconds_per_step"] = (time.perf_counter() - began) / steps
    found["step_peak_bytes"] = memory_bytes("VmHWM") - before
    found["peak_bytes"] = max(start_peak, found["step_peak_bytes"])
    found["rest_as_is_bytes"] = memory_bytes("VmRSS") - before
    give_back()
    found["rest_bytes"] = memory_bytes("VmRSS") - before
    found["kept"] = kept_bytes(side)
    state, peak = stated(rank)
    found["stated"] = {key: getattr(state, key) for key in found["kept"]}
    found["stated_peak_bytes"] = peak
    found["loss"] = side.last_loss()
    side.close()
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def main() -> None:
    gc.collect()
    before = memory_bytes("VmRSS")
    with join_ranks() as rank:
        found = measure(rank, before)
        ranks = gather_objects(found, torch.distributed.group.WORLD)
        torch.distributed.barrier()
        rank.tell({"ranks": ranks, "planned": rank.resolved.memory.to_record(), "before_bytes": before})


if __name__ == "__main__":
    main()
