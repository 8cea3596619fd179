"""Damage to a checkpoint on disk, as a bad medium or a cut copy leaves it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

WORD = 8
EXPONENT_BIT = 6


def flip_bit(folder: Path, seed: int) -> dict[str, Any]:
    """Flip one bit in the second half of the largest file of a checkpoint, where its numbers are; says which.

    A high bit of an exponent, in whatever width: a low one of a mantissa may be rounded away in the steps that follow, and
    then a control without checksums would be survived by chance.
    """
    path, size = _largest(folder)
    at, bit = random.Random(seed).randrange(size // 2 // WORD, size // WORD) * WORD + WORD - 1, EXPONENT_BIT
    _own(path)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
    return {"file": path.name, "byte": at, "bit": bit}


def cut_off(folder: Path) -> dict[str, Any]:
    """Cut the largest file of a checkpoint to half of its length; says which."""
    path, size = _largest(folder)
    _own(path)
    os.truncate(path, size // 2)
    return {"file": path.name, "bytes": size // 2, "of": size}


def _largest(folder: Path) -> tuple[Path, int]:
    sizes = {path: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    path = max(sorted(sizes), key=lambda p: sizes[p])
    return path, sizes[path]


def _own(path: Path) -> None:
    """A file that other folders hold a link to is damaged here alone."""
    if path.stat().st_nlink > 1:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
