"""Samples to batches, the same in the rank and in its loader workers. Imports no torch.

A batch is a dict of numpy arrays whose first dimension is the sample, plus `sample_ids` (int64), the samples' numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data import order
from paceline.errors import DataError

Batch = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class StepShape:
    """What decides which samples a rank reads in a step; see `order.positions_of_step`."""

    global_batch: int
    microbatch: int
    dp_rank: int
    dp_degree: int
    seed: int


def make_step(dataset: Any, shape: StepShape, step: int) -> list[Batch]:
    """The micro-batches of a rank in an optimizer step.

    Args:
        dataset: has `len` and items; `indices_at(seed, positions)` and `batch(indices)` are used where it has them.
        shape: batch sizes, rank and seed.
        step: number of the optimizer step, from 0.

    Raises:
        DataError: samples that cannot be put together.
    """
    positions = order.positions_of_step(step, shape.global_batch, shape.dp_rank, shape.dp_degree, shape.microbatch)
    flat = np.concatenate(positions)
    in_order = getattr(dataset, "indices_at", None)
    indices = in_order(shape.seed, flat) if in_order else order.samples_at(shape.seed, flat, len(dataset))
    return [make_batch(dataset, indices[m : m + shape.microbatch]) for m in range(0, flat.size, shape.microbatch)]


def make_batch(dataset: Any, indices: npt.NDArray[np.int64]) -> Batch:
    """One batch of the samples `indices`."""
    if hasattr(dataset, "batch"):
        made: Batch = dataset.batch(indices)
        return made
    batch = collate([dataset[i] for i in indices.tolist()], indices.tolist())
    batch.setdefault("sample_ids", np.asarray(indices, dtype=np.int64))
    return batch


def collate(items: Sequence[Any], ids: Sequence[int]) -> Batch:
    """Stack the fields of dict-like samples.

    Raises:
        DataError: a sample is no dict, the fields differ, or a field has several shapes or is no number.
    """
    first = items[0]
    for item, sample in zip(items, ids, strict=True):
        if not isinstance(item, Mapping):
            raise DataError(
                f"sample {sample} is a {type(item).__name__}, not a dict of arrays, tensors or numbers",
                hint='Return a dict from __getitem__, for example {"x": x, "y": y}.',
            )
        if item.keys() != first.keys():
            raise DataError(f"sample {sample} has fields {sorted(item)}, sample {ids[0]} has {sorted(first)}")
    return {str(key): _stack(str(key), [item[key] for item in items], ids) for key in first}


def _stack(key: str, values: Sequence[Any], ids: Sequence[int]) -> npt.NDArray[Any]:
    arrays = [_array(key, value, sample) for value, sample in zip(values, ids, strict=True)]
    shapes = {a.shape for a in arrays}
    if len(shapes) > 1:
        odd = next(k for k, a in enumerate(arrays) if a.shape != arrays[0].shape)
        raise DataError(
            f"field {key!r} has shape {arrays[0].shape} in sample {ids[0]}, {arrays[odd].shape} in sample {ids[odd]}",
            values={"field": key},
            hint="Pad or cut samples to one shape in the dataset.",
        )
    return np.stack(arrays)


def _array(key: str, value: Any, sample: int) -> npt.NDArray[Any]:
    """A numpy array of a number, an array or a tensor (which knows how to become one)."""
    array = np.asarray(value.detach().numpy() if hasattr(value, "detach") else value)
    if array.dtype.kind not in "biufc":
        raise DataError(
            f"field {key!r} of sample {sample} is {type(value).__name__}, which is no number, array or tensor",
            values={"field": key, "sample": sample},
            hint="Turn it into numbers in the dataset, or leave the field out.",
        )
    return array
