"""What a data-parallel strategy offers the training step: gradients that are sums over all data ranks."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn


class Reducer(Protocol):
    """Called once per micro-batch (`begin`) and once per optimizer step (`finish`); gradients are sums after that.

    `gradient_norm` is the 2-norm over all gradients of one replica, equal on all ranks; it may communicate.
    """

    def begin(self, *, last: bool, first: bool) -> None: ...
    def finish(self) -> None: ...
    def gradient_norm(self) -> Tensor: ...
    def untouched(self) -> list[nn.Parameter]: ...
    def close(self) -> None: ...
    def state_bytes(self) -> tuple[int, int]: ...
