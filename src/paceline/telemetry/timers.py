"""Where a step's time goes: marks on one clock, so that the parts add up to the step by construction.

On a device that runs behind the host (CUDA) a mark means something only after a synchronisation, which costs speed.
`StepTimers` is therefore given the synchronising call and takes it in every n-th step alone; the steps between have a
true total and no parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from paceline.run.records import Summary

OTHER = "other"
TELEMETRY = "telemetry"


class StepTimers:
    """Times the parts of each step on one rank.

        timers.begin(step)
        ...                        # time up to a mark belongs to the mark's part
        timers.mark("data_wait")
        with timers.part("forward"):
            ...                    # or a block; blocks nest, the inner one's time is its own
        seconds, parts = timers.end()

    Time that no mark and no block claims is `other`.

    Args:
        synchronize: waits for the device; None where the host's clock is enough.
        synchronize_every: steps from one synchronised step to the next, counted from step 1.
        waited: seconds for which this thread has waited for other ranks since some moment; None where it never does.
        clock: seconds, monotonic.
        thread_clock: seconds of this thread's own work.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        synchronize_every: int = 1,
        waited: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        thread_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._synchronize = synchronize
        self._every = max(1, synchronize_every)
        self._waited = waited or _never
        self._clock = clock
        self._thread_clock = thread_clock
        self._blocks: dict[str, _Block] = {}
        self._parts: dict[str, float] = {}
        self._waits: dict[str, float] = {}
        self._current = OTHER
        self._measured = True
        self._wait: Callable[[], None] | None = None
        self._step = 0
        self._start = self._last = clock()
        self._last_waited = 0.0
        self._window: dict[str, _Running] = {}
        self._own_window: dict[str, _Running] = {}
        self.overhead_seconds: dict[str, float] = {}
        """Thread time spent in telemetry since the start, by name (`StepTimers.overhead`)."""

    def begin(self, step: int) -> None:
        """Start timing `step`. What passed since the last `end` belongs to no step."""
        self._step = step
        self._parts, self._waits = {}, {}
        self._current = OTHER
        self._measured = self._synchronize is None or (step - 1) % self._every == 0
        self._wait = self._synchronize if self._measured else None
        if self._wait is not None:
            self._wait()
        self._last_waited = self._waited()
        self._start = self._last = self._clock()

    def mark(self, part: str) -> None:
        """Give the time since the last mark to `part`."""
        if self._wait is not None:
            self._wait()
        now = self._clock()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now
        waited = self._waited()
        if waited != self._last_waited:
            self._waits[part] = self._waits.get(part, 0.0) + waited - self._last_waited
            self._last_waited = waited

    def part(self, name: str) -> _Block:
        """A block whose time, less that of blocks inside it, belongs to `name`. No name nests in itself."""
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = _Block(self, name)
        return block

    def end(self) -> tuple[float, dict[str, float]]:
        """Seconds of the step and of its parts. The parts add up to the step; they are empty where not synchronised."""
        self.mark(self._current)
        seconds = self._last - self._start
        if not self._measured:
            return seconds, {}
        for part, spent in self._parts.items():
            _add(self._window, part, spent, self._step)
            _add(self._own_window, part, max(0.0, spent - self._waits.get(part, 0.0)), self._step)
        return seconds, dict(self._parts)

    def window(self) -> tuple[dict[str, Summary], dict[str, Summary]]:
        """Summaries of the parts over the steps since the last call, for a `window` record; and, of those in which this
        rank waited for others, without these waits."""
        parts = {part: running.summary() for part, running in self._window.items()}
        own = {part: running.summary() for part, running in self._own_window.items()}
        self._window, self._own_window = {}, {}
        return parts, {part: summary for part, summary in own.items() if summary.sum < parts[part].sum}

    def overhead(self, name: str) -> _Overhead:
        """A block that writes records, draws the live line or feeds an exporter: it knows what it costs.

        Its thread time is summed in `overhead_seconds[name]`, its wall time belongs to the part `telemetry`.
        """
        return _Overhead(self, name)

    @property
    def overhead_total_seconds(self) -> float:
        """Thread time in telemetry, progress and records since the start."""
        return sum(self.overhead_seconds.values())

    def _enter(self, part: str) -> str:
        outer = self._current
        self.mark(outer)
        self._current = part
        return outer

    def _exit(self, part: str, outer: str) -> None:
        self.mark(part)
        self._current = outer


class _Block:
    """One part as a context manager, made once and reused."""

    __slots__ = ("_name", "_outer", "_timers")

    def __init__(self, timers: StepTimers, name: str) -> None:
        self._timers = timers
        self._name = name
        self._outer = OTHER

    def __enter__(self) -> None:
        self._outer = self._timers._enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timers._exit(self._name, self._outer)


class _Overhead:
    """A telemetry block that sums its thread time."""

    __slots__ = ("_name", "_outer", "_start", "_timers")

    def __init__(self, timers: StepTimers, name: str) -> None:
        self._timers = timers
        self._name = name
        self._outer = OTHER
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = self._timers._thread_clock()
        self._outer = self._timers._enter(TELEMETRY)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        timers = self._timers
        timers._exit(TELEMETRY, self._outer)
        spent = timers._thread_clock() - self._start
        timers.overhead_seconds[self._name] = timers.overhead_seconds.get(self._name, 0.0) + spent


class _Running:
    """A `Summary` in the making."""

    __slots__ = ("count", "max", "min", "sum", "worst_step")

    def __init__(self) -> None:
        self.count, self.sum, self.min, self.max, self.worst_step = 0, 0.0, float("inf"), -1.0, 0

    def add(self, seconds: float, step: int) -> None:
        self.count += 1
        self.sum += seconds
        self.min = min(self.min, seconds)
        if seconds > self.max:
            self.max, self.worst_step = seconds, step

    def summary(self) -> Summary:
        return Summary(count=self.count, sum=self.sum, min=self.min, max=self.max, worst_step=self.worst_step)


def _add(window: dict[str, _Running], part: str, seconds: float, step: int) -> None:
    running = window.get(part)
    if running is None:
        running = window[part] = _Running()
    running.add(seconds, step)


def _never() -> float:
    return 0.0
