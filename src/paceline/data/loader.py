"""The batches of each optimizer step, made ahead in other processes and handed out as torch tensors.

Legend: a step is a list of micro-batches; a micro-batch is a dict of tensors whose first dimension is the sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import torch

from paceline.data import order
from paceline.data.collate import Batch, StepShape, collate, make_step
from paceline.data.prefetch import Prefetcher
from paceline.data.shared import check_shared_memory, free_shared_memory, shared_memory_need
from paceline.data.worker import inside_worker
from paceline.errors import DataError, JobError

Tensors = dict[str, torch.Tensor]

__all__ = [
    "IterableLoader",
    "Loader",
    "check_shared_memory",
    "free_shared_memory",
    "shared_memory_need",
    "to_tensors",
]


def to_tensors(batch: Batch) -> Tensors:
    """The arrays as tensors over the same memory."""
    return {name: torch.from_numpy(array) for name, array in batch.items()}


class Loader:
    """Iterates over optimizer steps; each gives this rank's micro-batches.

    The order is a pure function of (seed, position): a loader started at step s gives what another one gives after s
    steps. Epochs follow one another without a gap, so a batch may span two of them. Workers start with the loader and
    end with `close`, at the last step, or with the rank. Tensors lie in a reused buffer for as long as they are
    referred to.

    Args:
        dataset: map-style and picklable. `TokenDataset`, or any whose items are dicts of arrays, tensors or numbers.
        global_batch: samples per optimizer step over all data ranks.
        microbatch: samples per micro-batch.
        dp_rank: this data rank.
        dp_degree: number of data ranks.
        seed: of the order.
        start_step: first step.
        steps: number of the step to stop before; None for no end.
        workers: processes; 0 makes batches in the rank.
        prefetch: steps ahead per process.
        rank: named in messages; the data rank unless given.

    Attributes:
        wait_seconds: time that the rank has waited for data, in all.
        last_wait_seconds: the same for the last step.
        notes: things worth telling the user once, such as full shared memory.

    Raises:
        JobError: the batch does not divide.
        DataError: the dataset is empty, has no length, or cannot be sent to a worker.
        WorkerFailed: on iteration, where a worker ended or its dataset raised.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        microbatch: int,
        dp_rank: int,
        dp_degree: int,
        seed: int,
        start_step: int = 0,
        steps: int | None = None,
        workers: int = 1,
        prefetch: int = 2,
        rank: int | None = None,
    ) -> None:
        _check(dataset)
        self.dataset = dataset
        self.step = start_step
        self.wait_seconds = 0.0
        self.last_wait_seconds = 0.0
        self._steps = steps
        self._shape = StepShape(global_batch, microbatch, dp_rank, dp_degree, seed)
        self._prefetcher: Prefetcher | None = None
        if workers and (steps is None or start_step < steps):
            self._prefetcher = Prefetcher(
                dataset,
                self._shape,
                workers=workers,
                prefetch=prefetch,
                first_step=start_step,
                last_step=steps,
                rank=dp_rank if rank is None else rank,
                quick=getattr(dataset, "quick", False),
            )

    def __iter__(self) -> Iterator[list[Tensors]]:
        return self

    def __next__(self) -> list[Tensors]:
        if self._steps is not None and self.step >= self._steps:
            self.close()
            raise StopIteration
        began = time.perf_counter()
        try:
            batches = self._prefetcher.take(self.step) if self._prefetcher else None
            if batches is None:
                batches = make_step(self.dataset, self._shape, self.step)
        except BaseException:
            self.close()
            raise
        tensors = [to_tensors(batch) for batch in batches]
        self.step += 1
        self.last_wait_seconds = time.perf_counter() - began
        self.wait_seconds += self.last_wait_seconds
        return tensors

    @property
    def notes(self) -> list[str]:
        """Things worth telling the user once."""
        return list(self._prefetcher.notes) if self._prefetcher else []

    @property
    def worker_process_ids(self) -> list[int]:
        """Processes that make batches for this rank."""
        return self._prefetcher.process_ids if self._prefetcher else []

    def close(self) -> None:
        """End the workers; may be called twice."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class IterableLoader:
    """Optimizer steps out of a stream that each rank has for itself, and that may be shorter on one rank than on
    another.

    Before each step the ranks agree whether all of them have one; where any has not, all stop at the same step.

    Args:
        stream: this rank's samples, dicts of arrays, tensors or numbers.
        global_batch, microbatch, dp_rank, dp_degree: as for `Loader`.
        agree: given whether this rank has a step, gives the answers of all data ranks (an all-gather).
        steps: step to stop before; None for no end.
        start_step: steps done before. Unless there is a `position`, their samples are read and left aside first, as a
            stream begins at its beginning.
        position: what `position` gave after these steps; only a stream with `load_state_dict` takes one.

    Attributes:
        ran_out: data ranks that had no further step, once the stream has ended.
        dropped_samples: samples that this rank had read for a step that was not taken.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        *,
        global_batch: int,
        microbatch: int,
        dp_rank: int,
        dp_degree: int,
        agree: Callable[[bool], list[bool]],
        steps: int | None = None,
        start_step: int = 0,
        position: Any = None,
    ) -> None:
        mine = order.positions_of_step(0, global_batch, dp_rank, dp_degree, microbatch)
        self._per_rank = sum(positions.size for positions in mine)
        self._microbatch = microbatch
        self._source = stream
        if position is not None and hasattr(stream, "load_state_dict"):
            stream.load_state_dict(position)
        self._stream = iter(stream)
        self._rank = dp_rank
        self._agree = agree
        self._steps = steps
        self._taken = start_step * self._per_rank
        self.step = start_step
        if position is None or not hasattr(stream, "load_state_dict"):
            self._skip(start_step)
        self.wait_seconds = 0.0
        self.last_wait_seconds = 0.0
        self.ran_out: list[int] = []
        self.dropped_samples = 0

    def __iter__(self) -> Iterator[list[Tensors]]:
        return self

    def __next__(self) -> list[Tensors]:
        if self.ran_out or (self._steps is not None and self.step >= self._steps):
            raise StopIteration
        began = time.perf_counter()
        items = self._read()
        answers = self._agree(len(items) == self._per_rank)
        if not all(answers):
            self.ran_out = [rank for rank, has_step in enumerate(answers) if not has_step]
            self.dropped_samples = len(items)
            raise StopIteration
        tensors = self._batches(items)
        self._taken += len(items)
        self.step += 1
        self.last_wait_seconds = time.perf_counter() - began
        self.wait_seconds += self.last_wait_seconds
        return tensors

    def report(self) -> str | None:
        """Which ranks ran out, when, and what was dropped here; None while the stream goes on."""
        if not self.ran_out:
            return None
        names = ", ".join(str(r) for r in self.ran_out)
        which = f"data rank {names}" if len(self.ran_out) == 1 else f"data ranks {names}"
        return (
            f"{which} ran out of data after {self.step} steps; all ranks stop there, and data rank {self._rank} drops "
            f"{self.dropped_samples} samples that it had read"
        )

    def position(self) -> Any:
        """Where the stream is, as plain JSON, if it can say so (`state_dict`); None where steps have to be counted.

        Raises:
            JobError: what it says is not what JSON gives back.
        """
        if not (hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")):
            return None
        state = self._source.state_dict()
        try:
            is_plain = msgspec.json.decode(msgspec.json.encode(state)) == state
        except (TypeError, NotImplementedError, ValueError):
            is_plain = False
        if not is_plain:
            raise JobError(
                f"the position that {type(self._source).__name__}.state_dict() gives is not plain JSON, so that a "
                f"checkpoint cannot hold it: {str(state)[:200]}",
                hint="Give it numbers, texts, lists, and dicts with texts as keys; or no state_dict, and a resumed run "
                "reads the samples of the steps that are done and leaves them aside.",
            )
        return state

    def close(self) -> None:
        """Nothing to end: the stream is read in the rank."""

    def _skip(self, steps: int) -> None:
        for _ in range(steps):
            self._read()

    def _read(self) -> list[Any]:
        items: list[Any] = []
        while len(items) < self._per_rank:
            try:
                items.append(next(self._stream))
            except StopIteration:
                break
        return items

    def _batches(self, items: list[Any]) -> list[Tensors]:
        ids = range(self._taken, self._taken + len(items))
        return [
            to_tensors(collate(items[m : m + self._microbatch], ids[m : m + self._microbatch]))
            for m in range(0, len(items), self._microbatch)
        ]


def _check(dataset: Any) -> None:
    if inside_worker():
        raise JobError(
            "this script trains when it is imported, as a loader worker does to find the dataset's class",
            hint='Put the training under if __name__ == "__main__":, or the dataset into a module of its own.',
        )
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{type(dataset).__name__} has no length or no items, so samples cannot be ordered",
            hint="Give it __len__ and __getitem__, or read it as a stream with IterableLoader.",
        )
    if len(dataset) == 0:
        raise DataError(f"{type(dataset).__name__} has no samples", hint="Give a dataset with at least one sample.")
