"""Folders of checkpoints: which count, what becomes of the others, and what a death at any moment leaves. R3, R5, R6."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from paceline.checkpoint import folders
from paceline.checkpoint import storage as storage_module
from paceline.checkpoint.folders import Reason, list_steps, newest_valid, quarantine, step_folder, step_of, tidy
from paceline.checkpoint.manifest import COMMIT_FILE, MANIFEST_FILE
from paceline.checkpoint.storage import Storage, open_storage
from paceline.checkpoint.verify import quick, verify
from paceline.errors import NoCheckpoint
from tests.checkpoint.small import write_checkpoint


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    is_local = request.param == "local"
    return open_storage(tmp_path / "checkpoints" if is_local else f"memory://{tmp_path.name}/checkpoints")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000100", 100), ("step-00000000", 0), ("step-123456789", 123456789), ("step-100", None),
        ("step-0000000100", None), ("step-00000100-1", None), ("step-0000010a", None), ("quarantine", None),
        ("step-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661", None), ("", None),
    ],
)  # fmt: skip
def test_the_step_of_a_name(name: str, step: int | None) -> None:
    assert step_of(name) == step
    if step is not None:
        assert step_folder(step) == name


def test_only_what_has_its_mark_counts(storage: Storage) -> None:  # BL-39
    assert list_steps(storage) == [] and newest_valid(storage, quick) == (None, None, ())
    write_checkpoint(storage, 1000000000)
    write_checkpoint(storage, 90)
    write_checkpoint(storage, 110, commit=False)
    assert list_steps(storage) == [90, 1000000000]
    assert folders.read_manifest(storage, 90).step == 90 and folders.read_commit(storage, 90).step == 90
    with pytest.raises(NoCheckpoint, match=f"step-00000110 is no complete checkpoint: it has no {COMMIT_FILE}"):
        folders.read_manifest(storage, 110)


def test_a_mark_of_another_step_is_refused(storage: Storage) -> None:
    write_checkpoint(storage, 90)
    storage.move_folder(step_folder(90), step_folder(95))
    with pytest.raises(NoCheckpoint, match="of step 90, not of step 95"):
        folders.read_manifest(storage, 95)


def test_what_a_dead_attempt_left_is_cleared(storage: Storage) -> None:
    write_checkpoint(storage, 90)
    write_checkpoint(storage, 100, commit=False)
    storage.make_folder(step_folder(110))
    storage.write(f"{step_folder(110)}/rank-00000.safetensors", [b"half"], 4)
    before = verify(storage, 90)
    sentences = tidy(storage)
    assert len(sentences) == 2
    assert "moved" in sentences[0] and "quarantine/step-00000100-1" in sentences[0]
    assert "removed" in sentences[1] and "step-00000110" in sentences[1]
    assert storage.names() == ["quarantine", "step-00000090"]
    assert MANIFEST_FILE in storage.names("quarantine/step-00000100-1")
    assert before == verify(storage, 90) == [] and tidy(storage) == []


def test_quarantine_keeps_everything_and_says_why(storage: Storage) -> None:  # R6
    write_checkpoint(storage, 100)
    kept = {name: storage.read(f"{step_folder(100)}/{name}") for name in storage.names(step_folder(100))}
    assert quarantine(storage, 100, "a bit flipped") == "quarantine/step-00000100-1"
    write_checkpoint(storage, 100, seed=1)
    assert quarantine(storage, 100, "another one") == "quarantine/step-00000100-2"
    moved = "quarantine/step-00000100-1"
    assert {name: storage.read(f"{moved}/{name}") for name in kept} == kept
    reason = msgspec.json.decode(storage.read(f"{moved}/reason.json"), type=Reason)
    assert (reason.step, reason.reason) == (100, "a bit flipped") and reason.time > 1.7e9
    assert list_steps(storage) == []


class Killed(BaseException):
    """The process is gone: nothing that comes after this runs."""


def operations(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(storage_module, "on_operation", lambda *operation: seen.append(operation))
    action()
    monkeypatch.setattr(storage_module, "on_operation", None)
    return seen


def killed_at(index: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the action up to its operation number `index`, which does not happen."""
    left = [index]

    def kill(operation: str, path: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    monkeypatch.setattr(storage_module, "on_operation", kill)
    with pytest.raises(Killed):
        action()
    monkeypatch.setattr(storage_module, "on_operation", None)


ACTIONS: dict[str, Callable[[Storage], object]] = {
    "save": lambda storage: write_checkpoint(storage, 100, count=2),
    "remove the oldest": lambda storage: storage.remove_folder(step_folder(80)),
    "quarantine the newest": lambda storage: quarantine(storage, 95, "test"),
}


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_death_at_any_operation_leaves_the_newest_committed_one(
    tmp_path: Path, kind: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # R3
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the order counts here, and a disk takes its time

    def begin(number: object) -> Storage:
        place = f"memory://{tmp_path.name}/{number}" if kind == "memory" else str(tmp_path / str(number))
        storage = open_storage(place)
        for step in (80, 90) if action != "quarantine the newest" else (80, 90, 95):
            write_checkpoint(storage, step, count=1)
        return storage

    whole = begin("whole")
    count = len(operations(lambda: ACTIONS[action](whole), monkeypatch))
    assert count >= 3
    for index in range(count):
        storage = begin(index)
        killed_at(index, lambda s=storage: ACTIONS[action](s), monkeypatch)
        newest = newest_valid(storage, quick)
        assert newest.step in {"save": (90, 100), "remove the oldest": (90,), "quarantine the newest": (90, 95)}[action]
        assert newest.passed_over == () and verify(storage, newest.step) == []
        tidy(storage)
        again = newest_valid(storage, quick)
        assert again.step == newest.step and verify(storage, newest.step) == []
        if action == "save" and newest.step == 90:
            write_checkpoint(storage, 100, count=2)
            assert verify(storage, 100) == []


def test_a_save_syncs_each_file_before_the_mark_and_the_folders_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # BL-39
    storage = open_storage(tmp_path / "c")
    seen = operations(lambda: write_checkpoint(storage, 100, count=2), monkeypatch)
    order = [(operation, Path(path).name) for operation, path in seen]
    mark = order.index(("rename", COMMIT_FILE))
    for file in ("rank-00000.safetensors", "rank-00001.safetensors", MANIFEST_FILE):
        assert order.index(("write", file)) < order.index(("sync", file)) < mark
    assert order.index(("sync", MANIFEST_FILE)) < order.index(("create", f"{COMMIT_FILE}.tmp"))
    assert ("sync", step_folder(100)) in order[order.index(("sync", MANIFEST_FILE)) : mark]
    assert order[mark + 1 :] == [("sync", step_folder(100)), ("sync", "c")]
