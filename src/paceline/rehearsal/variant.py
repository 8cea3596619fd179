"""Jobs of a rehearsal: the user's own with what a comparison needs, and what must change to run elsewhere. No torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from paceline.cluster.probe import probe_host
from paceline.errors import JobError
from paceline.job.load import Job, load_job, split_words
from paceline.job.resolve import Resolved, resolve_job

_PRECISE = {"parallel.reduce_dtype": "auto", "parallel.parameter_dtype": "fp32"}
"""Keys with a value in which the arithmetic is not float64 throughout."""

_LAYOUTS: tuple[dict[str, str], ...] = (
    {},
    {"parallel.dp_replicate": "1", "parallel.dp_shard": "-1"},
    {"parallel.dp_replicate": "-1", "parallel.dp_shard": "1"},
    {"parallel.dp_replicate": "-1", "parallel.dp_shard": "1", "parallel.cp": "1", "parallel.tp": "1", "parallel.pp": "1"},
)  # fmt: skip
"""Degrees to try on another number of ranks, what the job says first."""

_RESETS: tuple[dict[str, str], ...] = (
    {},
    {"batch.microbatch": "auto"},
    {"parallel.zero_stage": "auto", "parallel.reduce_every": "auto", "parallel.bucket_bytes": "auto",
     "parallel.overlap": "auto"},
)  # fmt: skip
"""Settings that belong to a layout and may have no effect, or no sense, in another one."""


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """The job on a number of ranks.

    Attributes:
        words: of the command line, without the name of a run.
        procs: ranks.
        changes: `section.key=value` that differ from the user's job in what is computed or where.
        layout, precision, microbatch: as resolved.
    """

    words: tuple[str, ...]
    procs: int
    changes: tuple[str, ...]
    layout: str
    precision: str
    microbatch: int


EVAL_SEQUENCES = 48
"""Sequences per evaluation of a rehearsal at most: that there is one between two steps matters, how long it is does not."""


def base_words(words: Sequence[str], folder: Path, steps: int) -> list[str]:
    """The job with its runs in `folder`, `steps` long, every sample on record, and nothing taken from elsewhere."""
    job = load_job(*split_words(words))
    evaluated = min(EVAL_SEQUENCES, int(job.data.eval_sequences))
    alone = ["launch.nodes=1"] if job.launch.nodes else []
    return [
        *words, *alone, f"data.eval_sequences={evaluated}",
        f"run.dir={json.dumps(str(folder))}", f"run.steps={steps}", "run.record_samples=true",
        "checkpoint.dir=auto", "checkpoint.resume=auto", "checkpoint.allow_missing=[]", "checkpoint.allow_unexpected=[]",
    ]  # fmt: skip


def own_variant(words: Sequence[str], procs: int) -> Variant:
    """The job as it is.

    Raises:
        JobError: it cannot run on `procs` ranks.
    """
    return _variant(words, procs, {})


def precise_variant(words: Sequence[str], procs: int) -> Variant:
    """The job in float64 throughout."""
    job = load_job(*split_words(words))
    changes = {key: value for key, value in _PRECISE.items() if _differs(job, key, value)}
    if job.parallel.precision != "fp64":
        changes["parallel.precision"] = "fp64"
    return _variant(words, procs, changes)


def other_variant(words: Sequence[str], procs: int, microbatch: int | None = None) -> Variant:
    """The job on another number of ranks, with the fewest changes that let it run there.

    Args:
        microbatch: kept where the job leaves it open and it fits: products of other shapes round otherwise, and the
            gradients of queries and keys, small differences of larger numbers, show that a million times larger.

    Raises:
        JobError: no layout that is known here fits; the reason is that of the job's own.
    """
    first: JobError | None = None
    for changes in _candidates(load_job(*split_words(words)), microbatch):
        try:
            return _variant(words, procs, changes)
        except JobError as error:
            first = first or error
    assert first is not None
    first.hint = "Give another number of ranks with --other."
    raise first


def _candidates(job: Job, microbatch: int | None) -> Iterator[dict[str, str]]:
    """Changes that the job does not have already, fewer before more."""
    resets = [one | other for one, other in itertools.combinations_with_replacement(_RESETS, 2)]
    resets.sort(key=len)
    if microbatch is not None and job.batch.microbatch is None:
        resets.insert(0, {"batch.microbatch": str(microbatch)})
    seen: list[dict[str, str]] = []
    for layout in _LAYOUTS:
        for reset in resets:
            changes = {key: value for key, value in (layout | reset).items() if _differs(job, key, value)}
            if changes not in seen:
                seen.append(changes)
                yield changes


def _differs(job: Job, key: str, value: str) -> bool:
    section, name = key.split(".")
    held = getattr(getattr(job, section), name)
    return str("auto" if held is None else held) != value


def _variant(words: Sequence[str], procs: int, changes: dict[str, str]) -> Variant:
    own = tuple(f"{key}={value}" for key, value in sorted(changes.items()))
    full = (*words, *own, f"launch.procs_per_node={procs}")
    resolved: Resolved = resolve_job(load_job(*split_words(full)), procs, probe_host())
    return Variant(
        words=full, procs=procs, changes=own, layout=str(resolved.layout), precision=resolved.precision,
        microbatch=resolved.batch.microbatch,
    )  # fmt: skip
