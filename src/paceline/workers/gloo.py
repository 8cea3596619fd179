"""Gloo groups that run their collectives one after the other: torch's two threads a group corrupt memory.

Seen in torch 2.13. Each thread of a `ProcessGroupGloo` notes the name of the collective that it ended in one string of the
group, without a lock (`ProcessGroupGloo::runLoop`). Where two end at once and one name is longer than the 15 characters that
a string holds in place, as a reduce-scatter's is, the other name is written into memory that was just given back: 24 bytes
of whatever lives there next, or `malloc(): unaligned tcache chunk detected` some steps later (docs/log.md).

With one thread there is one writer. Collectives of a group start in the same order on all ranks anyway, so none waits for
one behind it. Torch has no setting for it: a group takes its options from the constructor, which `torch.distributed` calls by
name.
"""

from __future__ import annotations

import datetime
import os
from typing import Any

from torch.distributed import distributed_c10d

from paceline.workers.interfaces import GLOO

THREADS = 1

_Gloo: Any = distributed_c10d.ProcessGroupGloo


class _IsGloo(type):
    """What is a `ProcessGroupGloo` is one of ours."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Gloo, name)


class OneThreadGloo(metaclass=_IsGloo):
    """In the place of `ProcessGroupGloo`: makes one with a single thread."""

    def __new__(cls, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        options = _Gloo._Options()
        options._timeout = timeout
        options._threads = THREADS
        options._devices = _devices()
        return _Gloo(store, rank, size, options)


def run_one_at_a_time() -> None:
    """From now on `torch.distributed` makes Gloo groups with one thread. Call it before the first group is made."""
    distributed_c10d.ProcessGroupGloo = OneThreadGloo  # type: ignore[misc]


def _devices() -> list[Any]:
    """As torch finds them: the interfaces named, or the one of this host's name."""
    named = [name for name in os.environ.get(GLOO, "").split(",") if name]
    return [_Gloo.create_device(interface=name) for name in named] or [_Gloo.create_default_device()]
