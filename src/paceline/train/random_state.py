"""The states of this process's random generators as plain JSON, and back: python, numpy, torch and its device.

Read at the moment of a save, and restored last before the first step: set-up code that draws or seeds in between must not
matter.
"""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import torch


def capture(device: torch.device) -> dict[str, Any]:
    """All states. numpy's global one is there only where numpy is loaded."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, _packed_words(words), gauss],
        "torch": _packed(torch.get_rng_state()),
    }
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, base64.b64encode(keys.tobytes()).decode(), position, has_gauss, cached]
    if device.type == "cuda":
        state["cuda"] = _packed(torch.cuda.get_rng_state(device))
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators where `capture` found them; those that it did not know stay as they are."""
    version, words, gauss = state["python"]
    random.setstate((version, _unpacked_words(words), gauss))
    torch.set_rng_state(_unpacked(state["torch"]))
    if "numpy" in state:
        import numpy as np

        name, keys, position, has_gauss, cached = state["numpy"]
        words_np = np.frombuffer(base64.b64decode(keys), dtype=np.uint32)
        np.random.set_state((name, words_np, position, has_gauss, cached))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(_unpacked(state["cuda"]), device)


def seed_anew(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Generators for a rank that the checkpoint has no states of: a function of (seed, step, rank)."""
    word = (seed * 1_000_003 + step) * 1_000_003 + rank
    random.seed(word)
    torch.manual_seed(word % 2**63)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(word % 2**32)


def _packed(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _unpacked(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _packed_words(words: tuple[int, ...]) -> str:
    """Mersenne twister state: 624 words and the position, 32 bits each."""
    return base64.b64encode(b"".join(word.to_bytes(4, "little") for word in words)).decode()


def _unpacked_words(text: str) -> tuple[int, ...]:
    data = base64.b64decode(text)
    return tuple(int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4))
