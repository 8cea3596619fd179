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
_ELSEWHERE = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
"""Where torch's own kernel of the operator, which is one for all devices, is still found once the CPU has ours.

Dispatching there lets go of the interpreter while it waits; what `torch.library.get_kernel` gives does not (torch 2.13), and
then Gloo's thread, which needs it to give back the tensors of the collective before, and this one wait for each other.
"""

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
    operator: Any = getattr(getattr(torch.ops, _FUNCTIONAL), _WAIT).default._handle

    def wait_tensor(tensor: torch.Tensor) -> Any:
        began = time.perf_counter()
        try:
            return operator.redispatch_boxed(_ELSEWHERE, tensor)
        finally:
            _count(began)

    _library = torch.library.Library(_FUNCTIONAL, "IMPL")  # type: ignore[no-untyped-call]
    _library.impl(_WAIT, wait_tensor, "CPU")  # type: ignore[no-untyped-call]


def waited_seconds() -> float:
    """Since `count_waits`."""
    return _seconds


def _count(began: float) -> None:
    global _seconds
    if threading.get_ident() == _thread:
        _seconds += time.perf_counter() - began
