"""Where an attempt begins: the newest checkpoint that proves whole, chosen by rank 0 and loaded by all ranks or by none.

A rank looks at the file system only for what rank 0 has named. Each checks what it reads; where one finds damage, the
checkpoint is set aside and the one before it is tried.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from paceline.checkpoint import folders, verify
from paceline.checkpoint.config import CheckpointSection
from paceline.checkpoint.exchange import await_key
from paceline.checkpoint.manifest import COMMIT_FILE, Manifest
from paceline.checkpoint.pieces import explained
from paceline.checkpoint.places import Found, find_one
from paceline.checkpoint.reader import LoadReport, load_tensors
from paceline.checkpoint.storage import Storage, open_storage
from paceline.errors import NoCheckpoint, PacelineError, from_record
from paceline.parallel.collectives import gather_objects
from paceline.run.records import Checkpoint, Record
from paceline.train import random_state
from paceline.train.state import BUFFER, OPTIMIZER, TrainingState
from paceline.workers.heartbeat import WAITING, beat
from paceline.workers.rendezvous import BARRIER_SECONDS, World


@dataclass
class Start:
    """What an attempt begins with. `manifest` is None for a fresh run, and of this run's own checkpoint where `own`.

    step: optimizer steps done. records: what is to be written down. notes: what is to be said.
    """

    step: int = 0
    manifest: Manifest | None = None
    path: str | None = None
    own: bool = True
    records: list[Record] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prepared: bool = False


@dataclass(frozen=True)
class Source:
    """A checkpoint that rank 0 chose: a folder of a storage ("": the place itself). `own`: of this run, not of another."""

    place: str
    folder: str
    step: int
    digest: str
    own: bool

    @property
    def found(self) -> Found:
        return Found(open_storage(self.place), self.folder)


@dataclass(frozen=True)
class Suspect:
    """A checkpoint of this run that `rank` could not load, and why."""

    source: Source
    rank: int
    error: PacelineError


def resume(
    state: TrainingState,
    world: World,
    group: dist.ProcessGroup | None,
    section: CheckpointSection,
    place: str,
    *,
    prepare: Callable[[], list[str]] = list,
    check: Callable[[Manifest], None] = lambda manifest: None,
    record: Callable[[Record], None] = lambda record: None,
) -> Start:
    """Load the newest valid checkpoint at `place`, or the one that the job starts from; nothing in a fresh run.

    Args:
        state: what is filled.
        place: folder or URL of this run's checkpoints.
        prepare: on rank 0, before anything is looked at; returns notes.
        check: refuses a checkpoint of another model or vocabulary with a JobError.
        record: on rank 0, takes what was set aside, at once: the attempt may end for it.

    Raises:
        NoCheckpoint: there are checkpoints and none of them is valid, or none where the job starts from.
        JobError: the checkpoint belongs to another model.
        PacelineError: what any rank met, on all ranks alike.
    """
    start = Start()
    began = time.perf_counter()

    suspect: Suspect | None = None
    own_names = [placed.name for placed in (*state.weights(), *state.moments())]
    elsewhere = set().union(*gather_objects(own_names, group)) - set(own_names)

    def choose() -> Source | None:
        if not start.prepared:
            start.notes += prepare()
            start.prepared = True
        if suspect is not None:
            _judge(suspect, start, record)
        with explained(open_storage(place), ""):
            return _choose(section, place, start, record)

    while True:
        # An old writer may take as long, and the storage once more.
        beat(-1, "looking for a checkpoint", 2 * float(section.storage_timeout), "restore")
        source = _agree(choose, world)
        if source is None:
            return start
        beat(-1, f"loading the checkpoint of step {source.step}", float(section.storage_timeout), "restore")
        manifest, error = _load(state, source, section, check, start, elsewhere)
        # Storage may keep one rank longer than a collective waits.
        world.host_barrier(world.shared_key("loaded"))
        told = gather_objects(None if error is None else error.to_record(), group)
        failed = [(rank, from_record(e)) for rank, e in enumerate(told) if e is not None]
        if not failed:
            assert manifest is not None
            return _started(start, source, manifest, time.perf_counter() - began)
        for _, other in failed:
            if not (isinstance(other, NoCheckpoint) and source.own):
                raise other
        suspect = Suspect(source, *failed[0])


def _choose(section: CheckpointSection, place: str, start: Start, record: Callable[[Record], None]) -> Source | None:
    """Rank 0's choice."""
    storage = open_storage(place)
    start.notes += folders.tidy(storage)
    for step in reversed(folders.list_steps(storage)):
        findings = verify.quick(storage, step)
        if not findings:
            return _source(Found(storage, folders.step_folder(step)), own=True)
        _quarantine(storage, step, findings[0].describe(), start, record)
    _refuse_silent_restart(storage, place)
    return None if section.start_from is None else _source(_other(section.start_from), own=False)


def _source(found: Found, *, own: bool) -> Source:
    commit = folders.commit_in(found.storage, found.folder, None)
    return Source(found.storage.place, found.folder, commit.step, commit.manifest_sha256, own)


def _other(path: str) -> Found:
    """The checkpoint of another run, or an imported one, that the job starts from."""
    try:
        return find_one(path)
    except NoCheckpoint as error:
        error.key = "checkpoint.resume"
        error.hint = (
            "Name a step folder, a checkpoints folder or a run directory; `paceline checkpoint list PATH` shows them."
        )
        raise


def _refuse_silent_restart(storage: Storage, place: str) -> None:
    """A run whose checkpoints were all damaged must not begin again as if nothing had been."""
    names = storage.names(folders.QUARANTINE) if storage.exists(folders.QUARANTINE) else []
    # One without its mark was never finished: a run that died in its first save begins anew.
    aside = [name for name in names if storage.exists(f"{folders.QUARANTINE}/{name}/{COMMIT_FILE}")]
    if not aside:
        return
    reasons = "; ".join(f"{name}: {folders.reason_of(storage, name)}" for name in aside)
    raise NoCheckpoint(
        f"{place} held {len(aside)} checkpoint{'s' if len(aside) > 1 else ''} and none of them is valid: {reasons}",
        key="checkpoint.resume",
        values={"place": place, "quarantined": aside},
        hint=f"They are in {place}/{folders.QUARANTINE}. Start beside this run with checkpoint.resume=never, or from "
        "another checkpoint with checkpoint.resume=PATH and another run.name.",
    )


def _agree(choose: Callable[[], Source | None], world: World) -> Source | None:
    """What rank 0 chose, on every rank; or its error."""
    key = world.shared_key("checkpoint")
    if world.rank == 0:
        try:
            source = choose()
        except PacelineError as error:
            world.store.set(key, json.dumps({"error": error.to_record()}, default=str))
            raise
        told: dict[str, Any] = {"source": None if source is None else source.__dict__}
        world.store.set(key, json.dumps(told))
        return source
    beat(-1, "waiting for rank 0 to choose a checkpoint", WAITING)
    store: Any = world.store
    told = json.loads(await_key(store, key, BARRIER_SECONDS, "rank 0 to choose a checkpoint"))
    if "error" in told:
        raise from_record(told["error"])
    return None if told["source"] is None else Source(**told["source"])


def _load(
    state: TrainingState,
    source: Source,
    section: CheckpointSection,
    check: Callable[[Manifest], None],
    start: Start,
    elsewhere: set[str],
) -> tuple[Manifest | None, PacelineError | None]:
    """Fill the state, or say what stood in the way: the ranks agree on that before any of them goes on."""
    try:
        found = source.found
        manifest = found.manifest()
        with explained(found.storage, found.folder):
            own = folders.commit_in(found.storage, found.folder, None).manifest_sha256
        if own != source.digest:
            # Not damage: nothing may be set aside for it.
            raise PacelineError(
                f"rank {state.rank} sees another checkpoint in {found.where} than rank 0: {own[:16]} and "
                f"{source.digest[:16]}",
                values={"place": found.where, "rank": state.rank, "own": own, "rank0": source.digest},
                hint="Make sure that all hosts see the same files there.",
            )
        check(manifest)
        report = _fill(state, found, manifest, section, elsewhere, own=source.own)
        start.notes += _left_out(report)
    except PacelineError as error:
        return None, error
    except OSError as error:
        return None, PacelineError(
            f"rank {state.rank} cannot read the checkpoint of step {source.step} in {source.place}: {error}",
            key="checkpoint.dir",
            values={"place": source.place, "rank": state.rank},
        )
    return manifest, None


def _fill(
    state: TrainingState,
    found: Found,
    manifest: Manifest,
    section: CheckpointSection,
    elsewhere: set[str],
    *,
    own: bool,
) -> LoadReport:
    """Tensors first, in place; a checkpoint of weights alone (an imported one) leaves the moments at zero.

    `elsewhere` are names that other ranks alone hold, as those of other stages.
    """
    only_weights = not own and is_imported(manifest)
    buffers = [] if only_weights else state.buffers(state.rank % max(1, manifest.world_size))
    wanted = [*state.weights(), *([] if only_weights else state.moments()), *buffers]
    report = load_tensors(
        found.storage, manifest, wanted, folder=found.folder,
        elsewhere=[name for name in elsewhere if not (only_weights and name.startswith(f"{OPTIMIZER}/"))],
        allow_missing=() if own else section.allow_missing,
        # Other ranks' buffers are not ours to miss.
        allow_unexpected=(f"{BUFFER}/*", *(() if own else section.allow_unexpected)),
    )  # fmt: skip
    if not only_weights:
        state.restore_shared(manifest.state)
        state.restore_extra(manifest.ranks)
    state.publish()
    return report


def _left_out(report: LoadReport) -> list[str]:
    """What the job's patterns excused, in a sentence each."""
    unexpected = [name for name in report.unexpected if not name.startswith(f"{BUFFER}/")]
    sentences = []
    if report.missing:
        sentences.append(f"not in the checkpoint and left at their initial values: {', '.join(report.missing)}")
    if unexpected:
        sentences.append(f"only in the checkpoint and not read: {', '.join(unexpected)}")
    return sentences


def is_imported(manifest: Manifest) -> bool:
    """Whether it holds weights alone, made from a plain file: a beginning, not a moment of a run."""
    return OPTIMIZER not in manifest.state


def _started(start: Start, source: Source, manifest: Manifest, seconds: float) -> Start:
    start.step, start.manifest, start.path, start.own = manifest.step, manifest, source.found.where, source.own
    start.records.append(
        Checkpoint(step=manifest.step, state="resumed", path=start.path, bytes=manifest.size_bytes, seconds=seconds)
    )
    start.notes.append(
        f"resuming after step {manifest.step} from {start.path} ({manifest.samples} samples done, saved by attempt "
        f"{manifest.attempt} on {manifest.world_size} rank{'s' if manifest.world_size > 1 else ''})"
    )
    return start


def restore_random(start: Start, state: TrainingState, seed: int) -> None:
    """The random states of the moment of the save; called last before the first step."""
    if start.manifest is None or not start.manifest.ranks:
        return
    ranks = start.manifest.ranks
    if state.rank < len(ranks):
        random_state.restore(ranks[state.rank]["random"], state.device)
    else:
        random_state.seed_anew(seed, start.step, state.rank, state.device)


def _judge(suspect: Suspect, start: Start, record: Callable[[Record], None]) -> None:
    """On rank 0: set a checkpoint aside where it is damaged indeed, and not where one rank fails to see or read it.

    Raises:
        PacelineError: every byte of it is as it was written.
    """
    source, error = suspect.source, suspect.error
    storage = open_storage(source.place)
    beat(-1, f"verifying the checkpoint of step {source.step}", 24 * 3600.0, "restore")
    if verify.verify(storage, source.step):
        _quarantine(storage, source.step, error.message, start, record)
        return
    raise PacelineError(
        f"rank {suspect.rank} cannot load {source.found.where}, in which rank 0 finds every byte as it was written: "
        f"{error.message}",
        key="checkpoint.dir",
        values={"place": source.place, "step": source.step, "rank": suspect.rank, **error.values},
        hint="Make sure that all hosts see the same files there, and that this rank's host reads them without errors.",
    )


def _quarantine(storage: Storage, step: int, reason: str, start: Start, record: Callable[[Record], None]) -> None:
    where = folders.quarantine(storage, step, reason)
    record(Checkpoint(step=step, state="quarantined", path=where, reason=reason))
    start.notes.append(f"warning: the checkpoint of step {step} is damaged and was set aside in {where}: {reason}")
