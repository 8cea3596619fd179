"""How often runs failed, as published (`failures.toml`), and what that says of a run of another size. No torch."""

from __future__ import annotations

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

TABLE = Path(__file__).with_name("failures.toml")

Part = Literal["device", "node", "job"]
"""What fails: a device or a node, whose node leaves for repair, or the job alone, which starts again where it was."""


class Observed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published observation: `failures` unexpected failures of jobs on `devices` devices in `hours`.

    sized: it is one of those between which the rate of another size is taken.
    """

    key: str
    run: str
    devices: int
    failures: float
    hours: float
    source: str
    sized: bool = False

    @property
    def per_device_hour(self) -> float:
        return self.failures / (self.devices * self.hours)

    @property
    def hours_between(self) -> float:
        """Mean hours between failures of the whole job."""
        return self.hours / self.failures


class Cause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many of the failures were of a kind, and what fails in it."""

    name: str
    count: int
    of: Part


class Achieved(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of the time that a published run made progress in, and the parameters of its model."""

    run: str
    devices: int
    parameters: float
    effective: float
    source: str


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    observed: tuple[Observed, ...]
    achieved: tuple[Achieved, ...]
    cause: tuple[Cause, ...]


@cache
def table() -> Table:
    """All that is known, once a process."""
    return msgspec.convert(tomllib.loads(TABLE.read_text(encoding="utf-8")), Table)


def per_device_hour(devices: int) -> float:
    """Unexpected failures per device and hour of a job on `devices` devices.

    On a straight line in logarithms between the two sizes that were observed in jobs, and level outside.
    """
    small, large = sorted((o for o in table().observed if o.sized), key=lambda o: o.devices)
    at = min(max(devices, small.devices), large.devices)
    share = math.log(at / small.devices) / math.log(large.devices / small.devices)
    return small.per_device_hour * math.exp(share * math.log(large.per_device_hour / small.per_device_hour))


def range_per_device_hour() -> tuple[float, float]:
    """The lowest and the highest rate that was published: how far apart sites are."""
    rates = [o.per_device_hour for o in table().observed]
    return min(rates), max(rates)


@cache
def share(part: Part) -> float:
    """Share of the failures that are of a device, of a node, or of the job alone."""
    causes = table().cause
    return sum(c.count for c in causes if c.of == part) / sum(c.count for c in causes)
