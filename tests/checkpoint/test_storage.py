"""Storage: written once, durable, never out of its place."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import storage as storage_module
from paceline.checkpoint.storage import WRITE_SLICE_BYTES, Storage, explain, join, open_storage
from paceline.checkpoint.storage_local import LocalStorage
from paceline.errors import DiskFull, JobError, NoCheckpoint, PacelineError


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    place = tmp_path / "checkpoints" if request.param == "local" else f"memory://{tmp_path.name}/checkpoints"
    made = open_storage(place)
    made.make_folder("")
    return made


def test_what_is_written_is_read_back(storage: Storage) -> None:
    parts = [b"abc", bytearray(b"defg"), memoryview(b"hi")]
    storage.make_folder("step-00000001")
    storage.write("step-00000001/file", parts, 9)
    assert storage.read("step-00000001/file") == b"abcdefghi"
    assert storage.read("step-00000001/file", 2, 5) == b"cde"
    assert storage.read("step-00000001/file", 7, 100) == b"hi"
    assert storage.read("step-00000001/file", 20, 30) == b""
    assert storage.size("step-00000001/file") == 9
    assert storage.names() == ["step-00000001"] and storage.names("step-00000001") == ["file"]
    assert storage.kind("step-00000001") == "folder" and storage.kind("step-00000001/file") == "file"


def test_nothing_is_ever_overwritten(storage: Storage) -> None:
    storage.write("file", [b"old"], 3)
    with pytest.raises(FileExistsError):
        storage.write("file", [b"new"], 3)
    with pytest.raises(FileExistsError):
        storage.commit("file", b"new")
    assert storage.read("file") == b"old" and storage.names() == ["file"]


def test_every_change_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(
        storage_module, "on_operation", lambda operation, path: seen.append((operation, Path(path).name))
    )
    local = open_storage(tmp_path / "c")
    local.make_folder("")
    local.make_folder("step")
    local.commit("step/COMMIT", b"x")
    local.remove_folder("step")
    assert seen == [
        ("mkdir", "c"),
        ("sync", tmp_path.name),
        ("mkdir", "step"),
        ("sync", "c"),
        ("create", "COMMIT.tmp"),
        ("write", "COMMIT.tmp"),
        ("sync", "COMMIT.tmp"),
        ("rename", "COMMIT"),
        ("sync", "step"),
        ("sync", "c"),
        ("unlink", "COMMIT"),
        ("sync", "step"),
        ("unlink", "step"),
        ("sync", "c"),
    ]


def test_a_failed_write_leaves_no_half_file(storage: Storage) -> None:  # BL-43
    def parts() -> Iterator[bytes]:
        yield b"half"
        raise RuntimeError("the rest is gone")

    with pytest.raises(RuntimeError, match="the rest is gone"):
        storage.write("file", parts(), 8)
    for given in (3, 5):
        with pytest.raises(ValueError, match=f"4 bytes were given, {given} announced"):
            storage.write("file", [b"four"], given)
    assert storage.names() == []
    storage.write("file", [b"four"], 4)


def test_large_parts_are_written_in_slices_without_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(tmp_path)
    data = os.urandom(2 * WRITE_SLICE_BYTES + 5)
    writes = []
    monkeypatch.setattr(storage_module, "on_operation", lambda operation, path: writes.append(operation))
    tracemalloc.start()
    storage.write("file", [data, memoryview(data)[:7]], len(data) + 7)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert writes.count("write") == 4
    assert storage.read("file") == data + data[:7]


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, write = open_storage(tmp_path), os.write
    data = os.urandom(5000)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, view: write(handle, view[:999]))
        storage.write("file", [data], len(data))
    assert storage.read("file") == data


def test_a_mark_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    for index in range(6):
        storage, left = open_storage(tmp_path / str(index)), [index]
        storage.make_folder("")

        def kill(operation: str, path: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        monkeypatch.setattr(storage_module, "on_operation", kill)
        with contextlib.suppress(Killed):
            storage.commit("COMMIT", b"whole")
        monkeypatch.setattr(storage_module, "on_operation", None)
        assert storage.exists("COMMIT") == (index > 3)
        assert not storage.exists("COMMIT") or storage.read("COMMIT") == b"whole"


def test_folders_move_and_go(storage: Storage) -> None:
    storage.make_folder("a")
    storage.write("a/file", [b"x"], 1)
    storage.write("a/COMMIT", [b"y"], 1)
    storage.make_folder("b")
    storage.move_folder("a", "b/c")
    assert storage.names("b/c") == ["COMMIT", "file"] and not storage.names("a")
    storage.make_folder("a")
    storage.write("a/file", [b"x"], 1)
    with pytest.raises(FileExistsError):
        storage.move_folder("a", "b/c")
    storage.remove("b/c/file")
    assert storage.names("b/c") == ["COMMIT"]
    storage.remove_folder("b")
    assert not storage.exists("b")


def test_what_is_not_there(storage: Storage) -> None:
    assert not storage.exists("x") and storage.kind("x") is None and storage.size("x") is None
    assert storage.names("x") == []
    for missing in ("x", "x/y"):
        with pytest.raises(FileNotFoundError):
            storage.read(missing)
        with pytest.raises(FileNotFoundError):
            storage.read(missing, 2, 4)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "a//x", "./x", "a/", "a\0b", ".."])
def test_names_stay_in_their_place(storage: Storage, name: str) -> None:
    for use in (
        storage.read,
        storage.exists,
        storage.names,
        storage.make_folder,
        storage.remove,
        storage.remove_folder,
    ):
        with pytest.raises(JobError, match="not a name inside"):
            use(name)  # type: ignore[operator]
    with pytest.raises(JobError, match="not a name inside"):
        storage.write(name, [], 0)


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    outside, place = tmp_path / "outside", tmp_path / "place"
    outside.mkdir()
    (outside / "file").write_bytes(b"private")
    storage = open_storage(place)
    storage.make_folder("")
    (place / "folder").symlink_to(outside)
    (place / "link").symlink_to(outside / "file")
    for name in ("folder/file", "link"):
        with pytest.raises(NoCheckpoint, match="symbolic link") as error:
            storage.read(name)
        assert name in error.value.message and str(outside) in error.value.message
    with pytest.raises(JobError, match="symbolic link"):
        storage.write("folder/new", [b"x"], 1)
    assert storage.kind("folder") == storage.kind("link") == "link"
    storage.remove_folder("folder")
    storage.remove("link")
    assert storage.names() == [] and (outside / "file").read_bytes() == b"private"
    assert [path.name for path in outside.iterdir()] == ["file"]


def test_the_place_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "place").symlink_to(tmp_path / "scratch")
    storage = open_storage(tmp_path / "place")
    storage.write("file", [b"x"], 1)
    assert open_storage(f"file://{tmp_path}/scratch").read("file") == b"x"


def test_places_are_joined_for_messages() -> None:
    assert [join(place, "x/y") for place in ("a", "a/", "/", "s3://b/c", "s3://b/c/")] == [
        "a/x/y", "a/x/y", "/x/y", "s3://b/c/x/y", "s3://b/c/x/y",
    ]  # fmt: skip
    assert join("s3://b/c", "") == "s3://b/c"


def test_an_unknown_kind_of_place_is_refused() -> None:
    with pytest.raises(JobError, match="nosuch"):
        open_storage("nosuch://x/y")


# What goes wrong on real file systems (R9): each has its own words.


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small file system in memory."""
    if not sys.platform.startswith("linux") or shutil.which("mount") is None:
        pytest.skip("needs Linux's mount to make a small file system")
    folder.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, timeout=30
    )
    if made.returncode != 0:
        pytest.skip(f"may not mount a small file system: {made.stderr.strip()}")
    try:
        yield
    finally:
        unmount(folder)


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, timeout=30)


def explained(storage: Storage, name: str, size: int) -> PacelineError:
    """The error of writing `size` bytes, which must fail and leave nothing behind."""
    with pytest.raises(OSError) as error:
        storage.write(name, [bytes(size)], size)
    if storage.place.startswith("/"):
        assert not (Path(storage.place) / name).exists()
    return explain(error.value, storage, name, size)


def test_a_full_disk_is_named_with_what_is_needed_and_free(tmp_path: Path) -> None:  # R9, BL-43
    with mounted(tmp_path / "small", "size=1m"):
        storage = open_storage(tmp_path / "small")
        storage.write("good", [bytes(600_000)], 600_000)
        error = explained(storage, "big", 700_000)
        assert isinstance(error, DiskFull) and error.key == "checkpoint.dir"
        assert f"no space to write {tmp_path}/small/big of 684 KiB: 43" in error.message
        assert error.values["needed_bytes"] == 700_000 and 0 < error.values["free_bytes"] < 500_000
        assert storage.read("good") == bytes(600_000)


def test_no_inodes_is_not_called_a_full_disk(tmp_path: Path) -> None:  # R9
    with mounted(tmp_path / "small", "size=1m,nr_inodes=3"):
        storage = open_storage(tmp_path / "small")
        storage.write("a", [b"x"], 1)
        storage.write("b", [b"x"], 1)
        assert storage.free_files() == 0
        error = explained(storage, "c", 1)
        assert isinstance(error, DiskFull) and "no inodes left" in error.message and "KiB free" in error.message
        assert error.hint is not None and "df -i" in error.hint


def test_a_read_only_file_system_is_named(tmp_path: Path) -> None:  # R9
    with mounted(tmp_path / "small", "size=1m"):
        storage = open_storage(tmp_path / "small")
        storage.write("a", [b"x"], 1)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "small")], check=True, timeout=30)
        error = explained(storage, "b", 1)
        assert isinstance(error, JobError) and "read-only" in error.message and f"{tmp_path}/small/b" in error.message


@pytest.mark.parametrize("folder", ["", "checkpoints"])
def test_a_mount_that_vanished_is_named_and_not_written_beneath(tmp_path: Path, folder: str) -> None:  # R9
    with mounted(tmp_path / "small", "size=1m"):
        storage = open_storage(tmp_path / "small" / folder)
        storage.make_folder("")
        storage.make_folder("step-00000001")
        unmount(tmp_path / "small")
        error = explained(storage, "step-00000001/a", 1)
        assert isinstance(error, JobError) and "unmounted?" in error.message
        with pytest.raises(OSError) as caught:
            storage.make_folder("step-00000002")
        assert caught.value.errno == errno.ENODEV
        assert list((tmp_path / "small").iterdir()) == []


def test_a_place_that_is_mounted_again_goes_on(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "size=1m"):
        storage = open_storage(tmp_path / "small")
        storage.write("a", [b"x"], 1)
        unmount(tmp_path / "small")
        with mounted(tmp_path / "small", "size=1m"):
            storage.write("b", [b"x"], 1)


def test_a_folder_that_may_not_be_written_is_named() -> None:  # R9
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    storage = open_storage(folder)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.seteuid(65534)
        error = explained(storage, "a", 1)
    finally:
        if is_root:
            os.seteuid(0)
        folder.rmdir()
    assert isinstance(error, JobError) and "permission denied" in error.message and str(folder) in error.message


def test_a_file_size_limit_is_named(tmp_path: Path) -> None:  # BL-43: EFBIG counts as no space
    resource = pytest.importorskip("resource")
    storage = open_storage(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
        error = explained(storage, "big", 2**21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(error, DiskFull) and "ulimit -f" in error.message and "2.00 MiB" in error.message


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, DiskFull, "no space to write"),
        (errno.EDQUOT, DiskFull, "quota"),
        (errno.EFBIG, DiskFull, "larger than this process may write"),
        (errno.EROFS, JobError, "read-only"),
        (errno.EACCES, JobError, "permission denied"),
        (errno.ESTALE, JobError, "unmounted?"),
        (errno.EIO, JobError, "Input/output error"),
        (errno.ENAMETOOLONG, JobError, "File name too long"),
        (errno.EEXIST, JobError, "never overwritten"),
    ],
)
def test_each_cause_has_its_own_words(tmp_path: Path, number: int, kind: type[PacelineError], words: str) -> None:
    storage = open_storage(tmp_path)
    error = explain(OSError(number, os.strerror(number)), storage, "step-00000001/a", 12)
    assert type(error) is kind and words in error.message and f"{tmp_path}/step-00000001/a" in error.message
    assert error.hint and error.values["errno"] == number
    assert explain(error, storage, "other") is error


def test_room_is_asked_where_the_place_will_be(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "not" / "yet")
    volume = os.statvfs(tmp_path)
    free = storage.free_bytes()
    assert free is not None and abs(free - volume.f_bavail * volume.f_frsize) < 2**32
    assert not (tmp_path / "not").exists()


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: Any) -> None:
        raise OSError(number, os.strerror(number))

    storage = LocalStorage(str(tmp_path))
    monkeypatch.setattr(os, "fsync", fsync)
    number = errno.EINVAL
    storage.sync_folder("")
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        storage.sync_folder("")
