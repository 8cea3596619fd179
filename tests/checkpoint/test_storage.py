"""Storage: written once, durable, never out of its place."""

from pathlib import Path

import pytest

from paceline.checkpoint import storage as storage_module
from paceline.checkpoint.storage import Storage, open_storage


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
