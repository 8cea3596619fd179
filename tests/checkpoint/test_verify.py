"""Verification: of a copy anywhere, of manifests that lie, of links, and of what this version cannot judge."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from paceline.checkpoint import regions
from paceline.checkpoint.folders import newest_valid, read_manifest, step_folder
from paceline.checkpoint.manifest import (
    COMMIT_FILE,
    MANIFEST_FILE,
    Manifest,
    Piece,
    commit_of,
    encode_commit,
    encode_manifest,
    is_newer,
)
from paceline.checkpoint.storage import Storage, open_storage
from paceline.checkpoint.storage_local import LocalStorage
from paceline.checkpoint.verify import quick, verify, verify_folder
from paceline.errors import JobError, NoCheckpoint
from tests.checkpoint.small import write_checkpoint

STEP = 100
FOLDER = step_folder(STEP)
FILE = "rank-00001.safetensors"
replace = msgspec.structs.replace


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run" / "checkpoints")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints" / FOLDER


@pytest.mark.parametrize("where", ["run", "run/checkpoints", f"run/checkpoints/{FOLDER}", "copied away"])
def test_a_checkpoint_is_verified_wherever_it_is(storage: Storage, folder: Path, tmp_path: Path, where: str) -> None:
    write_checkpoint(storage, STEP)
    shutil.copytree(folder, tmp_path / "copied away")
    (verdict,) = verify_folder(str(tmp_path / where))
    assert verdict.committed and verdict.step == STEP and verdict.findings == ()
    data = bytearray((tmp_path / "copied away" / FILE).read_bytes())
    data[-1] ^= 1
    for place in (folder, tmp_path / "copied away"):
        (place / FILE).write_bytes(data)
    (verdict,) = verify_folder(str(tmp_path / where))
    assert [finding.file for finding in verdict.findings] == [FILE]


def test_a_copied_folder_without_its_mark_is_damaged(storage: Storage, folder: Path, tmp_path: Path) -> None:
    write_checkpoint(storage, STEP)
    copy = tmp_path / "elsewhere" / FOLDER
    shutil.copytree(folder, copy)
    (copy / COMMIT_FILE).unlink()
    assert [finding.file for finding in verify_folder(str(copy))[0].findings] == [COMMIT_FILE]
    (copy / MANIFEST_FILE).unlink()
    assert [finding.file for finding in verify_folder(str(copy))[0].findings] == [COMMIT_FILE]


def test_a_save_that_did_not_finish_is_shown_and_not_damaged(storage: Storage, tmp_path: Path) -> None:
    write_checkpoint(storage, STEP)
    write_checkpoint(storage, 110, commit=False)
    first, second = verify_folder(str(tmp_path / "run"))
    assert (first.step, first.committed, first.findings) == (STEP, True, ())
    assert (second.step, second.committed, second.findings) == (110, False, ())


def test_where_there_is_none_that_is_said(storage: Storage, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NoCheckpoint, match=str(place)):
            verify_folder(str(place))
    write_checkpoint(storage, STEP, commit=False)
    with pytest.raises(NoCheckpoint, match="no checkpoint"):
        verify_folder(str(tmp_path / "run"))


def test_progress_rises_to_all_bytes(storage: Storage, tmp_path: Path) -> None:
    for step in (90, STEP):
        write_checkpoint(storage, step)
    seen: list[tuple[int, int]] = []
    verdicts = verify_folder(str(tmp_path / "run"), lambda done, total: seen.append((done, total)))
    total = sum(verdict.size_bytes for verdict in verdicts)
    assert seen[-1] == (total, total) and {of for _, of in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert total == sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file())


def test_pieces_larger_than_a_slice_are_read_in_slices(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(storage, STEP)
    monkeypatch.setattr(regions, "READ_SLICE_BYTES", 7)
    assert verify(storage, STEP) == []


def remove_once_read(folder: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LocalStorage.read

    def last(self: LocalStorage, name: str, begin: int = 0, end: int | None = None) -> bytes:
        data = read(self, name, begin, end)
        if name.endswith(f"{FOLDER}/{file}"):
            shutil.rmtree(folder, ignore_errors=True)
        return data

    monkeypatch.setattr(LocalStorage, "read", last)


@pytest.mark.parametrize("file", [COMMIT_FILE, MANIFEST_FILE])
def test_a_folder_that_its_run_removes_meanwhile_is_not_damaged(
    storage: Storage, folder: Path, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (STEP, 110):
        write_checkpoint(storage, step)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    remove_once_read(folder, file, monkeypatch)
    assert [finding.actual for finding in verify(storage, STEP)] == ["removed while it was verified"]
    shutil.copytree(copy, folder)
    assert [verdict.step for verdict in verify_folder(str(tmp_path / "run"))] == [110]


def first_piece(manifest: Manifest, change: Callable[[Piece], Piece]) -> Manifest:
    tensor = manifest.tensors["model/tall"]
    changed = replace(tensor, pieces=(change(tensor.pieces[0]), *tensor.pieces[1:]))
    return replace(manifest, tensors=manifest.tensors | {"model/tall": changed})


def file_of(manifest: Manifest, **fields: object) -> Manifest:
    return replace(manifest, files=manifest.files | {FILE: replace(manifest.files[FILE], **fields)})


LIES = {
    "a piece is shifted": lambda m: first_piece(m, lambda p: replace(p, begin=p.begin + 4, end=p.end + 4)),
    "a piece has another shape": lambda m: first_piece(m, lambda p: replace(p, shape=(1, 3))),
    "a piece has a negative shape": lambda m: first_piece(m, lambda p: replace(p, shape=(-21, -3))),
    "a piece lies twice": lambda m: first_piece(m, lambda p: replace(p, offset=m.tensors["model/tall"].pieces[1].offset)),
    "a piece lies in an unknown file": lambda m: first_piece(m, lambda p: replace(p, file="x.safetensors")),
    "a piece is left out": lambda m: replace(
        m, tensors=m.tensors | {"model/one": replace(m.tensors["model/one"], pieces=())}
    ),
    "a tensor is left out": lambda m: replace(m, tensors={n: t for n, t in m.tensors.items() if n != "model/one"}),
    "a tensor is taller": lambda m: replace(
        m, tensors=m.tensors | {"model/tall": replace(m.tensors["model/tall"], shape=(130, 3))}
    ),
    "a type is another": lambda m: replace(
        m, tensors=m.tensors | {"model/tall": replace(m.tensors["model/tall"], dtype="I32")}
    ),
    "a type is unknown": lambda m: replace(
        m, tensors=m.tensors | {"model/tall": replace(m.tensors["model/tall"], dtype="F128")}
    ),
    "a header is another": lambda m: file_of(m, header_checksum="0" * 32),
    "a file is longer": lambda m: file_of(m, size_bytes=m.files[FILE].size_bytes + 8),
    "a file lies outside": lambda m: replace(m, files=m.files | {"../x": m.files[FILE]}),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_found(storage: Storage, lie: str) -> None:  # R7
    write_checkpoint(storage, STEP, change=LIES[lie])
    findings = verify(storage, STEP)
    assert findings and any(finding.file in (MANIFEST_FILE, FILE) for finding in findings), findings
    assert all(finding.expected != finding.actual for finding in findings)


def test_a_piece_without_a_checksum_is_refused(storage: Storage, folder: Path) -> None:  # R7
    manifest = write_checkpoint(storage, STEP)
    text = (folder / MANIFEST_FILE).read_bytes()
    checksum = manifest.tensors["model/one"].pieces[0].checksum.encode()
    without = text.replace(b',"checksum":"' + checksum + b'"', b"")
    assert len(without) < len(text)
    reseal(folder, without)
    assert [finding.file for finding in quick(storage, STEP)] == [MANIFEST_FILE]
    with pytest.raises(NoCheckpoint, match="missing required field `checksum`"):
        read_manifest(storage, STEP)


def reseal(folder: Path, text: bytes) -> None:
    """Put a manifest there and a mark that names it."""
    (folder / MANIFEST_FILE).write_bytes(text)
    mark = msgspec.json.decode((folder / COMMIT_FILE).read_bytes())
    stated = commit_of(msgspec.convert({**EMPTY, "step": mark["step"]}, Manifest), text)
    (folder / COMMIT_FILE).write_bytes(encode_commit(stated))


EMPTY = {
    "version": "", "run_id": "", "attempt": 1, "samples": 0, "time": 0.0, "world_size": 1, "layout": {}, "tensors": {},
    "files": {}, "state": {}, "ranks": [], "about": {},
}  # fmt: skip


def test_a_newer_format_is_refused_and_never_passed_over(storage: Storage, folder: Path) -> None:
    for step in (90, STEP):
        write_checkpoint(storage, step)
    mark = (folder / COMMIT_FILE).read_bytes()
    (folder / COMMIT_FILE).write_bytes(mark.replace(b"paceline.checkpoint/1", b"paceline.checkpoint/12"))
    for look in (lambda: quick(storage, STEP), lambda: verify(storage, STEP), lambda: newest_valid(storage, quick)):
        with pytest.raises(NoCheckpoint, match=r"paceline\.checkpoint/12, this version reads paceline\.checkpoint/1"):
            look()
    (folder / COMMIT_FILE).write_bytes(mark.replace(b"paceline.checkpoint/1", b"paceline.checkpoint/x"))
    assert [finding.file for finding in quick(storage, STEP)] == [COMMIT_FILE]


def test_a_newer_manifest_under_its_own_mark_is_refused(storage: Storage, folder: Path) -> None:
    write_checkpoint(storage, STEP)
    text = (folder / MANIFEST_FILE).read_bytes()
    reseal(folder, text.replace(b"paceline.checkpoint/1", b"paceline.checkpoint/2"))
    with pytest.raises(NoCheckpoint, match=r"format paceline\.checkpoint/2"):
        quick(storage, STEP)


@pytest.mark.parametrize(("name", "newer"), [("2", True), ("10", True), ("1", False), ("0", False), ("²", False)])
def test_what_a_newer_format_is(name: str, newer: bool) -> None:
    assert is_newer(f"paceline.checkpoint/{name}") is newer
    assert not is_newer(f"other/{name}") and not is_newer(None)


@pytest.mark.parametrize("inside", [True, False])
def test_a_link_in_place_of_a_file_is_named(storage: Storage, folder: Path, tmp_path: Path, inside: bool) -> None:
    write_checkpoint(storage, STEP)
    target = (folder.parent if inside else tmp_path) / "moved"
    (folder / FILE).rename(target)
    (folder / FILE).symlink_to(target)
    assert [(f.file, f.actual) for f in verify(storage, STEP)] == [(FILE, "a link")]
    assert [(f.file, f.actual) for f in verify_folder(str(folder))[0].findings] == [(FILE, "a link")]


def test_a_link_in_place_of_a_folder_is_named(storage: Storage, folder: Path, tmp_path: Path) -> None:
    write_checkpoint(storage, STEP)
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    assert [(f.file, f.actual) for f in verify(storage, STEP)] == [(FOLDER, "a link")]
    assert [f.actual for f in verify_folder(str(folder.parent))[0].findings] == ["a link"]


def unreadable(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on FILE cannot be read."""
    read = LocalStorage.read

    def broken(self: LocalStorage, name: str, begin: int = 0, end: int | None = None) -> bytes:
        if name.endswith(FILE):
            raise OSError(number, os.strerror(number), name)
        return read(self, name, begin, end)

    monkeypatch.setattr(LocalStorage, "read", broken)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_what_the_disk_cannot_give_back_is_damage(
    storage: Storage, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(storage, STEP)
    unreadable(number, monkeypatch)
    findings = verify(storage, STEP)
    assert {finding.file for finding in findings} == {FILE} and os.strerror(number) in findings[0].actual


def test_what_may_not_be_read_is_no_damage(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(storage, STEP)
    unreadable(errno.EACCES, monkeypatch)
    with pytest.raises(JobError, match="permission denied"):
        verify(storage, STEP)


def test_the_manifest_has_one_encoding(storage: Storage, folder: Path) -> None:
    manifest = write_checkpoint(storage, STEP)
    text = (folder / MANIFEST_FILE).read_bytes()
    assert text == encode_manifest(manifest)
    reseal(folder, text.replace(b'"attempt":1,', b'"attempt": 1,'))
    assert [finding.file for finding in quick(storage, STEP)] == [MANIFEST_FILE]


def test_verification_needs_no_torch() -> None:
    modules = ["verify", "folders", "storage", "storage_local", "storage_object", "header", "places"]
    code = "import sys\n" + "".join(f"import paceline.checkpoint.{name}\n" for name in modules)
    code += "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
