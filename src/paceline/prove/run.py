"""The proof itself: six runs, of which two are killed, and two comparisons."""

from __future__ import annotations

import contextlib
import importlib
import json
import platform
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from paceline import __version__
from paceline.cluster.probe import probe_host
from paceline.errors import PacelineError
from paceline.job.load import load_job, split_words
from paceline.prove.certificate import CERTIFICATE_FILE, TOLERANCE, Certificate, Finding
from paceline.rehearsal.compare import compare_curves, compare_samples
from paceline.rehearsal.trial import copy_run, is_durable, run_to_end, run_until_killed
from paceline.rehearsal.variant import Variant, base_words, other_variant, own_variant, precise_variant
from paceline.run.directory import next_free_name
from paceline.run.files import write_atomic
from paceline.run.records import json_safe
from paceline.units import format_seconds

Say = Callable[[str], None]

KILL_TRIES = 3


def prove(words: Sequence[str], *, procs: int, other: int, before: int, after: int, say: Say) -> Certificate:
    """Prove exact resume of a job, in a fresh folder beside its run directory.

    A straight run is compared with one that is killed and resumed on the same ranks, bit for bit in the job's own
    precision; and in float64 with one that is resumed on other ranks.

    Args:
        words: the command line words of the job.
        procs, other: ranks of the job, and those of the resume elsewhere.
        before, after: steps before the kill and after it.
        say: told what is going on.

    Raises:
        JobError: the job cannot run on one of the numbers of ranks.
        PacelineError: a run failed.
    """
    began = time.monotonic()
    # What a job scheduler sends must not leave the runs behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    job = load_job(*split_words(words))
    parent = job.run_path.parent
    folder = parent / next_free_name(parent, f"{job.name}-prove")
    base = base_words(words, folder, before + after)
    own, precise = own_variant(base, procs), precise_variant(base, procs)
    elsewhere = other_variant([*base, *precise.changes], other, precise.microbatch)
    folder.mkdir(parents=True)
    say(f"proving {before} + {after} steps in {folder}")
    runs = _Runs(folder, before, after, say, total=6 if precise.changes else 4)
    straight, killed = runs.pair(own, "")
    same = _find(straight, runs.resumed("resumed", killed, own), own, before + after, None)
    if precise.changes:
        straight, killed = runs.pair(precise, "-fp64")
    elsewhere = msgspec.structs.replace(elsewhere, changes=(*precise.changes, *elsewhere.changes))
    away = _find(straight, runs.resumed("other", killed, elsewhere), elsewhere, before + after, TOLERANCE)
    certificate = Certificate(
        job=str(job.path or "the built-in job"), folder=folder, procs=procs, other=other, steps=(before, after), same=same,
        elsewhere=away, killed=tuple(runs.ended), seconds=time.monotonic() - began, device=probe_host().device_name,
        versions={"paceline": __version__, "torch": version("torch"), "python": platform.python_version()},
    )  # fmt: skip
    document = {"schema": "paceline.prove/1", **certificate.document()}
    write_atomic(folder / CERTIFICATE_FILE, json.dumps(json_safe(document), indent=1) + "\n")
    return certificate


class _Runs:
    """The runs of one proof, each told before it begins and after it has ended."""

    def __init__(self, folder: Path, before: int, after: int, say: Say, *, total: int) -> None:
        self.ended: list[int] = []
        self._folder = folder
        self._before = before
        self._after = after
        self._say = say
        self._total = total
        self._count = 0

    def pair(self, variant: Variant, suffix: str) -> tuple[Path, Path]:
        """A straight run, which saves at its end only, and one that is killed."""
        straight, killed = self._folder / f"straight{suffix}", self._folder / f"killed{suffix}"
        what = f"{self._before + self._after} steps on {_ranks(variant)}, {variant.precision}"
        with self._told(f"{straight.name}: {what}"):
            run_to_end(straight, [*variant.words, "checkpoint.every=end"])
        with self._told(f"{killed.name}: {what}, SIGKILL once step {self._before} is saved"):
            self.ended.append(self._kill(killed, variant))
        return straight, killed

    def resumed(self, name: str, killed: Path, variant: Variant) -> Path:
        """A copy of the killed run, gone on with to the end."""
        run_dir = self._folder / name
        with self._told(f"{name}: {killed.name} from step {self._before} on {_ranks(variant)}, {variant.precision}"):
            copy_run(killed, run_dir, self._before)
            run_to_end(run_dir, self._saving(variant))
        return run_dir

    def _kill(self, run_dir: Path, variant: Variant) -> int:
        """A run that came to its end before the kill reached it is made again: on a busy host a moment can be long."""

        def ready() -> bool:
            return is_durable(run_dir, self._before)

        for _ in range(KILL_TRIES):
            if ended := run_until_killed(run_dir, self._saving(variant), ready):
                return ended
            shutil.rmtree(run_dir)
        raise PacelineError(
            f"the run came to its end {KILL_TRIES} times before it could be killed after step {self._before}",
            values={"step": self._before, "tries": KILL_TRIES},
            hint=f"Give more steps after the kill, such as --steps {self._before},{4 * self._after}.",
        )

    def _saving(self, variant: Variant) -> list[str]:
        return [*variant.words, f"checkpoint.every={self._before}"]

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        self._count += 1
        self._say(f"  {self._count}/{self._total} {what}")
        began = time.monotonic()
        yield
        self._say(f"      done in {format_seconds(time.monotonic() - began)}")


def _find(straight: Path, resumed: Path, variant: Variant, steps: int, tolerance: float | None) -> Finding:
    """The resumed run beside the straight one."""
    # Here, since it imports torch: what is wrong with a job is told before.
    tensors = importlib.import_module("paceline.rehearsal.tensors")
    return Finding(
        procs=variant.procs, layout=variant.layout, precision=variant.precision, changes=variant.changes,
        tolerance=tolerance, curves=compare_curves(straight, resumed, steps),
        samples=compare_samples(straight, resumed, steps),
        state=tensors.compare_states(str(straight / "checkpoints"), str(resumed / "checkpoints"), steps),
    )  # fmt: skip


def _ranks(variant: Variant) -> str:
    return f"{variant.procs} rank{'s' if variant.procs > 1 else ''}"
