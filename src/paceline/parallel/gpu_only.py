"""CUDA graphs and float8 products: on what and under which layout each is refused, and why. Imports no torch.

Neither is part of this version, so that neither is accepted: a setting without effect would be a promise that nothing
keeps. The tables give the first reason that holds, from those that no version will change to the one that says so.
docs/guide/platforms.md shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

from paceline.cluster.probe import Host
from paceline.errors import JobError
from paceline.parallel.config import ParallelSection
from paceline.parallel.layout import Layout


class Refusal(NamedTuple):
    """Where a setting cannot be had, and what would have to be otherwise."""

    where: str
    when: Callable[[ParallelSection, Layout, Host], bool]
    reason: str


def _over(axis: str) -> Callable[[ParallelSection, Layout, Host], bool]:
    return lambda parallel, layout, host: layout.degrees()[axis] > 1


def _on_cpu(parallel: ParallelSection, layout: Layout, host: Host) -> bool:
    return host.device_kind == "cpu"


def _offloads(parallel: ParallelSection, layout: Layout, host: Host) -> bool:
    return parallel.offload != "none"


def _lacks_torchao(parallel: ParallelSection, layout: Layout, host: Host) -> bool:
    return find_spec("torchao") is None


def _stays_eager(parallel: ParallelSection, layout: Layout, host: Host) -> bool:
    return parallel.compile is False


def _always(parallel: ParallelSection, layout: Layout, host: Host) -> bool:
    return True


CUDA_GRAPHS = (
    Refusal("a processor", _on_cpu, "a graph replays kernels of a GPU, and these ranks compute on a processor"),
    Refusal("tp", _over("tp"), "blocks call collectives, and a replay that hangs in one cannot be given up"),
    Refusal("cp", _over("cp"), "attention calls collectives, and a replay that hangs in one cannot be given up"),
    Refusal("pp", _over("pp"), "passes wait for other ranks, and a replay that hangs in it cannot be given up"),
    Refusal("dp_shard", _over("dp_shard"), "weights are gathered into new memory, and a graph reads fixed addresses"),
    Refusal("dp_replicate", _over("dp_replicate"), "hooks of the backward reduce gradients, and a replay calls none"),
    Refusal("offload", _offloads, "moments that move between places have no fixed addresses"),
    Refusal("anything else", _always, "this version captures no graphs"),
)  # fmt: skip
"""Of `parallel.cuda_graphs`, the first that holds counts."""

FLOAT8 = (
    Refusal("a processor", _on_cpu, "processors have no float8 products: every one would be converted"),
    Refusal("no torchao", _lacks_torchao, "float8 layers are torchao's, which is not installed"),
    Refusal("compile = false", _stays_eager, "casts to float8 gain only where they are compiled"),
    Refusal("anything else", _always, "this version multiplies nothing in float8"),
)  # fmt: skip
"""Of `parallel.precision = "fp8"`, the first that holds counts."""


def check_gpu_only(parallel: ParallelSection, layout: Layout, host: Host) -> None:
    """Refuse CUDA graphs and float8.

    Raises:
        JobError: either was asked for; with the reason here, and what can be had instead.
    """
    if parallel.cuda_graphs:
        compiled = "parallel.compile=true merges kernels, which saves some of their launches"
        found = next(refusal for refusal in CUDA_GRAPHS if refusal.when(parallel, layout, host))
        raise _refusal("cuda_graphs", True, found, layout, host, f"Remove it; {compiled}.")
    if parallel.precision == "fp8":
        others = "auto, bf16, fp16, fp32 or fp64" if host.fp16 else "auto, bf16, fp32 or fp64"
        found = next(refusal for refusal in FLOAT8 if refusal.when(parallel, layout, host))
        raise _refusal("precision", "fp8", found, layout, host, f"Set parallel.precision to {others}.")


def _refusal(key: str, value: object, found: Refusal, layout: Layout, host: Host, hint: str) -> JobError:
    return JobError(
        f"refused on {host.device_name}, {layout}: {found.reason}",
        key=f"parallel.{key}",
        values={key: value, "device": host.device_name, "because_of": found.where, **layout.to_record()},
        hint=hint,
    )
