"""The `[launch]` and `[recovery]` sections: how many workers a host starts, on what, and when they count as stalled."""

from typing import Annotated, Literal

from msgspec import Meta

from paceline.config import AUTO, Section
from paceline.units import Procs, Seconds

DEFAULT_STALL_SECONDS = 600.0
COLLECTIVE_SHARE = 1.5
"""A collective gives up after the watchdog does, which sees all ranks; under another launcher nothing else ends a stall."""


class LaunchSection(Section, frozen=True):
    """Worker processes of this host, and the hosts that take part."""

    nodes: Annotated[
        Procs | None,
        Meta(
            extra=AUTO,
            description='Hosts that take part, or a range such as "1:4" in which they come and go; the same command is given '
            "on each of them, see nodes.md. auto: this one alone.",
        ),
    ] = None
    rendezvous: Annotated[
        str | None,
        Meta(
            extra=AUTO,
            description="HOST:PORT where the hosts meet, the same on all of them; the one that HOST names serves it. auto: "
            "none is needed, there is one host.",
        ),
    ] = None

    procs_per_node: Annotated[
        Procs | None,
        Meta(
            extra=AUTO,
            description='Worker processes on this host, or a range such as "2:4": it starts with the most and goes on with '
            "fewer or more, see elastic.md. auto: one per device, 2 without devices.",
        ),
    ] = None
    port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)] | None,
        Meta(extra=AUTO, description="TCP port where the workers meet; auto: a free one that the system gives."),
    ] = None
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(extra=AUTO, description="CPU threads per worker; auto: its share of the CPUs that this process may use."),
    ] = None
    affinity: Annotated[
        Literal["auto", "none"],
        Meta(description="auto: each worker has CPUs of its own where there are enough; none: all share all."),
    ] = "auto"


class RecoverySection(Section, frozen=True):
    """What a run survives by itself: when workers count as stalled, how often they start again, what follows a signal."""

    max_restarts: Annotated[
        int,
        Meta(
            ge=0,
            description="Restarts after failures without a new step in between; a new step renews them. 0: the first failure "
            "ends the run. Three attempts in a row without a new step end it in any case.",
        ),
    ] = 3
    backoff: Annotated[
        Seconds,
        Meta(
            description="Wait before the second restart without progress, doubled before each further one up to 60s; the "
            "first follows at once."
        ),
    ] = Seconds(1.0)
    grace: Annotated[
        Seconds,
        Meta(description="Longest time from a stop signal until the run has saved and ended."),
    ] = Seconds(30.0)
    on_stall: Annotated[
        Literal["restart", "stop", "log"],
        Meta(
            description="What follows a stall. restart: start again without the stalled workers; stop: end with 76; log: "
            "name the rank and go on waiting."
        ),
    ] = "restart"
    on_straggler: Annotated[
        Literal["report", "restart-without"],
        Meta(description="What follows a slow rank. report: name it; restart-without: start again without it."),
    ] = "report"

    stall_timeout: Annotated[
        Seconds | None,
        Meta(
            extra=AUTO,
            description="Longest time without progress; collectives give up at 1.5 of it. auto: learned from the run, "
            "section by section, and 10m where nothing else is known.",
        ),
    ] = None
    start_timeout: Annotated[
        Seconds,
        Meta(description="Longest time from the start of the workers until all of them have met."),
    ] = Seconds(300.0)

    def __post_init__(self) -> None:
        for name in ("stall_timeout", "start_timeout"):
            seconds = getattr(self, name)
            if seconds is not None and seconds <= 0:
                raise ValueError(f"{name} = {seconds:g}s is over before anything began; give more than 0s")
        if self.backoff < 0:
            raise ValueError(f"backoff = {self.backoff:g}s is in the past; give 0s to start again at once")
        if self.grace <= 0:
            raise ValueError(
                f"grace = {self.grace:g}s leaves no time to save; give more than 0s (a second Ctrl-C ends a run at once)"
            )

    @property
    def stall_seconds(self) -> float:
        """The watchdog's limit, in seconds."""
        return DEFAULT_STALL_SECONDS if self.stall_timeout is None else float(self.stall_timeout)

    @property
    def collective_seconds(self) -> float:
        """The timeout of a process group, in seconds."""
        return COLLECTIVE_SHARE * self.stall_seconds
