"""Whatever happens to a byte of a checkpoint is found and named. R6, R7."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoint import regions
from paceline.checkpoint.findings import Finding
from paceline.checkpoint.folders import newest_valid, step_folder
from paceline.checkpoint.manifest import COMMIT_FILE, MANIFEST_FILE, Manifest
from paceline.checkpoint.storage import Storage, open_storage
from paceline.checkpoint.verify import quick, verify
from paceline.errors import NoCheckpoint
from tests.checkpoint import small

STEP = 100
FOLDER = step_folder(STEP)
FILES = [f"rank-{rank:05d}.safetensors" for rank in range(3)]


@pytest.fixture
def seed() -> int:
    """Printed with a failure; set it here to repeat one."""
    number = random.SystemRandom().randrange(2**32)
    print(f"seed {number}")
    return number


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "checkpoints")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / FOLDER


def flips(
    folder: Path, manifest: Manifest, count: int, random_numbers: random.Random
) -> Iterator[tuple[str, int, int]]:
    """`count` single-bit flips (file, byte, bit): a fifth each in headers, padding, pieces, manifest and mark."""
    for index in range(count):
        kind = ("header", "padding", "pieces", MANIFEST_FILE, COMMIT_FILE)[index % 5]
        file = random_numbers.choice(FILES) if kind in ("header", "padding", "pieces") else kind
        data = (folder / file).read_bytes()
        begin, end = 0, len(data)
        if kind != file:
            header = manifest.files[file].header_bytes
            text = len(data[:header].rstrip(b" "))
            begin, end = {"header": (0, text), "padding": (text, header), "pieces": (header, end)}[kind]
        if begin < end:
            yield file, random_numbers.randrange(begin, end), random_numbers.randrange(8)


def flip(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def found(storage: Storage) -> list[Finding]:
    try:
        return verify(storage, STEP)
    except NoCheckpoint as error:  # a flip that turns the mark's format into that of a later version is refused
        return [Finding(COMMIT_FILE, "the format", str(error.values["reads"]), str(error.values["format"]))]


def check_flips(storage: Storage, folder: Path, count: int, random_numbers: random.Random) -> None:
    manifest = small.write_checkpoint(storage, STEP)
    assert verify(storage, STEP) == []
    done = 0
    for file, byte, bit in flips(folder, manifest, count, random_numbers):
        flip(folder / file, byte, bit)
        findings = found(storage)
        assert [finding.file for finding in findings] == [file], f"{file} byte {byte} bit {bit}: {findings}"
        check_named(manifest, findings[0], file, byte)
        flip(folder / file, byte, bit)
        done += 1
    assert done > count * 0.9
    assert verify(storage, STEP) == []


def check_named(manifest: Manifest, finding: Finding, file: str, byte: int) -> None:
    """The finding names the piece that the byte lies in, and what was expected and found."""
    assert finding.expected and finding.actual and finding.expected != finding.actual
    assert file in finding.describe()
    if file in FILES and byte >= manifest.files[file].header_bytes:
        piece = next(
            (name, piece)
            for name, tensor in manifest.tensors.items()
            for piece in tensor.pieces
            if piece.file == file and piece.begin <= byte < piece.end
        )
        assert (finding.tensor, finding.offset) == (piece[0], piece[1].offset)
        assert finding.expected == piece[1].checksum
    elif file in FILES:
        assert f"from byte {byte} on" in finding.what


def test_50_bit_flips_are_found_and_named(storage: Storage, folder: Path, seed: int) -> None:  # R6
    check_flips(storage, folder, 50, random.Random(seed))


@pytest.mark.soak
def test_1000_bit_flips_are_found_and_named(storage: Storage, folder: Path, seed: int) -> None:  # R6
    check_flips(storage, folder, 1000, random.Random(seed))


def check_damage(storage: Storage, folder: Path, count: int, random_numbers: random.Random) -> None:
    """`count` times: a file cut anywhere, emptied, lost, made longer, a stretch of zeros, or two files exchanged."""
    small.write_checkpoint(storage, STEP)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    for index in range(count):
        kind = ("cut", "emptied", "lost", "longer", "zeros", "exchanged")[index % 6]
        file = random_numbers.choice(sorted(whole))
        data, other = whole[file], random_numbers.choice([name for name in FILES if name != file])
        begin = random_numbers.randrange(len(data))
        changed = {
            "cut": {file: data[:begin]},
            "emptied": {file: b""},
            "lost": {file: None},
            "longer": {file: data + random_numbers.randbytes(1 + begin % 100)},
            "zeros": {file: data[:begin] + bytes(len(data) - begin)},
            "exchanged": {file: whole[other], other: data},
        }[kind]
        for name, content in changed.items():
            (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        named = {finding.file for finding in found(storage)}
        expected = {name for name, content in changed.items() if content != whole[name]}
        marks = expected & {MANIFEST_FILE, COMMIT_FILE}  # without them nothing can be said of the other
        assert named == (marks or expected), f"{kind} {changed.keys()} at byte {begin}: {named}"
        for name in changed:
            (folder / name).write_bytes(whole[name])
    assert verify(storage, STEP) == []


def test_50_cuts_losses_and_exchanges_are_found_and_named(storage: Storage, folder: Path, seed: int) -> None:  # R6
    check_damage(storage, folder, 50, random.Random(seed))


@pytest.mark.soak
def test_1000_cuts_losses_and_exchanges_are_found_and_named(storage: Storage, folder: Path, seed: int) -> None:  # R6
    check_damage(storage, folder, 1000, random.Random(seed))


def test_any_byte_of_the_smallest_files_is_answered_for(storage: Storage, folder: Path) -> None:
    manifest = small.write_checkpoint(storage, STEP)
    smallest = min(FILES, key=lambda file: manifest.files[file].size_bytes)
    for file in (smallest, COMMIT_FILE):
        for byte in range(0, (folder / file).stat().st_size, 4):
            flip(folder / file, byte, byte % 8)
            assert [finding.file for finding in found(storage)] == [file], f"{file} byte {byte}"
            flip(folder / file, byte, byte % 8)


class NoHash:
    """A checksum that sees nothing."""

    def update(self, data: object) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 32


def test_without_checksums_the_same_flips_go_unnoticed(
    storage: Storage, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # R7, the negative control of R6
    monkeypatch.setattr(small, "piece_checksum", lambda data: "0" * 32)
    monkeypatch.setattr("paceline.checkpoint.contradictions.piece_checksum", lambda data: "0" * 32)
    monkeypatch.setattr(regions, "piece_hasher", NoHash)
    manifest = small.write_checkpoint(storage, STEP)
    for file, byte, bit in flips(folder, manifest, 50, random.Random(seed)):
        flip(folder / file, byte, bit)
        findings = found(storage)
        flip(folder / file, byte, bit)
        assert bool(findings) == (file in (MANIFEST_FILE, COMMIT_FILE))


@pytest.mark.parametrize("file", [*FILES, MANIFEST_FILE, COMMIT_FILE])
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "appended"])
def test_a_file_that_is_cut_emptied_lost_or_longer_is_named(
    storage: Storage, folder: Path, seed: int, file: str, damage: str
) -> None:  # R6
    small.write_checkpoint(storage, STEP)
    path = folder / file
    data = path.read_bytes()
    cut = random.Random(seed).randrange(1, len(data))
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": data[:cut], "empty": b"", "appended": data + b"\0"}[damage])
    findings = verify(storage, STEP)
    assert findings and {finding.file for finding in findings} == {file}, findings
    assert [finding.file for finding in quick(storage, STEP)] == [file]
    if file in FILES and damage != "missing":
        assert findings[0].expected == f"{len(data)} bytes"
        assert findings[0].actual == f"{path.stat().st_size} bytes"
    if file in FILES and damage == "missing":
        assert findings[0].actual == "no such file" and f"{len(data)} bytes" in findings[0].expected


def test_a_truncated_file_names_the_first_piece_that_is_cut(storage: Storage, folder: Path) -> None:
    manifest = small.write_checkpoint(storage, STEP)
    last_two = sorted(
        (piece.begin, name, piece) for name, tensor in manifest.tensors.items() for piece in tensor.pieces
        if piece.file == FILES[0]
    )[-2:]  # fmt: skip
    path = folder / FILES[0]
    path.write_bytes(path.read_bytes()[: last_two[0][2].end - 1])
    length, cut, rest = verify(storage, STEP)
    assert length.what == "the length"
    assert (cut.tensor, cut.offset) == (last_two[0][1], last_two[0][2].offset)
    assert rest.actual == "2 cut off"


@pytest.mark.parametrize("first", FILES[:2])
def test_two_files_that_changed_places_are_both_named(storage: Storage, folder: Path, first: str) -> None:  # R6
    small.write_checkpoint(storage, STEP)
    a, b = (folder / first).read_bytes(), (folder / FILES[2]).read_bytes()
    (folder / first).write_bytes(b)
    (folder / FILES[2]).write_bytes(a)
    assert {finding.file for finding in verify(storage, STEP)} == {first, FILES[2]}


@pytest.mark.parametrize("file", [*FILES, MANIFEST_FILE, COMMIT_FILE])
def test_a_file_of_another_checkpoint_is_named(storage: Storage, tmp_path: Path, folder: Path, file: str) -> None:  # R7
    small.write_checkpoint(storage, STEP)
    small.write_checkpoint(open_storage(tmp_path / "other"), STEP, seed=1)
    shutil.copy(tmp_path / "other" / FOLDER / file, folder / file)
    findings = verify(storage, STEP)
    # A whole mark of another manifest looks the same as a whole manifest of another mark.
    assert {finding.file for finding in findings} <= ({file} if file in FILES else {COMMIT_FILE})
    assert findings and all(finding.expected != finding.actual for finding in findings)


def test_a_step_under_another_name_is_named(storage: Storage, tmp_path: Path) -> None:
    small.write_checkpoint(storage, STEP)
    (tmp_path / "checkpoints" / FOLDER).rename(tmp_path / "checkpoints" / step_folder(200))
    (finding,) = verify(storage, 200)
    assert (finding.file, finding.expected, finding.actual) == (COMMIT_FILE, "200", "100")


def test_files_that_do_not_belong_there_are_named(storage: Storage, folder: Path) -> None:
    small.write_checkpoint(storage, STEP)
    (folder / "rank-00003.safetensors").write_bytes(b"x")
    (folder / "more").mkdir()
    assert [(f.file, f.actual) for f in quick(storage, STEP)] == [
        ("more", "a folder"),
        ("rank-00003.safetensors", "a file"),
    ]


def test_a_checkpoint_that_is_damaged_is_passed_over_and_kept(storage: Storage, folder: Path) -> None:  # R6
    for step in (80, 90, STEP):
        small.write_checkpoint(storage, step)
    (folder / FILES[1]).unlink()
    (folder.parent / step_folder(90) / MANIFEST_FILE).write_bytes(b"{}")
    newest = newest_valid(storage, quick)
    assert newest.step == 80 and newest.manifest is not None and newest.manifest.step == 80
    assert [(passed.step, passed.reason.partition(":")[0]) for passed in newest.passed_over] == [
        (STEP, FILES[1]),
        (90, MANIFEST_FILE),
    ]
    assert sorted(path.name for path in folder.parent.iterdir()) == [step_folder(80), step_folder(90), FOLDER]
