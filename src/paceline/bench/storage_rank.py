"""One rank of `paceline bench storage`: writes, syncs, renames and reads in a folder of its own, beside the other ranks.

Files are written as checkpoints are (`checkpoint.storage_write`: past the page cache where the file system can).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.bench.rank import Rank, joined, meet, slowest
from paceline.bench.rows import spread_of
from paceline.checkpoint.storage_errors import explain
from paceline.checkpoint.storage_local import LocalStorage
from paceline.checkpoint.storage_write import write_parts
from paceline.errors import PacelineError
from paceline.units import KiB, MiB
from paceline.workers.heartbeat import beat

PART_BYTES = 8 * MiB
SMALL_BYTES = 4 * KiB
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def program(rank: Rank) -> None:
    """Tell a row per operation."""
    own = Path(rank.options["folder"]) / f"rank-{rank.world.rank}"
    storage = LocalStorage(str(own.parent))
    try:
        storage.make_folder(own.name)
        _Disk(rank, storage, own).run()
    except OSError as error:
        raise _explained(error, storage, own, rank.options["size_bytes"]) from None


def _explained(error: OSError, storage: LocalStorage, own: Path, size: int) -> PacelineError:
    found = explain(error, storage, own.name, size)
    found.key = "--dir"
    found.hint = "Name another folder with --dir, or free space there."
    return found


class _Disk:
    """The operations on one rank's folder; every rank does each of them at the same time."""

    def __init__(self, rank: Rank, storage: LocalStorage, own: Path) -> None:
        self.rank = rank
        self.storage = storage
        self.own = own
        # Random, so that a file system that compresses, or finds equal blocks, gains nothing.
        self.part = os.urandom(PART_BYTES)
        self.parts = max(1, rank.options["size_bytes"] // PART_BYTES)
        self.files = int(rank.options["files"])

    def run(self) -> None:
        size, ranks = self.parts * PART_BYTES, self.rank.world.world_size
        times: dict[str, list[float]] = {"write": [], "sync": [], "durable_write": [], "read": []}
        for trial in range(self.rank.options["trials"]):
            beat(trial, "writing and reading a large file", allow_seconds=600.0)
            path = self.own / f"large-{trial}"
            written, synced = self._write(path)
            read = self._timed(lambda path=path: self._read(path))  # type: ignore[misc]
            path.unlink()
            both = [a + b for a, b in zip(written, synced, strict=True)]
            for name, seconds in (("write", written), ("sync", synced), ("durable_write", both), ("read", read)):
                times[name] += seconds
        for name, samples in times.items():
            self._tell(name, size, 1, samples, size * ranks if name != "sync" else 0)
        self._tell("rename", 0, 1, self._renames())
        small = self._small()
        for name, seconds in small.items():
            self._tell(name, SMALL_BYTES, self.files, seconds)

    def _write(self, path: Path) -> tuple[list[float], list[float]]:
        """Seconds of the slowest rank: until all bytes were handed over, and until they were durable."""
        handle = os.open(path, _NEW_FILE, 0o666)
        try:
            written = self._timed(lambda: write_parts(handle, str(path), [self.part] * self.parts))
            return written, self._timed(lambda: os.fsync(handle))
        finally:
            os.close(handle)

    def _read(self, path: Path) -> None:
        """Read the file back and compare it, from the disk where the system lets go of its pages."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            for index in range(self.parts):
                found = os.pread(handle, PART_BYTES, index * PART_BYTES)
                if found != self.part:
                    raise PacelineError(
                        f"{path} gave back other bytes than were written, from byte {index * PART_BYTES} on",
                        values={"path": str(path), "offset": index * PART_BYTES},
                        hint="This disk or file system damages data: do not keep checkpoints there.",
                    )
        finally:
            os.close(handle)

    def _renames(self) -> list[float]:
        """Seconds of a small file's rename into place with the sync of its folder: what commits a checkpoint."""
        samples = []
        for index in range(10):
            (self.own / "new.tmp").write_bytes(b"x")
            samples += self._timed(lambda index=index: self._rename(index))  # type: ignore[misc]
        return samples

    def _rename(self, index: int) -> None:
        (self.own / "new.tmp").rename(self.own / f"new-{index}")
        self.storage.sync_folder(self.own.name)

    def _small(self) -> dict[str, list[float]]:
        """Seconds for many small files: made and synced one by one, listed, read, removed."""
        folder = self.own / "small"
        folder.mkdir()
        data = os.urandom(SMALL_BYTES)
        names = [f"{self.own.name}/small/{index}" for index in range(self.files)]
        beat(0, "small files", allow_seconds=600.0)
        return {
            "small_write": self._timed(
                lambda: self._each(names, lambda name: self.storage.write(name, [data], SMALL_BYTES))
            ),
            "small_list": self._timed(lambda: self.storage.entries(f"{self.own.name}/small")),
            "small_read": self._timed(lambda: self._each(names, self.storage.read)),
            "small_remove": self._timed(lambda: self._each(names, self.storage.remove)),
        }

    @staticmethod
    def _each(names: Sequence[str], call: Callable[[str], object]) -> None:
        for name in names:
            call(name)

    def _timed(self, call: Callable[[], object]) -> list[float]:
        """Seconds of the slowest rank, all of which begin together."""
        meet()
        began = time.perf_counter()
        call()
        return slowest([time.perf_counter() - began])

    def _tell(self, operation: str, size: int, count: int, samples: list[float], moved_bytes: int = 0) -> None:
        seconds, ranks = statistics.median(samples), self.rank.world.world_size
        self.rank.tell(
            {"kind": "row", "operation": operation, "ranks": ranks, "size_bytes": size, "count": count,
             "seconds": seconds, "spread": spread_of(samples), "trials": len(samples),
             "bytes_per_second": moved_bytes / seconds if moved_bytes else None,
             "operations_per_second": count * ranks / seconds}
        )  # fmt: skip


def main() -> None:
    with joined() as rank:
        program(rank)


if __name__ == "__main__":
    main()
