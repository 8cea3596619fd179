"""The grace chain: whether what a run has to do between a stop signal and the kill fits into the time that it gets. No torch.

    step + evaluation + save x (1 + MARGIN)  <=  recovery.grace  <=  what the launcher or scheduler leaves

Saves, steps and evaluations are those that the run's records hold, at their 99th percentile. The margin is half a save: one
may be in flight when the signal comes, and a node that is being given back is busy with other runs' last saves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import JobError
from paceline.run.records import read_records
from paceline.units import format_seconds

MARGIN = 0.5
"""Share of a save that is kept in reserve."""

SHUTDOWN_SECONDS = 30.0
"""Between torchrun's SIGTERM and its SIGKILL, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise."""

PERCENTILE = 0.99
_SLURM = re.compile(r"(?:[RB]+:)?(?:SIG)?\w+@(\d+)$")


class Measured(msgspec.Struct, frozen=True):
    """Seconds that parts of a run have taken; None and 0 where it has not come to one."""

    save: float | None = None
    step: float = 0.0
    evaluation: float = 0.0


class Chain(msgspec.Struct, frozen=True):
    """Seconds from a signal until the end: what is needed, what is granted, and who grants it."""

    measured: Measured
    grace: float
    source: str = "recovery.grace"

    @property
    def need(self) -> float | None:
        """None where no save was measured."""
        if self.measured.save is None:
            return None
        return self.measured.step + self.measured.evaluation + self.measured.save * (1 + MARGIN)

    @property
    def holds(self) -> bool:
        return self.need is None or self.need <= self.grace

    def explain(self) -> str:
        """The formula in numbers."""
        measured = self.measured
        evaluation = f" + an evaluation {format_seconds(measured.evaluation)}" if measured.evaluation else ""
        return (
            f"a step {format_seconds(measured.step)}{evaluation} + a save {format_seconds(measured.save or 0.0)} x "
            f"{1 + MARGIN:g} = {format_seconds(self.need or 0.0)}, and {self.source} leaves {format_seconds(self.grace)}"
        )


def chain(measured: Measured, grace: float, environment: Mapping[str, str]) -> Chain:
    """The chain of a run that is promised `grace` seconds, in the surroundings that it is started in."""
    lead, source = lead_of(environment)
    if lead is not None and lead < grace and not math.isinf(grace):
        return Chain(measured, lead, source)
    return Chain(measured, grace)


def check(measured: Measured, grace: float, environment: Mapping[str, str]) -> list[str]:
    """Before the start; returns warnings.

    Args:
        grace: `recovery.grace`, in seconds.

    Raises:
        JobError: the save, as measured in earlier attempts, does not fit.
    """
    found = chain(measured, grace, environment)
    bare = msgspec.structs.replace(found, measured=msgspec.structs.replace(measured, evaluation=0.0))
    need = math.ceil(bare.need or 0.0)
    if not bare.holds:
        raise JobError(
            f"a stop signal would cost the work since the checkpoint before: {bare.explain()}",
            key="recovery.grace",
            values={"save_seconds": measured.save, "step_seconds": measured.step, "need_seconds": bare.need,
                    "grace_seconds": found.grace, "source": found.source},
            hint=f"Give recovery.grace={need}s, where what stops the run leaves as much: {mend(need)}.",
        )  # fmt: skip
    warnings = []
    if not found.holds:
        warnings.append(f"warning: a signal during an evaluation may cost the last steps: {found.explain()}")
    lead, source = lead_of(environment)
    if lead is not None and lead < grace:
        warnings.append(
            f"warning: recovery.grace is {format_seconds(grace)}, but {source} leaves {format_seconds(lead)}: "
            f"{mend(math.ceil(grace))}"
        )
    return warnings


def mend(seconds: int) -> str:
    """Where schedulers and launchers are given that much time."""
    return (
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={seconds}; Slurm --signal=TERM@{seconds}; Kubernetes "
        f"terminationGracePeriodSeconds: {seconds}"
    )


def lead_of(environment: Mapping[str, str]) -> tuple[float | None, str]:
    """Seconds between the signal and the kill as far as the surroundings tell, and who says so; None where they do not.

    torchrun's variable and default; the value of `sbatch --signal` where it was given as SBATCH_SIGNAL; and
    TERMINATION_GRACE_PERIOD_SECONDS, which a pod's author has to set, since Kubernetes exposes that field nowhere.
    """
    found = []
    given = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    if given.replace(".", "", 1).isdigit():
        found.append((float(given), f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={given}"))
    elif "TORCHELASTIC_RUN_ID" in environment or "TORCH_ELASTIC_RUN_ID" in environment:
        found.append((SHUTDOWN_SECONDS, "torchrun's default"))
    if slurm := _SLURM.match(environment.get("SBATCH_SIGNAL", "")):
        found.append((float(slurm[1]), f"SBATCH_SIGNAL={environment['SBATCH_SIGNAL']}"))
    pod = environment.get("TERMINATION_GRACE_PERIOD_SECONDS", "")
    if pod.isdigit():
        found.append((float(pod), f"TERMINATION_GRACE_PERIOD_SECONDS={pod}"))
    return min(found, default=(None, ""))


def measured_in(run: Path) -> Measured:
    """What the attempts of the run in `run` took so far. A first step builds and compiles: it does not count."""
    if not (run / "records").is_dir():
        return Measured()
    return measured(read_records(run, kinds=("run_started", "step", "eval", "checkpoint")))


def measured(records: Iterable[Mapping[str, Any]]) -> Measured:
    """The same from records in the order of time."""
    saves: list[float] = []
    steps: list[float] = []
    evaluations: dict[tuple[int, int], float] = {}
    first = True
    for record in records:
        if record["kind"] == "run_started":
            first = True
        elif record["kind"] == "step":
            if not first:
                steps.append(float(record["seconds"]))
            first = False
        elif record["kind"] == "eval":
            at = (record["attempt"], record["step"])
            evaluations[at] = evaluations.get(at, 0.0) + float(record["seconds"])
        elif record["state"] == "durable":
            saves.append(float(record["seconds"]))
    return Measured(
        save=percentile(saves) if saves else None, step=percentile(steps), evaluation=percentile(evaluations.values())
    )


def percentile(values: Iterable[float], share: float = PERCENTILE) -> float:
    """The smallest value that `share` of them do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0
