"""A folder for checkpoints in memory where there is one: syncing a disk is most of the time of a small save."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A place that does not exist yet."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="paceline-test-", dir=memory if memory.is_dir() else tmp_path))
    yield folder / "checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
