"""The drill itself: an undisturbed run, a run for each fault, and one for each control."""

from __future__ import annotations

import json
import platform
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version

from paceline import __version__
from paceline.drill import reach
from paceline.drill.faults import BY_KIND, CONTROLS, FAULTS, Control, Fault
from paceline.drill.result import Drill, NotRun, Trial
from paceline.drill.trials import EVERY, LOG_EVERY, STEPS, Ground, try_fault
from paceline.errors import JobError, UsageError
from paceline.job.load import load_job, split_words
from paceline.rehearsal.trial import run_once
from paceline.rehearsal.variant import base_words, other_variant, own_variant
from paceline.run.directory import next_free_name
from paceline.run.files import write_atomic
from paceline.run.records import json_safe, read_records
from paceline.units import format_seconds

Say = Callable[[str], None]

RESULT_FILE = "drill.json"
NOTHING = "nothing"


def drill(
    words: Sequence[str], *, procs: int, kinds: Sequence[str] = (), controls: bool = False, seed: int = 0, say: Say
) -> Drill:
    """Prove that a job survives, in a fresh folder beside its run directory.

    Args:
        words: the command line words of the job.
        procs: ranks.
        kinds: faults to try; all of them unless given.
        controls: try each protection's fault without it, too.
        seed: of ranks, steps and moments.
        say: told what is going on.

    Raises:
        UsageError: there is no such kind of fault.
        JobError: the job cannot run on that number of ranks.
        PacelineError: the undisturbed run failed.
    """
    began = time.monotonic()
    wanted = chosen(kinds)
    # What a job scheduler sends must not leave the runs behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ground, not_run = begin(words, procs, seed, wanted, say)
    left_out = {n.kind for n in not_run}
    possible = [fault for fault in wanted if fault.kind not in left_out]
    against = [(BY_KIND[c.kind], c) for c in CONTROLS if BY_KIND[c.kind] in possible] if controls else []
    trials = _tried(ground, [(fault, None) for fault in possible], say)
    found = Drill(
        job=str(split_words(words)[0] or "the built-in job"), folder=str(ground.folder), procs=procs, steps=STEPS,
        seed=seed, trials=tuple(trials), controls=tuple(_tried(ground, against, say)), not_run=tuple(not_run),
        matrix=scored(trials), blamed=blamed(trials), save_stall_seconds=_stall_seconds(ground),
        save_write_seconds=ground.save_seconds, checkpoint_bytes=ground.checkpoint_bytes,
        undisturbed_seconds=ground.run_seconds, seconds=time.monotonic() - began,
        versions={"paceline": __version__, "torch": version("torch"), "python": platform.python_version()},
    )  # fmt: skip
    document = {"schema": "paceline.drill/1", **found.document()}
    write_atomic(ground.folder / RESULT_FILE, json.dumps(json_safe(document), indent=1) + "\n")
    return found


def begin(
    words: Sequence[str], procs: int, seed: int, wanted: Sequence[Fault], say: Say
) -> tuple[Ground, list[NotRun]]:
    """Run the job undisturbed, in a fresh folder; what trials stand on, and what cannot be tried here.

    Raises:
        JobError: the job cannot run on that number of ranks.
        PacelineError: it failed.
    """
    ground, not_run = _prepare(words, procs, seed, wanted)
    ground.folder.mkdir(parents=True)
    say(f"drilling {STEPS} steps in {ground.folder}; seed {seed}")
    _run_undisturbed(ground, say)
    return ground, not_run


def _prepare(words: Sequence[str], procs: int, seed: int, wanted: Sequence[Fault]) -> tuple[Ground, list[NotRun]]:
    """The jobs of the runs, and what cannot be tried with them here.

    Raises:
        JobError: the job cannot run on that number of ranks.
    """
    job = load_job(*split_words(words))
    parent = job.run_path.parent
    folder = parent / next_free_name(parent, f"{job.name}-drill")
    kept = max(int(job.checkpoint.keep), STEPS // EVERY)
    base = [
        *base_words(words, folder, STEPS), f"checkpoint.every={EVERY}", f"checkpoint.keep={kept}",
        f"run.log_every={LOG_EVERY}",
    ]  # fmt: skip
    own, other = own_variant(base, procs), None
    not_run = [NotRun(f.kind, reason) for f in wanted if (reason := reach.why_not(f, procs)) is not None]
    try:
        other = other_variant(base, procs - 1 if procs > 1 else 2, own.microbatch)
    except JobError as error:
        not_run += [NotRun(f.kind, error.message) for f in wanted if f.strikes == "ranks"]
    return Ground(folder=folder, own=own, other=other, seed=seed), not_run


def chosen(kinds: Sequence[str]) -> list[Fault]:
    """The faults of these kinds, in the order of the catalogue; all of them where none is named.

    Raises:
        UsageError: there is no such kind.
    """
    for kind in kinds:
        if kind not in BY_KIND:
            raise UsageError(
                f"--kinds {kind}: there is no such fault", values={"kind": kind},
                hint=f"There are {', '.join(BY_KIND)}.",
            )  # fmt: skip
    return [fault for fault in FAULTS if not kinds or fault.kind in kinds]


def _run_undisturbed(ground: Ground, say: Say) -> None:
    """Run the job as it is, and keep what the trials are measured by.

    Raises:
        PacelineError: it failed.
    """
    run_dir = ground.undisturbed.run_dir
    say("  undisturbed")
    ended = run_once(run_dir, list(ground.own.words))
    if ended.code != 0:
        raise ended.failure()
    saves = [r for r in read_records(run_dir, kinds=("checkpoint",)) if r["state"] == "durable"]
    ground.run_seconds = ended.seconds
    ground.step_seconds = statistics.median(float(r["seconds"]) for r in read_records(run_dir, kinds=("step",)))
    ground.save_seconds = statistics.median(float(r["seconds"]) for r in saves)
    ground.checkpoint_bytes = max(int(r["bytes"] or 0) for r in saves)
    say(f"      done in {format_seconds(ended.seconds)}")


def _tried(ground: Ground, wanted: Sequence[tuple[Fault, Control | None]], say: Say) -> list[Trial]:
    found = []
    for number, (fault, control) in enumerate(wanted, 1):
        without = f" without {control.without}" if control else ""
        say(f"  {number}/{len(wanted)} {fault.kind}{without}: {fault.does}")
        trial = try_fault(ground, fault, control)
        found.append(trial)
        told = "survived" if trial.survived else f"NOT survived: {'; '.join(trial.why)}"
        say(f"      {told} in {format_seconds(trial.seconds)}")
    return found


def scored(trials: Sequence[Trial]) -> dict[str, dict[str, int]]:
    """How often which fault was named how."""
    matrix: dict[str, dict[str, int]] = {}
    for trial in trials:
        if BY_KIND[trial.kind].named and trial.struck_step is not None:
            row = matrix.setdefault(trial.kind, {})
            row[trial.named or NOTHING] = row.get(trial.named or NOTHING, 0) + 1
    return matrix


def blamed(trials: Sequence[Trial]) -> tuple[int, int]:
    """How often the rank was named rightly, and how often there was one to name."""
    asked = [t for t in trials if BY_KIND[t.kind].named and BY_KIND[t.kind].blames and t.struck_step is not None]
    return sum(t.named_rank == t.struck_rank for t in asked), len(asked)


def _stall_seconds(ground: Ground) -> float:
    """For which training stands still in a save of the undisturbed run."""
    records = read_records(ground.undisturbed.run_dir, kinds=("checkpoint",))
    stalls = [float(r["blocked_seconds"] or 0.0) for r in records if r["state"] == "staged"]
    return statistics.median(stalls) if stalls else 0.0
