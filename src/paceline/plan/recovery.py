"""What a cluster may expect of a recovery that was measured elsewhere: failures as published, the best interval. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.cluster.spec import Cluster
from paceline.plan.economics import Asked, foresee
from paceline.plan.failures import RESTART_SECONDS, Outlook
from paceline.units import format_percent, format_seconds


class Expected(msgspec.Struct, frozen=True):
    """Outlooks of one cluster: with the recovery that was measured (None: none was), and with the one that plans assume."""

    cluster: str
    measured: Outlook | None
    assumed: Outlook

    def to_record(self) -> dict[str, Any]:
        """For `drill --json`."""
        return {
            "cluster": self.cluster,
            "measured_recovery": None if self.measured is None else self.measured.to_record(),
            "assumed_recovery": self.assumed.to_record(),
        }

    def describe(self) -> str:
        """A few lines."""
        fleet = self.assumed.fleet
        lines = [
            f"on {self.cluster} ({fleet.devices} devices): a failure every {format_seconds(self.assumed.seconds_between)}, "
            f"as published of such fleets; a save every {format_seconds(self.assumed.interval_seconds)}"
        ]
        for name, one in (("as measured here", self.measured), ("as plans assume for such a cluster", self.assumed)):
            if one is not None:
                lines.append(
                    f"  recovery in {format_seconds(one.recovery_seconds)}, {name}: goodput {format_percent(one.goodput)}, "
                    f"of the rest {format_percent(one.redone)} redone, {format_percent(one.recovering)} recovering, "
                    f"{format_percent(one.saving)} saving, {format_percent(one.waiting)} waiting for a node"
                )
        if self.measured is not None:
            lines.append(
                "  what was measured has few ranks and no node to replace: it is the least that a restart takes"
            )
        return "\n".join(lines)


def expected(cluster: Cluster, checkpoint_bytes: int, recover_seconds: float | None) -> Expected:
    """What failures leave of the time of a run on `cluster`.

    Args:
        checkpoint_bytes: of one checkpoint.
        recover_seconds: from a failure until training goes on, as measured; None where it was not.
    """
    storage = cluster.measured.storage if cluster.measured is not None else None

    def seen(seconds: float) -> Outlook:
        asked = Asked(what="", restart_seconds=seconds)
        return foresee(cluster.devices, cluster.devices_per_node, checkpoint_bytes, asked, storage)

    measured = None if recover_seconds is None else seen(recover_seconds)
    return Expected(cluster.text, measured, seen(RESTART_SECONDS))
