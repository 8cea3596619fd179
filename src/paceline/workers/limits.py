"""How long a rank may be silent before it counts as stalled: learned from what its run has shown, section by section.

A step, and a wait for data, may take 4.4 times the 99th percentile of those seen and at least 2.1 s: with the supervisor's
own looks that is under five times, and under 3 s. The first steps of a process count apart (`heartbeat.FIRST_STEPS`). Other
sections may take five times the longest one seen. Where the cause of a silence is not sure the limit is logged first, and
acted on later: a missed stall costs a bounded time, a false one a restart of a sound run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from paceline.workers.durations import NONE, SECTIONS, Durations, Section

Doubt = Literal["none", "asleep", "busy", "storage", "works"]
"""How sure a verdict is: certain; the rank behind does nothing; it is busy at one place; it waits for a disk or a network; it
works and gets on, as a compiler does."""

STEP_FLOOR_SECONDS = 2.1
STEP_FACTOR = 4.4
ASLEEP_FACTOR = 12.0
"""Of the 99th percentile: a step of ten times the usual length that only sleeps is no stall."""
FLOOR_SECONDS = 60.0
FACTOR = 5.0
CERTAIN_SECONDS = 10.0
"""Limit of what is certain before there are enough steps to learn from."""
MIN_SEEN = 8
"""Steps of all ranks together that a percentile needs."""

STARTING_SECONDS: Mapping[Section, float] = {
    "start": 600.0,
    "compile": 300.0,
    "step": 60.0,
    "evaluation": 300.0,
    "save": 600.0,
    "restore": 600.0,
    "data": 60.0,
}
"""Before anything is seen."""

PATIENCE: Mapping[Doubt, float] = {"none": 1.0, "asleep": 1.0, "busy": 4.0, "storage": 10.0, "works": 10.0}
"""How many times a section's limit is waited for before a doubtful verdict is acted on."""
FORGIVENESS = 4.0


class Limits:
    """Of one command, over all its attempts.

    Args:
        fixed_seconds: the user's own limit for every section, which nothing changes; None to learn.
    """

    def __init__(self, fixed_seconds: float | None = None) -> None:
        self.fixed_seconds = fixed_seconds
        self._past: dict[Section, Durations] = {}
        self._now: dict[int, Mapping[Section, Durations]] = {}
        self._patience = 1.0

    def observe(self, rank: int, durations: Mapping[Section, Durations]) -> None:
        """What a rank of this attempt has counted so far."""
        self._now[rank] = durations

    def next_attempt(self) -> None:
        """The workers start anew: they count from nothing."""
        self._past = {section: self.seen(section) for section in SECTIONS}
        self._now = {}

    def doubt_was_costly(self) -> None:
        """A run was ended on a verdict that was not sure: from now on such verdicts wait longer."""
        self._patience *= FORGIVENESS

    def seen(self, section: Section) -> Durations:
        """Of all ranks and attempts."""
        total = self._past.get(section, NONE)
        for durations in self._now.values():
            if (one := durations.get(section)) is not None:
                total = total.plus(one)
        return total

    def of(self, section: Section) -> float:
        """Seconds of silence after which a rank in this section is looked at and named."""
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        if section in ("step", "data"):
            return self._of_steps(section, STEP_FACTOR)
        longest = self.seen(section).longest
        return max(FLOOR_SECONDS, FACTOR * longest) if longest else STARTING_SECONDS[section]

    @property
    def certain_seconds(self) -> float:
        """Seconds after which what is certain, such as a stopped process, is acted on in any section."""
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        return self.of("step") if self._learned else CERTAIN_SECONDS

    def act_seconds(self, section: Section, doubt: Doubt) -> float:
        """Seconds of silence after which a verdict is acted on."""
        if self.fixed_seconds is not None:
            return self.fixed_seconds
        if doubt == "none":
            return min(self.of(section), self.certain_seconds)
        if doubt == "asleep":
            # Nothing that works is silent and idle for minutes; work that waits for storage is another doubt.
            limit = self._of_steps(section, ASLEEP_FACTOR) if section in ("step", "data") else self.of(section)
            return self._patience * min(limit, FLOOR_SECONDS) if section == "compile" else self._patience * limit
        limit = PATIENCE[doubt] * self.of(section)
        return self._patience * (max(limit, STARTING_SECONDS["compile"]) if doubt == "works" else limit)

    def look_seconds(self, section: Section) -> float:
        """Seconds of silence after which a first look is taken, so that a second one has something to compare with."""
        return 0.5 * min(self.of(section), self.certain_seconds)

    @property
    def _learned(self) -> bool:
        return self.seen("step").number >= MIN_SEEN

    def _of_steps(self, section: Section, factor: float) -> float:
        if not self._learned:
            return STARTING_SECONDS[section]
        usual = self.seen("step").quantile(0.99)
        if section == "data":
            usual = max(usual, self.seen("data").quantile(0.99))
        return max(STEP_FLOOR_SECONDS, factor * usual)
