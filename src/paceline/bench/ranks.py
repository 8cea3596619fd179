"""Starts the ranks of a measurement like those of a training, and keeps what rank 0 has told, whatever becomes of them.

Imports no torch. A rank program is a module that calls `rank.joined`; what it tells goes into a file, line by line, so that
Ctrl-C and a rank that dies in the middle lose nothing that was measured before.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from paceline.cluster.probe import Host
from paceline.errors import Interrupted, PacelineError, UsageError, WorkerFailed
from paceline.workers import affinity, environment
from paceline.workers.start import plan_here, start
from paceline.workers.watch import watch

Tell = Callable[[dict[str, Any]], None]

STALL_SECONDS = 300.0
"""Longest time in which no rank gives a sign of life; every block of calls is one."""
_FOLLOW_SECONDS = 0.2


class Told(NamedTuple):
    """What rank 0 told, in order, and what the ranks came to: None where all of them ended well."""

    records: list[dict[str, Any]]
    error: PacelineError | None


def run_ranks(
    module: str,
    options: Mapping[str, Any],
    procs: int,
    *,
    tell: Tell | None = None,
    variables: Mapping[str, str] | None = None,
) -> Told:
    """`python -m MODULE OPTIONS_FILE TOLD_FILE` on `procs` ranks of this host. Call it from the main thread.

    Args:
        options: what the ranks are told, as JSON.
        tell: called with each record as it comes, from another thread.
        variables: of the ranks' environment, beside this process's.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        given, told = Path(name) / "options.json", Path(name) / "told.jsonl"
        given.write_text(json.dumps(options), encoding="utf-8")
        told.touch()
        cpus = plan_here(procs)
        quota = affinity.cpu_quota()
        for line in (affinity.describe(cpus, quota, os.environ), *affinity.warnings(cpus, quota, os.environ)):
            print(line, file=sys.stderr, flush=True)
        env = {**os.environ, **(variables or {})}
        run_id = f"bench-{uuid.uuid4().hex}"
        with (
            start([str(given), str(told)], procs=procs, module=module, run_id=run_id, cpus=cpus, env=env) as group,
            _followed(told, tell),
        ):
            error = watch(group, stall_seconds=STALL_SECONDS).error
        return Told(read_records(told), error)


def collect(module: str, options: Mapping[str, Any], procs: int, *, tell: Tell | None = None) -> Told | None:
    """Run a rank program's `program(rank)`: on `procs` ranks of this host, or as one of the ranks that a launcher started.

    Returns:
        None on ranks other than 0.

    Raises:
        PacelineError: on ranks other than 0, what they came to.
    """
    return _join(module, options, tell) if joins_others() else run_ranks(module, options, procs, tell=tell)


def _join(module: str, options: Mapping[str, Any], tell: Tell | None) -> Told | None:
    """Measure on this rank. By name, since this module imports no torch."""
    rank, program = importlib.import_module("paceline.bench.rank"), importlib.import_module(module).program
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(json.loads(json.dumps(record)))
        if tell is not None:
            tell(record)

    error: PacelineError | None = None
    try:
        with rank.joined_with(dict(options), keep) as joined:
            program(joined)
    except PacelineError as raised:
        error = raised
    except KeyboardInterrupt:
        error = Interrupted("interrupted by Ctrl-C; nothing was saved")
    except RuntimeError as raised:
        error = WorkerFailed(
            f"a collective failed: {str(raised).strip().splitlines()[0]}", hint="Look at the other ranks."
        )
    if environment.ranks().rank == 0:
        return Told(records, error)
    if error is not None:
        raise error
    return None


def default_procs(host: Host, device: str | None = None) -> int:
    """One rank per device; without devices two, on one core as well: they are needed to measure between them."""
    return host.devices if host.devices and device != "cpu" else 2


def command_line() -> str:
    """This command, as it was given."""
    return " ".join(["paceline", *sys.argv[1:]])


def joins_others() -> bool:
    """Whether a launcher started this command as one of several ranks: then it measures instead of starting any."""
    return environment.is_worker()


def check_procs(procs: int, at_least: int = 2) -> int:
    """`procs`, where a collective can be made of it.

    Raises:
        UsageError: there is no second process.
    """
    if procs < at_least:
        raise UsageError(
            f"{procs} process: a collective needs {at_least}, so there is nothing to measure",
            key="--procs",
            values={"procs": procs},
            hint="Give --procs 2 or more; on one core the ranks take turns, which the figures then show.",
        )
    return procs


def kept(error: PacelineError, rows: int) -> PacelineError:
    """The error as it is told where rows were measured before it."""
    if isinstance(error, Interrupted):
        how = error.message.partition(";")[0]
        return Interrupted(
            f"{how}; {rows} rows were measured before it and are kept", values={**error.values, "rows": rows}
        )
    if rows:
        error.message += f"; {rows} rows were measured before it and are kept"
        error.values["rows"] = rows
    return error


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of records; one that was cut short is left out."""
    *lines, _rest = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


@contextmanager
def _followed(path: Path, tell: Tell | None) -> Iterator[None]:
    """Call `tell` with each line that is written to `path` inside the `with`."""
    if tell is None:
        yield
        return
    ended = threading.Event()

    def follow() -> None:
        with path.open(encoding="utf-8") as file:
            rest = ""
            while True:
                last = ended.wait(_FOLLOW_SECONDS)
                *lines, rest = (rest + file.read()).split("\n")
                for line in lines:
                    tell(json.loads(line))
                if last:
                    return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=5.0)
