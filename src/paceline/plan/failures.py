"""What failures leave of a run's time on N devices: closed forms of docs/math/goodput.md. No torch.

The interval is that of `checkpoint.every = "auto"` (`checkpoint/interval.py`); rates are published (`cluster/failures.py`).
`plan/simulate.py` plays the same fleet event by event and agrees.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from paceline.checkpoint.interval import SaveCost, best_interval, failure_rate, goodput
from paceline.cluster.failures import range_per_device_hour, share
from paceline.errors import UsageError
from paceline.units import format_percent, format_seconds

REPAIR_SECONDS = 24 * 3600.0
"""From a node's failure until it, or another in its place, is there again. An assumption: none published is known to us."""

RESTART_SECONDS = 600.0
"""From a failure until the job trains again on nodes that are there: detection, new processes, reading the checkpoint.

An assumption; a median of 11 minutes between an exit and the next attempt was reported of a 504-device cluster.
"""

NOT_TO_WAIT = 0.95
"""Probability that a failed node finds a spare one, for which spares are counted unless a number is given."""

MOST_SPARES = 10_000


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Devices in nodes, with what fails of them how often, in failures per second.

    device_rate: of one device. node_rate: of one node, beside its devices. job_rate: of the job, which then starts again on
    the same nodes. notice_rate: of one node that is taken away with notice enough for a last save (spot). A failed node is
    away for `repair_seconds` on average; `spares` nodes stand ready to take its place.
    """

    devices: int
    devices_per_node: int
    device_rate: float
    node_rate: float
    job_rate: float
    notice_rate: float = 0.0
    repair_seconds: float = REPAIR_SECONDS
    spares: int = 0

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)

    @property
    def losing_rate(self) -> float:
        """Failures per second of the whole that lose what was not saved."""
        return self.devices * self.device_rate + self.nodes * self.node_rate + self.job_rate

    @property
    def rate(self) -> float:
        """All failures per second."""
        return self.losing_rate + self.nodes * self.notice_rate

    @property
    def away(self) -> float:
        """Mean number of nodes away for repair, were there always a spare one: what Erlang calls the load."""
        return (self.rate - self.job_rate) * self.repair_seconds


def published_fleet(
    devices: int,
    devices_per_node: int,
    *,
    spares: int = 0,
    repair_seconds: float = REPAIR_SECONDS,
    interruptions_per_node_hour: float = 0.0,
    notice: bool = False,
    rate_factor: float = 1.0,
) -> Fleet:
    """A fleet that fails as published ones of its size did.

    Args:
        devices: of the job, without spares.
        devices_per_node: that leave together.
        interruptions_per_node_hour: of spot capacity, on top.
        notice: it is announced in time for a last save.
        rate_factor: for another site than the published ones.

    Raises:
        UsageError: there is no device, or a node has none.
    """
    if devices < 1 or devices_per_node < 1:
        raise UsageError(
            f"{devices} devices in nodes of {devices_per_node}: both are 1 or more",
            values={"devices": devices, "devices_per_node": devices_per_node},
            hint="For example --cluster 4x8xh100-sxm.",
        )
    whole = failure_rate(devices) * rate_factor
    nodes = -(-devices // devices_per_node)
    taken = interruptions_per_node_hour / 3600
    return Fleet(
        devices=devices, devices_per_node=devices_per_node, device_rate=whole * share("device") / devices,
        node_rate=whole * share("node") / nodes + (0.0 if notice else taken), job_rate=whole * share("job"),
        notice_rate=taken if notice else 0.0, repair_seconds=repair_seconds, spares=spares,
    )  # fmt: skip


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the time of a run. The five shares add up to 1.

    goodput: becomes progress. saving: saves, and steps slowed by them. redone: progress that a failure lost.
    recovering: from a failure until training goes on. waiting: for a node where no spare one is left.
    """

    fleet: Fleet
    save: SaveCost
    interval_seconds: float
    recovery_seconds: float
    goodput: float
    saving: float
    redone: float
    recovering: float
    waiting: float

    @property
    def seconds_between(self) -> float:
        """Mean seconds between failures while it runs."""
        return 1 / self.fleet.rate if self.fleet.rate else math.inf

    def wall_seconds(self, run_seconds: float) -> float:
        """Expected seconds of a run that would take `run_seconds` without a save or a failure."""
        return run_seconds / self.goodput if self.goodput > 0 else math.inf

    def undisturbed(self, run_seconds: float) -> float:
        """Probability that nothing fails in a run of that length: then it takes that long, and saving."""
        return math.exp(-self.fleet.rate * run_seconds)

    def shares(self) -> dict[str, float]:
        names = ("goodput", "saving", "redone", "recovering", "waiting")
        return {name: getattr(self, name) for name in names}

    def to_record(self) -> dict[str, Any]:
        fleet = self.fleet
        return {
            **self.shares(),
            "interval_seconds": self.interval_seconds,
            "recovery_seconds": self.recovery_seconds,
            "seconds_between_failures": self.seconds_between,
            "save_seconds": self.save.seconds,
            "spare_nodes": fleet.spares,
            "spare_found_probability": 1 - wait_probability(fleet.spares, fleet.away),
        }

    def derivation(self) -> list[str]:
        """The arithmetic, one step a line."""
        fleet = self.fleet
        low, high = range_per_device_hour()
        nodes = "1 node" if fleet.nodes == 1 else f"{fleet.nodes} nodes"
        found = format_percent(1 - wait_probability(fleet.spares, fleet.away))
        lines = [
            f"{fleet.devices} devices in {nodes}: a failure every {format_seconds(self.seconds_between)}, at "
            f"{fleet.rate * 3600 / fleet.devices:.2e} per device and hour (published sites: {low:.1e} to {high:.1e})",
            f"a save costs {format_seconds(self.save.seconds)} and is made every {format_seconds(self.interval_seconds)}: "
            f"{format_percent(self.saving)} of the time",
            f"a failure loses the work since the last save ({format_percent(self.redone)}) and "
            f"{format_seconds(self.recovery_seconds)} until training goes on ({format_percent(self.recovering)})",
            f"{fleet.away:.1f} nodes are away for repair on average ({format_seconds(fleet.repair_seconds)} each); with "
            f"{fleet.spares} spare a failed node finds one in {found}"
            f" of cases, and waiting takes {format_percent(self.waiting)}",
            f"what is left becomes progress: goodput {format_percent(self.goodput)}",
        ]
        if fleet.notice_rate:
            each = format_seconds(1 / fleet.notice_rate)
            lines.insert(1, f"a node is taken away every {each} with notice enough for a last save")
        return lines


def outlook(
    fleet: Fleet, save: SaveCost, recovery_seconds: float = RESTART_SECONDS, interval_seconds: float | None = None
) -> Outlook:
    """Shares of the time of a run on `fleet` that saves every `interval_seconds` of training (the best interval)."""
    if interval_seconds is None:
        interval_seconds = interval(fleet, save, recovery_seconds)
    waiting = waiting_share(fleet.spares, fleet.away)
    r, t, c = fleet.rate, interval_seconds, save.seconds
    there = 1 - waiting
    if r == 0:
        made = kept = t / (t + c)
        trained = 1.0
    else:
        trained = math.exp(-r * recovery_seconds)
        made = trained * math.expm1(-r * t) / math.expm1(-r * (t + c))
        lost = goodput(t, save, r, recovery_seconds)
        kept = (fleet.losing_rate * lost + (r - fleet.losing_rate) * made) / r
    return Outlook(
        fleet=fleet, save=save, interval_seconds=t, recovery_seconds=recovery_seconds, waiting=waiting,
        goodput=there * kept, redone=there * (made - kept), saving=there * (trained - made),
        recovering=there * (1 - trained),
    )  # fmt: skip


def restart_for(fleet: Fleet, save: SaveCost, wanted: float) -> float | None:
    """Seconds from a failure until training goes on with which goodput is `wanted`; None where no restart is fast enough.

    Goodput falls as exp(-r R), whatever else there is.
    """
    best = outlook(fleet, save, 0.0).goodput
    return math.log(best / wanted) / fleet.rate if best >= wanted > 0 and fleet.rate > 0 else None


def interval(fleet: Fleet, save: SaveCost, recovery_seconds: float = RESTART_SECONDS) -> float:
    """Seconds of training between saves that lose least, within the bounds of `checkpoint.every = "auto"`.

    Only failures without notice pull on it: what is announced loses nothing, whatever the interval.
    """
    rate = fleet.losing_rate or 1e-12
    return best_interval(
        save, fleet.devices, failures_per_second=rate, recovery_seconds=recovery_seconds
    ).seconds  # fmt: skip


def wait_probability(spares: int, away: float) -> float:
    """Probability that a failed node finds no spare one: Erlang's loss formula with `spares` lines and the load `away`."""
    blocked = 1.0
    for lines in range(1, spares + 1):
        blocked = away * blocked / (lines + away * blocked)
    return blocked if away > 0 else 0.0


def waiting_share(spares: int, away: float) -> float:
    """Share of the time in which the job stands still for want of a node: Erlang's formula with one line more."""
    return wait_probability(spares + 1, away)


def spares_for(away: float, not_to_wait: float = NOT_TO_WAIT) -> int:
    """Fewest spare nodes with which a failed node finds one with at least that probability.

    Raises:
        UsageError: the probability is not below 1, or no number of nodes that anyone has is enough.
    """
    if not 0 <= not_to_wait < 1:
        raise UsageError(
            f"a failed node finds a spare one with probability {not_to_wait}: it must be at least 0 and below 1",
            values={"probability": not_to_wait},
        )
    blocked, spares = (1.0 if away > 0 else 0.0), 0
    while blocked > 1 - not_to_wait:
        spares += 1
        blocked = away * blocked / (spares + away * blocked)
        if spares > MOST_SPARES:
            raise UsageError(
                f"{away:.0f} nodes are away for repair at any time; over {MOST_SPARES} spare ones would be needed",
                values={"away": away},
                hint="Shorten the repair time.",
            )
    return spares


def cheapest_spares(fleet: Fleet) -> int:
    """The number of spare nodes with the least (nodes + spares) paid per share of the time that is not waiting."""
    best, paid = 0, math.inf
    for spares in range(MOST_SPARES):
        price = (fleet.nodes + spares) / max(1e-12, 1 - waiting_share(spares, fleet.away))
        if price < paid:
            best, paid = spares, price
        elif fleet.nodes + spares > paid:
            break
    return best
