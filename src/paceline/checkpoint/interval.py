"""The interval between two saves that loses least, from what a save costs and how often runs fail. No torch.

Derived in docs/math/checkpoint-interval.md after Young (1974) and Daly (2006), for saves that are written while training
goes on: with failures at the rate r, a cost C of a save, a time L from its request until it is durable and a recovery of
R seconds, the share of the time that becomes progress is

    goodput(T) = r T exp(-r (R + L - C)) / (exp(r (T + C)) - 1)

which is largest where r T = 1 - exp(-r (T + C)): about sqrt(2 C / r). L and R lower it and do not move it.
"""

from __future__ import annotations

import math

import msgspec

from paceline.cluster.failures import per_device_hour
from paceline.units import format_percent, format_seconds

LONGEST_SECONDS = 1800.0
"""Longest interval that `every = "auto"` takes: runs end by more than the failures counted here, people stop them too."""

FIRST_SECONDS = 60.0
"""Time of the first save under `every = "auto"`: it shows early that saving works, and measures what it costs."""

RECOVERY_SECONDS = 60.0
"""From a failure until training goes on, where no restart of this run has been measured."""


class SaveCost(msgspec.Struct, frozen=True):
    """What a save costs, measured.

    stall_seconds: time in which training stood still.
    slowdown: share of the rate that was lost while it was written, 0 to 1.
    write_seconds: from its request until it was durable.
    """

    stall_seconds: float
    slowdown: float
    write_seconds: float

    @property
    def seconds(self) -> float:
        """Training time lost per save."""
        stall = max(0.0, self.stall_seconds)
        return stall + min(1.0, max(0.0, self.slowdown)) * max(0.0, self.write_seconds - stall)


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """An interval with all that it follows from."""

    seconds: float
    best_seconds: float
    cost: SaveCost
    failures_per_second: float
    recovery_seconds: float
    ranks: int

    @property
    def goodput(self) -> float:
        """Predicted share of the time that becomes progress."""
        return goodput(self.seconds, self.cost, self.failures_per_second, self.recovery_seconds)

    def regret(self, seconds: float) -> float:
        """Share of the time that another interval would lose beside this one."""
        return self.goodput - goodput(seconds, self.cost, self.failures_per_second, self.recovery_seconds)

    def explain(self) -> str:
        """One sentence with all inputs."""
        cost = self.cost
        bound = ""
        if self.seconds > self.best_seconds:
            bound = f"; loses least at {format_seconds(self.best_seconds)}, but one save is in flight until then"
        elif self.seconds < self.best_seconds:
            bound = f"; loses least at {format_seconds(self.best_seconds)}, but people stop runs too"
        return (
            f"a checkpoint every {format_seconds(self.seconds)}: a save costs {format_seconds(cost.seconds)} "
            f"({format_seconds(cost.stall_seconds)} standing still, {format_percent(cost.slowdown)} slower while it is "
            f"written) and is durable after {format_seconds(cost.write_seconds)}, a failure is expected every "
            f"{format_seconds(1 / self.failures_per_second)} on {self.ranks} ranks and takes "
            f"{format_seconds(self.recovery_seconds)} to recover from{bound}; goodput {format_percent(self.goodput)}"
        )


def best_interval(
    cost: SaveCost, ranks: int, *, failures_per_second: float | None = None, recovery_seconds: float = RECOVERY_SECONDS
) -> Interval:
    """The interval with the highest goodput, not shorter than a save is in flight and at most `LONGEST_SECONDS`.

    Args:
        cost: of one save.
        ranks: of the run.
        failures_per_second: of the run as a whole; that of published runs unless given.
        recovery_seconds: from a failure until training goes on.
    """
    rate = failures_per_second if failures_per_second is not None else failure_rate(ranks)
    best = best_interval_seconds(cost.seconds, rate)
    seconds = max(min(best, LONGEST_SECONDS), cost.write_seconds)
    return Interval(
        seconds=seconds, best_seconds=best, cost=cost, failures_per_second=rate, recovery_seconds=recovery_seconds,
        ranks=ranks,
    )  # fmt: skip


def best_interval_seconds(cost_seconds: float, failures_per_second: float) -> float:
    """T of r T = 1 - exp(-r (T + C)), by Newton's method from above: from Young's sqrt(2 C / r), or 1 / r."""
    c = cost_seconds * failures_per_second
    x = min(1.0, math.sqrt(2 * c))
    for _ in range(60):
        gone = -math.expm1(-(x + c))
        if gone == 0.0 or abs(step := (x - gone) / gone) <= 1e-12 * x:
            break
        x -= step
    return x / failures_per_second


def goodput(seconds: float, cost: SaveCost, failures_per_second: float, recovery_seconds: float) -> float:
    """Share of the time that becomes progress with a save every `seconds` of training."""
    r, c = failures_per_second, cost.seconds
    late = recovery_seconds + max(0.0, cost.write_seconds - c)
    exponent = r * (seconds + c)
    return 0.0 if exponent > 700 else r * seconds * math.exp(-r * late) / math.expm1(exponent)


def failure_rate(ranks: int, *, failures: int = 0, run_seconds: float = 0.0) -> float:
    """Expected failures per second of a run on `ranks` devices.

    Published rates per device, on a line in logarithms between the two sizes that were observed and level outside. Where
    this run has failed more often than that, its own: (failures - 1) / time is free of bias.

    Args:
        ranks: devices of the run.
        failures: that this run has had.
        run_seconds: that it has run.
    """
    published = ranks * per_device_hour(ranks) / 3600.0
    own = (failures - 1) / run_seconds if failures > 1 and run_seconds > 0 else 0.0
    return max(published, own)
