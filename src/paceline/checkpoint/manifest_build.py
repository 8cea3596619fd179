"""The manifest of a save, out of what the ranks said and what the hosts wrote. No torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.boxes import Box, tiles
from paceline.checkpoint.inbox import Inbox
from paceline.checkpoint.manifest import OWN_UPDATES, Manifest, StoredTensor
from paceline.checkpoint.messages import SetUp
from paceline.checkpoint.piece_file import WrittenFile, tensors_of
from paceline.errors import PacelineError


def build_manifest(set_up: SetUp, inbox: Inbox, files: Sequence[WrittenFile]) -> Manifest:
    """The manifest, with the next step's result if that is known by now.

    Args:
        inbox: with what is each rank's own, of all hosts.
        files: of all hosts.

    Raises:
        PacelineError: rank 0 said nothing, or the pieces in the files are not exactly what the ranks hold.
    """
    head = inbox.head
    if head is None:
        raise PacelineError(f"rank 0 said nothing about the save of step {inbox.step}")
    own = [inbox.own[rank] for rank in range(set_up.world_size)]
    return Manifest(
        version=set_up.version,
        run_id=set_up.run_id,
        attempt=set_up.attempt,
        step=head.step,
        samples=head.samples,
        time=time.time(),
        world_size=set_up.world_size,
        layout=head.layout,
        tensors=_tensors(set_up, files, inbox.step),
        files={file.name: file.file for file in sorted(files, key=lambda f: f.name)},
        state={**_counted(head.state, own), "eval_loss": head.eval_loss},
        ranks=[{key: value for key, value in rank.items() if key != OWN_UPDATES} for rank in own],
        about=head.about,
        next_step=inbox.await_next(0.0),
    )


def _counted(state: dict[str, Any], own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state with the updates of all parameters, where ranks hold other ones than rank 0: the same under any layout."""
    told = {name: count for rank in own for name, count in rank.get(OWN_UPDATES, {}).items()}
    if not told:
        return state
    optimizer = state["optimizer"]
    return {**state, "optimizer": {**optimizer, "steps": dict(sorted({**optimizer["steps"], **told}.items()))}}


def _tensors(set_up: SetUp, files: Sequence[WrittenFile], step: int) -> dict[str, StoredTensor]:
    """All tensors that the ranks hold, after the check that the pieces written tile each one."""
    found = tensors_of(files)
    tensors = {name: found.get(name, StoredTensor(k.dtype, k.shape, ())) for name, k in set_up.tensors.items()}
    wrong = sorted(found.keys() - tensors.keys()) + [
        name for name, t in tensors.items() if not tiles([Box(p.offset, p.shape) for p in t.pieces], t.shape)
    ]
    if wrong:
        raise PacelineError(
            f"the pieces of {wrong[0]} that were written for step {step} are not the whole tensor",
            values={"tensors": wrong},
            hint="This is a fault of paceline; please report it.",
        )
    return tensors
