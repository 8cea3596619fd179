"""Damage is done to the one copy, and is what it says."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.drill import damage


def checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "COMMIT").write_bytes(b"x" * 10)
    (folder / "rank-00000.safetensors").write_bytes(bytes(range(256)) * 8)
    return folder


def test_one_bit_differs_and_a_linked_copy_is_left_alone(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "whole")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in whole.iterdir():
        os.link(path, copy / path.name)
    done = damage.flip_bit(copy, seed=3)
    before, after = ((folder / "rank-00000.safetensors").read_bytes() for folder in (whole, copy))
    differing = [at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert differing == [done["byte"]] and done["byte"] >= len(before) // 2
    assert before[differing[0]] ^ after[differing[0]] == 1 << done["bit"]
    assert (copy / "COMMIT").read_bytes() == b"x" * 10


def test_half_a_file_is_cut_off(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "one")
    done = damage.cut_off(folder)
    assert done == {"file": "rank-00000.safetensors", "bytes": 1024, "of": 2048}
    assert (folder / "rank-00000.safetensors").stat().st_size == 1024
