"""A measured cluster: what `paceline bench --save` found out, as a TOML file that `paceline plan --cluster FILE` reads.

Imports no torch. Each part carries the date and the command that produced it; a later measurement replaces its own part only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from paceline.cluster.probe import Host
from paceline.errors import JobError, UsageError
from paceline.run.files import write_atomic
from paceline.units import KiB

SCHEMA = "paceline.cluster/1"
LARGE_BYTES = 64 * KiB
"""From here on a fit's error is promised; below it is latency, noise and protocol."""

TierName = Literal["in_node", "across_nodes"]
"""Ranks of one node, which reach each other without a network; all ranks of several nodes."""

IN_NODE: Final = "in_node"
ACROSS_NODES: Final = "across_nodes"


class Piece(msgspec.Struct, frozen=True):
    """Sizes from `from_bytes` on take `latency_seconds` + size / `bytes_per_second`."""

    from_bytes: int
    latency_seconds: float
    bytes_per_second: float

    def seconds(self, size_bytes: float) -> float:
        return self.latency_seconds + size_bytes / self.bytes_per_second


class Fit(msgspec.Struct, frozen=True):
    """The time of a collective of any size on a tier; sizes as nccl-tests count them.

    `latency_seconds` is that of the smallest sizes, `bytes_per_second` (of algorithm bandwidth) that of the largest.
    `relative_error` is how far a repeat, or a size between the measured ones, may be off from 64 KiB on;
    `small_relative_error` the same below. None: no such size was measured.
    """

    collective: str
    tier: TierName
    ranks: int
    nodes: int
    latency_seconds: float
    bytes_per_second: float
    min_bytes: int
    max_bytes: int
    pieces: tuple[Piece, ...]
    relative_error: float | None = None
    small_relative_error: float | None = None

    def seconds(self, size_bytes: float) -> float:
        """Predicted seconds of one call of `size_bytes`."""
        piece = next((p for p in reversed(self.pieces) if size_bytes >= p.from_bytes), self.pieces[0])
        return piece.seconds(size_bytes)

    def error_at(self, size_bytes: float) -> float:
        """The stated error of that prediction."""
        large = size_bytes >= LARGE_BYTES
        stated = self.relative_error if large else self.small_relative_error
        other = self.small_relative_error if large else self.relative_error
        return stated if stated is not None else other or 0.0


class Collectives(msgspec.Struct, frozen=True):
    """The fits of one measurement. `backend` carried the tensors of `dtype`."""

    date: str
    command: str
    backend: str
    dtype: str
    fits: tuple[Fit, ...]
    torch: str | None = None
    nccl: str | None = None


class Curve(msgspec.Struct, frozen=True):
    """The rate of an operation over its size: `sizes[i]` gives `rates[i]`, in FLOP/s, with a relative spread."""

    operation: str
    dtype: str
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    spreads: tuple[float, ...]


class Compute(msgspec.Struct, frozen=True):
    """Rates of one device while all devices of its host work: FLOP/s, bytes/s read and written, seconds per launch."""

    date: str
    command: str
    curves: tuple[Curve, ...]
    memory_bytes_per_second: float
    launch_seconds: float


class StorageRates(msgspec.Struct, frozen=True):
    """The checkpoint directory under all ranks at once: bytes/s of all of them, seconds per operation."""

    date: str
    command: str
    place: str
    ranks: int
    write_bytes_per_second: float
    read_bytes_per_second: float
    sync_seconds: float
    rename_seconds: float
    small_files_per_second: float


class MeasuredCluster(msgspec.Struct, frozen=True):
    """`nodes` nodes of `devices_per_node` devices, one of them `host`, with what was measured on it."""

    nodes: int
    devices_per_node: int
    host: Host
    collectives: Collectives | None = None
    compute: Compute | None = None
    storage: StorageRates | None = None

    def fit(self, collective: str, tier: str) -> Fit | None:
        """The fit of a collective on a tier, or None where it was not measured."""
        fits = self.collectives.fits if self.collectives else ()
        return next((fit for fit in fits if (fit.collective, fit.tier) == (collective, tier)), None)

    def dates(self) -> list[str]:
        """What was measured when, in words."""
        parts = {"collectives": self.collectives, "compute": self.compute, "storage": self.storage}
        return [f"{name} measured {part.date} by `{part.command}`" for name, part in parts.items() if part is not None]


def load_measured(path: Path) -> MeasuredCluster:
    """The measured cluster in a file.

    Raises:
        UsageError: the file is not there, is no such file, was cut short, or was written by a newer version.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", key="--cluster", values={"path": str(path)}) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _wrong(path, f"is not TOML, or was cut short: {error}") from None
    schema = table.pop("schema", None)
    if schema != SCHEMA:
        raise _wrong(path, f"has the schema {schema!r}, and this version reads {SCHEMA!r}")
    try:
        return msgspec.convert(table, MeasuredCluster)
    except msgspec.ValidationError as error:
        raise _wrong(path, f"is no measured cluster: {error}") from None


def save_measured(path: Path, host: Host, nodes: int, devices_per_node: int, **parts: Any) -> MeasuredCluster:
    """Write `parts` (`collectives`, `compute`, `storage`) into a file, which keeps its other parts.

    A file of another host or of another number of devices is written anew: its parts belong to something else.

    Raises:
        UsageError: what stands there is no measured cluster.
        JobError: it cannot be written.
    """
    kept = MeasuredCluster(nodes, devices_per_node, host)
    if path.exists():
        before = load_measured(path)
        same = (before.host.name, before.host.device_name) == (host.name, host.device_name)
        if same and "collectives" not in parts:
            kept = msgspec.structs.replace(before, host=host)
        elif same:
            kept = msgspec.structs.replace(before, host=host, nodes=nodes, devices_per_node=devices_per_node)
    cluster = msgspec.structs.replace(kept, **parts)
    _write(path, cluster)
    return cluster


def _write(path: Path, cluster: MeasuredCluster) -> None:
    import tomlkit  # only those that write pay for it

    table = {"schema": SCHEMA, **_without_none(msgspec.to_builtins(cluster))}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, tomlkit.dumps(table))
    except OSError as error:
        raise JobError(
            f"cannot write {path}: {error.strerror}",
            key="--save",
            values={"path": str(path)},
            hint="Name another file.",
        ) from None


def _without_none(value: Any) -> Any:
    """TOML has no null: what is None is left out."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return (
        [_without_none(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
    )


def _wrong(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{path} {reason}",
        key="--cluster",
        values={"path": str(path)},
        hint="Measure again with paceline bench collectives --save FILE.",
    )
