"""What ranks and the writer process of their host say to each other: one JSON object per line. No torch."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from paceline.checkpoint.manifest import NextStep
from paceline.checkpoint.plan import Image

State = Literal["requested", "staged", "written", "durable", "failed", "removed", "quarantined"]


class KeepRule(msgspec.Struct, frozen=True, kw_only=True):
    """Which committed checkpoints stay: the newest `keep`, the `keep_best` by evaluation loss, and those protected."""

    keep: int = 3
    keep_best: int = 0
    protected: tuple[int, ...] = ()


class SaveHead(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 knows of a save: what the manifest says of the run at this step, see `manifest.Manifest`.

    Attributes:
        eval_loss: what the keep rule goes by; in the manifest as `state["eval_loss"]`.
        final: nothing comes after this save, so that nobody waits for the next step's result.
    """

    step: int
    samples: int
    layout: dict[str, int | str]
    state: dict[str, Any]
    about: dict[str, Any]
    eval_loss: float | None = None
    final: bool = False


class Event(msgspec.Struct, frozen=True, kw_only=True, tag="event"):
    """Something that became of a save, or of an older checkpoint because of it.

    Attributes:
        number: the save's, counted from 1 on every rank alike. 0: of no save's end, such as an older checkpoint that
            could not be removed (failed) or a save that takes too long (failed, and may yet become durable).
        seconds: since the save began.
        size_bytes: of the files of pieces (durable).
        folder: name of the step's folder; of its new place where it was quarantined.
        text: why, in words.
        error: record of the error (failed).
        time: when, seconds since 1970.
    """

    state: State
    step: int
    number: int = 0
    seconds: float | None = None
    size_bytes: int | None = None
    folder: str | None = None
    text: str | None = None
    error: dict[str, Any] | None = None
    time: float = msgspec.field(default_factory=time.time)


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """Where the writer is: said when it goes on to something that may take long."""

    number: int
    text: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    """The writer has nothing more to do for save `number`, nor for what it made superfluous."""

    number: int


class TensorKind(msgspec.Struct, frozen=True, array_like=True):
    """Type and whole shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


class SetUp(msgspec.Struct, frozen=True, kw_only=True, tag="set-up"):
    """First message of local rank 0.

    Attributes:
        token: of the attempt; the parts of several hosts carry it, so that no old one is ever taken for a new one.
        ranks: of this host.
        tensors: all of the checkpoint's, for the coordinator (node 0) alone.
    """

    place: str
    token: str
    run_id: str
    attempt: int
    version: str
    node: int
    nodes: int
    ranks: list[int]
    world_size: int
    keep: KeepRule
    timeout_seconds: float
    tensors: dict[str, TensorKind]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of a rank; the descriptor of its staging buffer travels with it."""

    rank: int
    image: Image


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged"):
    """A rank's part of a save lies in its staging buffer.

    Attributes:
        began: CLOCK_MONOTONIC at which the rank entered the save.
        own: what is this rank's own, such as random states.
        head: of rank 0.
    """

    number: int
    step: int
    began: float
    own: dict[str, Any]
    head: SaveHead | None = None


class NextCame(msgspec.Struct, frozen=True, tag="next"):
    """What the step after save `number` gave; None: there will be none."""

    number: int
    result: NextStep | None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Save `number` ended elsewhere: with an error on another host, or (error None) because it was there already."""

    number: int
    error: dict[str, Any] | None


FromRank = SetUp | Hello | Staged | NextCame | Cancel
FromWriter = Event | Phase | Done
