"""Removing what the keep rule no longer keeps, once the new checkpoint was read back whole. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.checkpoint.folders import list_steps, quarantine, read_manifest, step_folder
from paceline.checkpoint.manifest import is_newer
from paceline.checkpoint.messages import Event, KeepRule
from paceline.checkpoint.retention import Kept, to_remove
from paceline.checkpoint.storage import Storage
from paceline.checkpoint.verify import verify
from paceline.errors import NoCheckpoint


def apply_keep_rule(storage: Storage, step: int, rule: KeepRule, say: Callable[[str], None]) -> Iterator[Event]:
    """Remove what need not stay now that `step` is committed; an event for each change.

    Nothing is removed before every byte of `step` was read back. Where that finds something wrong, `step` goes into
    quarantine and all others stay. So does an older one whose manifest cannot be read.

    Args:
        say: takes the name of what is being done.
    """
    kept: list[Kept] = []
    for other in list_steps(storage):
        try:
            loss = read_manifest(storage, other).state.get("eval_loss")
            kept.append(Kept(other, loss if isinstance(loss, float | int) else None))
        except NoCheckpoint as error:
            if is_newer(error.values.get("format")):
                # Not this version's to judge, and so not to move or to count.
                continue
            yield _quarantined(storage, other, error.message)
    doomed = to_remove(kept, rule.keep, rule.keep_best, rule.protected)
    if not doomed:
        return
    say(f"reading {step_folder(step)} back")
    findings = verify(storage, step)
    if findings:
        yield _quarantined(storage, step, findings[0].describe())
        return
    for old in doomed:
        say(f"removing {step_folder(old)}")
        storage.remove_folder(step_folder(old))
        yield Event(state="removed", step=old, folder=step_folder(old))


def _quarantined(storage: Storage, step: int, reason: str) -> Event:
    return Event(state="quarantined", step=step, folder=quarantine(storage, step, reason), text=reason)
