"""Map-style datasets of a user, in a module that loader workers can import."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKENIZERS_PARALLELISM = "TOKENIZERS_PARALLELISM"


@dataclass
class Numbers:
    """Sample i: two arrays and two numbers made of i. (No tensor: a worker would take seconds to import torch.)"""

    size: int = 40
    width: int = 3

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.before(index)
        row = np.full(self.width, index, dtype=np.float32)
        return {"x": row, "t": np.asarray([index, index]), "i": index, "f": index / 2}

    def before(self, index: int) -> None:
        """What happens before a sample is made."""


@dataclass
class Large(Numbers):
    """Samples of 400 kB."""

    width: int = 100_000


@dataclass
class Killed(Numbers):
    """Sample 5 ends its process by a signal."""

    number: int = int(signal.SIGKILL)

    def before(self, index: int) -> None:
        if index == 5:
            os.kill(os.getpid(), self.number)


@dataclass
class Raises(Numbers):
    """Sample 5 raises."""

    def before(self, index: int) -> None:
        if index == 5:
            raise RuntimeError("sample five is broken")


@dataclass
class Tensors(Numbers):
    """Samples of tensors."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        return {"t": torch.full((2,), float(index), requires_grad=True), "pid": os.getpid()}


@dataclass
class Slow(Numbers):
    """Each sample takes a minute."""

    def before(self, index: int) -> None:
        time.sleep(60)


@dataclass
class Environment(Numbers):
    """Samples tell about the process that makes them."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        from tokenizers import Tokenizer, models

        Tokenizer(models.BPE()).encode_batch(["a b", "c d"])
        value = os.environ.get(TOKENIZERS_PARALLELISM, "")
        return {"pid": os.getpid(), "parallel": len(value), "first": ord(value[0])}


class Odd:
    """Samples of which some do not fit the others."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if self.kind == "tuple":
            return (1, 2)
        if self.kind == "text":
            return {"x": "words"}
        if self.kind == "fields":
            return {"x": 1, f"y{index}": 2}
        return {"x": np.zeros(index + 1)}


class Unpicklable(Numbers):
    """Cannot be sent to a process."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
