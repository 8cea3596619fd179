"""Bytes that tensors hold at a moment, counted below autograd: what is saved for a backward, by whatever means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Knows every storage that an operator returned while it was entered, less those of `known` tensors (whose views
    operators return as well); `count()` sums those that still exist."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference.cdata not in self._known:
                    self._made[reference.cdata] = (reference, storage.nbytes())
        return result

    def count(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())
