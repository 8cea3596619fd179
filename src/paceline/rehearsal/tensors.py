"""The final states of two runs, tensor by tensor: weights, moments, and what is no tensor."""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor

from paceline.checkpoint.folders import read_manifest
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.reader import read_whole
from paceline.checkpoint.storage import Storage, open_storage

OWN_PARTS = "buffer/"
"""Tensors of single ranks: another number of ranks has others."""

COMPARED_STATE = ("optimizer", "loss_scale")


class StateDifference(msgspec.Struct, frozen=True, kw_only=True):
    """How two final states differ.

    Attributes:
        tensors, equal: compared, and equal bit for bit.
        largest, worst: the largest norm of a difference relative to the norm of the tensor, and that tensor.
        missing: tensors that one of the states lacks, or has with another shape or type.
        counters_equal: update counts, loss scale, steps and samples.
        random_equal: the random states of all ranks; None across numbers of ranks.
    """

    tensors: int
    equal: int
    largest: float
    worst: str | None
    missing: tuple[str, ...]
    counters_equal: bool
    random_equal: bool | None

    @property
    def exact(self) -> bool:
        """Everything is equal bit for bit."""
        whole = self.equal == self.tensors and not self.missing
        return whole and self.counters_equal and self.random_equal is not False


def compare_states(expected: str, actual: str, step: int) -> StateDifference:
    """The checkpoints of `step` in two places, every byte of them read and verified.

    Raises:
        NoCheckpoint: one of them is not there, or damaged.
    """
    storages = (open_storage(expected), open_storage(actual))
    a, b = (read_manifest(storage, step) for storage in storages)
    same_ranks = a.world_size == b.world_size
    names = [{n for n in m.tensors if same_ranks or not n.startswith(OWN_PARTS)} for m in (a, b)]
    shared = sorted(n for n in names[0] & names[1] if _kind(a, n) == _kind(b, n))
    equal, largest, worst = _compare(storages, (a, b), shared)
    return StateDifference(
        tensors=len(shared), equal=equal, largest=largest, worst=worst,
        missing=tuple(sorted((names[0] | names[1]) - set(shared))),
        counters_equal=_counters(a) == _counters(b),
        random_equal=a.ranks == b.ranks if same_ranks else None,
    )  # fmt: skip


def _compare(
    storages: tuple[Storage, Storage], manifests: tuple[Manifest, Manifest], names: list[str]
) -> tuple[int, float, str | None]:
    equal, largest, worst = 0, 0.0, None
    first, second = (read_whole(s, m, names) for s, m in zip(storages, manifests, strict=True))
    for (name, a), (_, b) in zip(first, second, strict=True):
        if same_bits(a, b):
            equal += 1
        elif worst is None or difference(a, b) > largest:
            largest, worst = difference(a, b), name
    return equal, largest, worst


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one type and shape hold the same bytes: NaN equals NaN, 0 does not equal -0."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def difference(expected: Tensor, actual: Tensor) -> float:
    """The norm of the difference relative to the expected norm; infinite where that is zero, or no number is left."""
    a, b = expected.double(), actual.double()
    apart, size = float((a - b).norm()), float(a.norm())
    if apart == 0.0:
        return 0.0
    return apart / size if size > 0 and math.isfinite(apart / size) else math.inf


def _kind(manifest: Manifest, name: str) -> tuple[str, tuple[int, ...]]:
    stored = manifest.tensors[name]
    return stored.dtype, stored.shape


def _counters(manifest: Manifest) -> tuple[object, ...]:
    return (manifest.step, manifest.samples, *(manifest.state.get(key) for key in COMPARED_STATE))
