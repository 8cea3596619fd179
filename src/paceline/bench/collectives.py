"""`paceline bench collectives`: starts or joins the ranks, keeps what they tell, fits it and says what it means. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.bench import remarks
from paceline.bench.fit import fits_of
from paceline.bench.ranks import Told, check_procs, collect, command_line, default_procs, joins_others, kept
from paceline.bench.remarks import Remark
from paceline.bench.rows import Row, newest, row_of
from paceline.bench.sweep import MAX_BYTES, Options, check_memory, sizes
from paceline.bench.transport import Transport, about_transport
from paceline.cluster import measured as cluster_file
from paceline.cluster.catalogue import node_link
from paceline.cluster.measured import Collectives, Fit
from paceline.cluster.ports import RdmaPort
from paceline.cluster.probe import Host, available_memory_bytes, probe_host
from paceline.errors import PacelineError, UsageError
from paceline.units import format_bytes

MODULE = "paceline.bench.collectives_rank"
STORED = ("rows", "date")
"""What a result must have to be compared with."""


class Measured(NamedTuple):
    """A sweep: what it ran on, its rows, fits and remarks. `error`: what ended it early."""

    options: Options
    about: dict[str, Any]
    rows: list[Row]
    pairs: list[dict[str, Any]]
    fits: list[Fit]
    remarks: list[Remark]
    expected_rows: int
    error: PacelineError | None
    date: str
    command: str

    @property
    def exit_code(self) -> int:
        """0; what ended it early; 1 where a result was wrong."""
        if self.error is not None:
            return self.error.exit_code
        return 1 if any(remark.id == "wrong" for remark in self.remarks) else 0

    def document(self) -> dict[str, Any]:
        """The document of `bench collectives --json`, less its schema."""
        return {
            "date": self.date, "command": self.command, "complete": self.error is None, **self.about,
            "options": self.options._asdict(), "rows": msgspec.to_builtins(self.rows), "fits": msgspec.to_builtins(self.fits),
            "pairs": self.pairs, "remarks": msgspec.to_builtins(self.remarks), "exit": self.exit_code,
        }  # fmt: skip


def measure(
    options: Options,
    *,
    procs: int | None,
    device: str | None = None,
    baseline: dict[str, Any] | None = None,
    say: Callable[[str], None],
) -> Measured | None:
    """Measure on `procs` ranks of this host, or as one rank of those that a launcher started.

    Args:
        options: what is measured; `max_bytes` 0 stands for this kind of device's own.
        device: "cpu" to leave devices alone.
        baseline: a stored result to compare with.
        say: told each row as it comes.

    Returns:
        None on ranks other than 0.

    Raises:
        UsageError: there is no second process, or no room for the sizes.
    """
    host = probe_host()
    kind = device or host.device_kind
    if not options.max_bytes:
        options = options._replace(max_bytes=max(MAX_BYTES[kind], options.min_bytes))
    sizes(options.min_bytes, options.max_bytes, options.factor)
    given = {**options._asdict(), "device": device}
    listener = _Listener(say)
    if not joins_others():
        procs = check_procs(procs if procs is not None else default_procs(host, device))
        if kind == "cpu":
            check_memory(options, procs, procs, "gloo", available_memory_bytes())
        elif procs <= host.devices:
            check_memory(options, procs, 1, "nccl", host.device_memory_bytes)
    load = os.getloadavg()[0]
    told = collect(MODULE, given, procs or 0, tell=listener)
    return None if told is None else _measured(options, told, host, baseline, remarks.busy(load, host.cores))


def _measured(
    options: Options, told: Told, host: Host, baseline: dict[str, Any] | None, before: list[Remark]
) -> Measured:
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for record in told.records:
        by_kind.setdefault(record.pop("kind"), []).append(record)
    about = by_kind.get("about", [{}])[0]
    rows = newest([row_of(record) for record in by_kind.get("row", ())])
    found = [
        *before,
        *remarks.about_backend(about, rows),
        *remarks.wrong_results(rows),
        *(remarks.against_link(rows, node_link(host.device_name), host.device_name) if about.get("nccl") else ()),
        *about_transport(_transport(by_kind), msgspec.convert(about.get("ports", []), list[RdmaPort]), rows),
        *(remarks.against_baseline(rows, baseline) if baseline is not None else ()),
    ]
    pairs = by_kind.get("pair", [])
    return Measured(
        options=options, about=about, rows=rows, pairs=pairs, fits=fits_of(rows), remarks=found,
        expected_rows=by_kind.get("total", [{"rows": 0}])[0]["rows"],
        error=kept(told.error, len(rows)) if told.error is not None else None,
        date=datetime.now(UTC).isoformat(timespec="seconds"), command=command_line(),
    )  # fmt: skip


def _transport(by_kind: dict[str, list[dict[str, Any]]]) -> Transport | None:
    told = by_kind.get("transport")
    return msgspec.convert(told[0], Transport) if told else None


class _Listener:
    """Says each row once, when it comes for the first time."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seen: set[tuple[str, str, int]] = set()
        self._total = 0

    def __call__(self, record: dict[str, Any]) -> None:
        if record["kind"] == "total":
            self._total = record["rows"]
        if record["kind"] != "row":
            return
        key = record["tier"], record["collective"], record["size_bytes"]
        if key in self._seen:
            return
        self._seen.add(key)
        self._say(
            f"[{len(self._seen)}/{self._total}] {key[1]} {format_bytes(key[2])} ({key[0]}): {record['time_us']:.1f} us, "
            f"busbw {record['bus_bandwidth']:.3f} GB/s"
        )


def save(path: Path, measured: Measured) -> None:
    """Write the fits into a measured cluster's file.

    Raises:
        PacelineError: nothing was fitted, or the file is unusable.
    """
    if not measured.fits:
        raise PacelineError("too few sizes were measured for a fit, so nothing was saved", key="--save")
    host, about = probe_host(), measured.about
    part = Collectives(
        date=measured.date, command=measured.command, backend=about["backend"], dtype=measured.options.dtype,
        fits=tuple(measured.fits), torch=about.get("torch"), nccl=about.get("nccl"),
    )  # fmt: skip
    nodes, ranks = about["nodes"], len(about["ranks"])
    cluster_file.save_measured(path, host, nodes, math.ceil(ranks / nodes), collectives=part)


def load_baseline(path: Path) -> dict[str, Any]:
    """A result that `--store` kept, or that `--json` printed.

    Raises:
        UsageError: the file is not there, or is no result.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}", key="--baseline", values={"path": str(path)}
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{path} is no result of bench collectives, or was cut short: {error}",
            key="--baseline",
            values={"path": str(path)},
        ) from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != "paceline.bench/1" or any(key not in document for key in STORED):
        raise UsageError(
            f"{path} has the schema {schema!r} and is no result of this version's bench collectives",
            key="--baseline",
            values={"path": str(path), "schema": schema},
            hint="Make one with paceline bench collectives --store FILE.",
        )
    try:
        for record in document["rows"]:
            row_of(record)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} has a row that is none: {error}", key="--baseline") from None
    found: dict[str, Any] = document
    return found
