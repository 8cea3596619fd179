"""`paceline bench storage`: what a checkpoint directory does under all ranks at once. Imports no torch."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.bench.ranks import collect, default_procs, joins_others
from paceline.bench.result import Result, result_of
from paceline.checkpoint.storage_errors import explain
from paceline.checkpoint.storage_local import LocalStorage
from paceline.cluster.measured import StorageRates, save_measured
from paceline.cluster.probe import probe_host
from paceline.errors import DiskFull, JobError, PacelineError, UsageError
from paceline.units import format_bandwidth, format_bytes, format_percent, format_seconds

MODULE = "paceline.bench.storage_rank"
TRIALS = 3
ROOM = 1.1
"""Of the files' bytes: file systems take some for themselves."""


def measure(place: str, *, procs: int | None, size_bytes: int, files: int, say: Callable[[str], None]) -> Result | None:
    """Measure in a fresh folder inside `place`, which is removed; None on ranks other than 0.

    Args:
        size_bytes: of each rank's large file.
        files: small ones of each rank.

    Raises:
        UsageError: under torchrun, where no one may choose the folder for the others.
        DiskFull: the files do not fit.
        JobError: the place cannot be written.
    """
    if joins_others():
        raise UsageError(
            "bench storage starts its own ranks and cannot join torchrun's",
            hint="Run it on each host, with the number of ranks that a job has there.",
        )
    host = probe_host()
    ranks = procs if procs is not None else default_procs(host)
    with _fresh_folder(place, ranks * size_bytes, ranks * files) as folder:
        given = {"folder": str(folder), "size_bytes": size_bytes, "files": files, "trials": TRIALS, "device": "cpu"}
        told = collect(MODULE, given, ranks, tell=lambda record: say(line(record)) if record["kind"] == "row" else None)
    assert told is not None  # for the type checker: this process is no rank
    return result_of("storage", told, host=host.name, place=place, ranks=ranks)


@contextmanager
def _fresh_folder(place: str, needed_bytes: int, needed_files: int) -> Iterator[Path]:
    """A folder of our own in the place, removed with all in it; and the place itself where it was not there before."""
    if "://" in place and not place.startswith("file://"):
        raise UsageError(
            f"{place} is no folder: this version measures file systems", key="--dir", values={"dir": place},
            hint="Name a folder.",
        )  # fmt: skip
    storage = LocalStorage(place)
    if storage.kind("") == "file":
        raise JobError(f"{place} is a file", key="--dir", values={"dir": place}, hint="Name a folder.")
    made = [p for p in (Path(storage.root), *Path(storage.root).parents) if not p.exists()]
    try:
        _check_room(storage, needed_bytes, needed_files)
        storage.make_folder("")
        folder = Path(storage.root) / f".paceline-bench-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
    except OSError as error:
        found = explain(error, storage, "")
        found.key, found.hint = "--dir", "Name a folder that you may write with --dir."
        raise found from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()


def _check_room(storage: LocalStorage, needed_bytes: int, needed_files: int) -> None:
    free, files = storage.free_bytes(), storage.free_files()
    if free is not None and free < ROOM * needed_bytes:
        raise DiskFull(
            f"{storage.place} has {format_bytes(free)} free, and the ranks' files need {format_bytes(ROOM * needed_bytes)}",
            key="--dir",
            values={"free_bytes": free, "needed_bytes": needed_bytes},
            hint="Give a smaller --size, or name another folder with --dir.",
        )
    if files is not None and files < needed_files:
        raise DiskFull(
            f"{storage.place} has room for {files} more files (inodes), and {needed_files} are to be made",
            key="--dir",
            values={"free_files": files, "needed_files": needed_files},
            hint="Give fewer --files, or name another folder with --dir.",
        )


def line(row: dict[str, Any]) -> str:
    """One row in words."""
    rate = (
        format_bandwidth(row["bytes_per_second"])
        if row["bytes_per_second"]
        else f"{row['operations_per_second']:.0f}/s"
    )
    what = format_bytes(row["size_bytes"]) if row["size_bytes"] else ""
    many = f"{row['count']} x {what}" if row["count"] > 1 else what
    time = format_seconds(row["seconds"])
    return f"{row['operation']:<14} {many:>16}  {time:>9}  {rate:>12}  +- {format_percent(row['spread'])}"


def describe(result: Result) -> Iterator[str]:
    """The rows as text."""
    yield f"{result.about['place']}: {result.about['ranks']} ranks at once; rates of all of them, times of the slowest"
    yield "operation                  size       time          rate  spread"
    yield from map(line, result.rows)


def save(path: Path, result: Result) -> None:
    """Write the rates into a measured cluster's file.

    Raises:
        PacelineError: the measurement is not complete.
    """
    rows = {row["operation"]: row for row in result.rows}
    if "small_remove" not in rows:
        raise PacelineError("the measurement ended early, so nothing was saved", key="--save")
    ranks = result.about["ranks"]
    part = StorageRates(
        date=result.date, command=result.command, place=str(Path(result.about["place"]).resolve()), ranks=ranks,
        write_bytes_per_second=rows["durable_write"]["bytes_per_second"],
        read_bytes_per_second=rows["read"]["bytes_per_second"], sync_seconds=rows["sync"]["seconds"],
        rename_seconds=rows["rename"]["seconds"], small_files_per_second=rows["small_write"]["operations_per_second"],
    )  # fmt: skip
    save_measured(path, probe_host(), 1, ranks, storage=part)
