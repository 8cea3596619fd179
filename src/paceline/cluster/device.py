"""Devices and networks of the catalogue: what a data sheet promises and what was reached of it. Imports no torch.

One TOML file a device in `catalog/`, one a network in `catalog/fabrics/`, each with its sources.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from paceline.cluster.measured import Curve

ProductType = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "fp4"]
"""Element type of the numbers that are multiplied; sums are wider."""


class Link(msgspec.Struct, frozen=True):
    """A way between devices: bytes/s of one device in one direction.

    `reached` is the share of it that a ring collective of large messages moves (bus bandwidth), `latency_seconds` that of
    one hop. `reduces` names collectives that the switches themselves speed up, with the bus bandwidth reached.
    """

    name: str
    bytes_per_second: float
    reached: float
    latency_seconds: float
    source: str
    reduces: dict[str, float] = {}

    @property
    def reached_bytes_per_second(self) -> float:
        """Bus bandwidth of a ring collective of large messages."""
        return self.bytes_per_second * self.reached


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device as it is planned for.

    peak: dense FLOP/s by element type, as the data sheet says. curves: what products reach of it over their size in FLOP.
    memory_bytes_per_second: as the data sheet says; `memory_reached` the share that a copy moves.
    launch_seconds: from one kernel to the next where each has next to nothing to do.
    link: to the other devices of a node; None where there is one device. units: multiprocessors that share the tiles of a
        product; 0 where products are not cut into tiles.
    """

    key: str
    name: str
    kind: Literal["cuda", "rocm", "cpu"]
    memory_bytes: int
    peak: dict[ProductType, float]
    memory_bytes_per_second: float
    sources: tuple[str, ...]
    memory_reached: float = 0.85
    launch_seconds: float = 5e-6
    curves: tuple[Curve, ...] = ()
    link: Link | None = None
    units: int = 0
    watts: float | None = None
    year: int | None = None
