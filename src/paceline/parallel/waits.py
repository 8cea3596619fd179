"""For how long this process waits for other ranks, wherever in a step that is.

Under sharding, tensor and context parallelism a rank exchanges in the midst of forward and backward, and what it waits
there is no work of its own. Two places see all of it: `Work.wait`, which a call that is not asynchronous ends in, and the
operator `wait_tensor`, which a compiled graph waits in (torch 2.13, distributed_c10d.py and _functional_collectives.py).
With Gloo that is the time until the last rank has come and the bytes are there; work of a GPU is waited for on the GPU.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

_FUNCTIONAL, _WAIT = "_c10d_functional", "wait_tensor"

_seconds = 0.0
_thread = 0
_library: torch.library.Library | None = None
"""Kept: its kernels go when it does."""


def count_waits() -> None:
    """From now on the waits of this thread are counted. Once a process; on a CPU the backward runs in the same thread."""
    global _thread, _library
    _thread = threading.get_ident()
    if _library is not None:
        return
    own_wait: Any = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **more: Any) -> Any:
        began = time.perf_counter()
        try:
            return own_wait(work, *args, **more)
        finally:
            _count(began)

    work_class: Any = dist.Work
    work_class.wait = wait
    kernel = torch.library.get_kernel(f"{_FUNCTIONAL}::{_WAIT}", "CPU")

    def wait_tensor(keys: Any, tensor: torch.Tensor) -> Any:
        began = time.perf_counter()
        try:
            return kernel.call_boxed(keys, tensor)
        finally:
            _count(began)

    _library = torch.library.Library(_FUNCTIONAL, "IMPL")  # type: ignore[no-untyped-call]
    _library.impl(_WAIT, wait_tensor, "CPU", with_keyset=True)  # type: ignore[no-untyped-call]


def waited_seconds() -> float:
    """Since `count_waits`."""
    return _seconds


def _count(began: float) -> None:
    global _seconds
    if threading.get_ident() == _thread:
        _seconds += time.perf_counter() - began
