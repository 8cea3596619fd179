"""The ten-second A/B: what a setting costs on this machine, and whether it took effect. Imports no torch.

Both sides run at once as two ranks each and take turns of a fraction of a second, so that whatever else the machine does
falls on both alike. A variable is read at the start of a process: toggling it inside one would not show its effect.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.doctor.trials import PROCS, Side, Trial
from paceline.errors import PacelineError, WorkerFailed
from paceline.workers import affinity, environment
from paceline.workers.affinity import RankCpus
from paceline.workers.start import WorkerGroup, plan_here, start

TRIAL_SECONDS = 10.0
TURN_SECONDS = 0.25
START_SECONDS = 90.0
TURN_LIMIT_SECONDS = 60.0
_POLL_SECONDS = 0.2


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What came out. `factor` is the time of `a` over that of `b`; `low` and `high` hold half of all pairs of turns."""

    name: str
    a: str
    b: str
    a_seconds: float
    b_seconds: float
    factor: float
    low: float
    high: float
    turns: int
    took_effect: bool | None
    evidence: str

    def describe(self) -> str:
        """One line for people."""
        effect = {True: "took effect", False: "had NO effect", None: "effect cannot be seen"}[self.took_effect]
        same = " (no difference that can be told)" if self.low <= 1 <= self.high else ""
        return (
            f"{self.name}: {self.factor:.2f} times{same}: {self.a} {self.a_seconds * 1e3:.1f} ms a step, {self.b} "
            f"{self.b_seconds * 1e3:.1f} ms ({self.low:.2f} to {self.high:.2f} in the middle half of {self.turns} turns); "
            f"{effect}: {self.evidence}"
        )


def run_trial(trial: Trial, seconds: float = TRIAL_SECONDS) -> Measured:
    """Both sides in turns for `seconds`. Call it from the main thread.

    Raises:
        PacelineError: a side did not start or ended in the middle.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-measure-") as name, contextlib.ExitStack() as stack:
        sides = [
            stack.enter_context(_running(side, Path(name) / f"{n}.socket", trial.on_gpus))
            for n, side in enumerate((trial.a, trial.b))
        ]
        pairs: list[tuple[float, float]] = []
        for call in sides:
            call(TURN_SECONDS)  # the first turn pays for what is set up once
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or len(pairs) < 3:
            first, second = (0, 1) if len(pairs) % 2 == 0 else (1, 0)
            times = {first: sides[first](TURN_SECONDS)["seconds"], second: sides[second](TURN_SECONDS)["seconds"]}
            pairs.append((times[0], times[1]))
        reports = [call(0.0) for call in sides]
    return _measured(trial, pairs, reports)


Call = Callable[[float], dict[str, Any]]


@contextlib.contextmanager
def _running(side: Side, path: Path, on_gpus: bool) -> Iterator[Call]:
    """Two ranks under one side's setting; yields a call that gives them a turn and returns what rank 0 reports."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(str(path))
        except OSError as error:
            raise WorkerFailed(f"cannot listen at {path}: {error}", hint="Set TMPDIR to a short path.") from None
        listener.listen(1)
        listener.settimeout(_POLL_SECONDS)
        with _start(side, path, on_gpus) as group:
            connection = _accepted(listener, side, group)
            with connection, connection.makefile("rwb") as stream:
                connection.settimeout(TURN_LIMIT_SECONDS)

                def call(seconds: float) -> dict[str, Any]:
                    try:
                        stream.write(f"{seconds}\n".encode())
                        stream.flush()
                        answer = stream.readline()
                    except OSError as error:
                        raise _ended(side, group, str(error)) from None
                    if not answer:
                        raise _ended(side, group, "ended in the middle")
                    found: dict[str, Any] = json.loads(answer)
                    return found

                yield call


def _accepted(listener: socket.socket, side: Side, group: WorkerGroup) -> socket.socket:
    """Rank 0's connection, once all ranks have met. Raises WorkerFailed where one ends before, or none comes in time."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            return listener.accept()[0]
        if len(group.live()) < PROCS:
            raise _ended(side, group, "ended before they had met")
    raise _ended(side, group, f"did not start within {START_SECONDS:.0f} s")


def _start(side: Side, path: Path, on_gpus: bool) -> WorkerGroup:
    # Where a variable of another library is set, it would win over the one that is measured.
    env = {
        name: value
        for name, value in os.environ.items()
        if (name not in affinity.THREAD_VARIABLES or name == "OMP_NUM_THREADS")
        and not name.startswith(environment.ELASTIC)
    }
    for name, value in side.variables.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    everything = RankCpus(affinity.allowed_cpus(), max(1, len(affinity.allowed_cpus()) // PROCS), False)
    cpus = plan_here(PROCS) if side.pin else [everything] * PROCS
    return start(
        [str(path), *([] if on_gpus else ["cpu"])],
        procs=PROCS,
        run_id=path.stem,
        module="paceline.doctor.measure_rank",
        cpus=cpus,
        env=env,
    )


def _ended(side: Side, group: WorkerGroup, how: str) -> PacelineError:
    codes = [worker.poll() for worker in group.workers]
    return WorkerFailed(
        f"the ranks with {side.label} {how} (exit codes {codes})",
        hint="Run it alone with TORCH_DISTRIBUTED_DEBUG=INFO.",
    )


def _measured(trial: Trial, pairs: Sequence[tuple[float, float]], reports: Sequence[Mapping[str, Any]]) -> Measured:
    ratios = sorted(a / b for a, b in pairs)
    quarter = len(ratios) // 4
    seen = [str(report.get(trial.reports, "")) for report in reports]
    asked = [side.shows in words.split(",") for side, words in zip((trial.a, trial.b), seen, strict=True)]
    evidence = f"{trial.reports} {seen[0]} against {seen[1]}" if trial.reports else "no figure of a rank shows it"
    if trial.reports and seen[0] != seen[1] and not all(asked):
        evidence += f" ({trial.a.shows} against {trial.b.shows} asked for)"
    return Measured(
        name=trial.name,
        a=trial.a.label,
        b=trial.b.label,
        a_seconds=statistics.median(a for a, _ in pairs),
        b_seconds=statistics.median(b for _, b in pairs),
        factor=statistics.median(ratios),
        low=ratios[quarter],
        high=ratios[-1 - quarter],
        turns=len(pairs),
        took_effect=seen[0] != seen[1] if trial.reports else None,
        evidence=evidence,
    )
