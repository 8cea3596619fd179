"""The checkpoint writer on a disk that is full while one save is written, and has room again for the next. No torch.

Where the order names a folder of limited size (a tmpfs), that is filled; else each write of the save is told ENOSPC.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from paceline.checkpoint import storage, writer
from paceline.checkpoint.folders import step_of
from paceline.drill.order import Order, from_environment

BALLAST = "ballast"
_BLOCK = bytes(2**20)


def main() -> None:
    order = from_environment()
    if order is not None and not order.done():
        storage.on_operation = _Disk(order).about_to
    writer.main()


class _Disk:
    """Is full from the first save at or after the order's step until the next one."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._ballast = Path(order.place) / BALLAST if order.place else None
        self._full_at: int | None = None
        self._is_over = False

    def about_to(self, operation: str, path: str) -> None:
        step = next((found for part in Path(path).parts if (found := step_of(part)) is not None), None)
        if self._is_over or step is None or step < self._order.step:
            return
        if self._full_at is None:
            self._full_at = step
            self._order.note(step=step, rank=None)
            if self._ballast is not None:
                _fill(self._ballast)
        elif step > self._full_at:
            self._is_over = True
            if self._ballast is not None:
                self._ballast.unlink(missing_ok=True)
            return
        if self._ballast is None and operation in ("create", "write", "sync"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def _fill(ballast: Path) -> None:
    """Until nothing more fits."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(_BLOCK):
                pass
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


if __name__ == "__main__":
    main()
