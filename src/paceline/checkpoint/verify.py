"""Is a checkpoint what was written? `quick` looks at marks, manifest and lengths; `verify` answers for every byte. No torch.

The chain: COMMIT states the manifest's sha256; the manifest states each file's length and the checksum of its header, which
must be the very header that its pieces imply, and a checksum for each piece; pieces lie end to end from the header to the
end of the file, and tile every tensor. Nothing else may be in the folder.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from paceline.checkpoint.contradictions import contradictions
from paceline.checkpoint.findings import Finding
from paceline.checkpoint.folders import commit_in, list_steps, manifest_in, step_folder, step_of
from paceline.checkpoint.header import FilePiece, implied_header, pieces_by_file
from paceline.checkpoint.manifest import (
    COMMIT_FILE,
    MANIFEST_FILE,
    Manifest,
    StoredFile,
    commit_of,
    decode_manifest,
    is_newer,
)
from paceline.checkpoint.pieces import explained
from paceline.checkpoint.places import find_place
from paceline.checkpoint.regions import Region, Window, regions_of
from paceline.checkpoint.storage import Entry, Kind, Storage, join
from paceline.errors import NoCheckpoint

Progress = Callable[[int, int], None]
"""Called with the bytes read so far and those to be read in all."""

MISSING = "no such file"
REMOVED = "removed while it was verified"
DAMAGE = {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}
"""What a disk says of a file that it cannot give back."""


class Verified(msgspec.Struct, frozen=True):
    """The verdict on one folder. committed: whether it has its mark; without it, it is a save that did not finish."""

    path: str
    step: int | None
    committed: bool
    size_bytes: int
    findings: tuple[Finding, ...]


def quick(storage: Storage, step: int | None, folder: str | None = None) -> list[Finding]:
    """What is wrong with a step as far as can be seen without reading its pieces; nothing where it is as it should be.

    Args:
        folder: where the step's own name is not what its folder is called; "" for the storage's place itself.

    Raises:
        NoCheckpoint: it is of a newer format, which this version cannot judge.
        JobError: the storage refuses to be read.
    """
    name = step_folder(step) if folder is None and step is not None else folder or ""
    with explained(storage, name):
        return _Folder(storage, name, step).quick()


def verify(storage: Storage, step: int, progress: Progress | None = None) -> list[Finding]:
    """What is wrong with a step, by reading every byte of it. Raises as `quick` does."""
    with explained(storage, step_folder(step)):
        return _Folder(storage, step_folder(step), step).verify(progress)


def verify_folder(place: str, progress: Progress | None = None) -> list[Verified]:
    """Verify what is at a path or URL: one checkpoint, wherever it was copied, or all of a checkpoints folder or a run.

    Raises:
        NoCheckpoint: there is no checkpoint, or one of a newer format.
        JobError: the storage refuses to be read.
    """
    storage, is_step = find_place(place)
    own = step_of(place.rstrip("/").rpartition("/")[2])
    with explained(storage, ""):
        if is_step or own is not None:
            return _verify_all([_Folder(storage, "", own)], [own], progress)
        steps = sorted(step for step in map(step_of, storage.names()) if step is not None)
        committed = list_steps(storage)
        if not committed:
            raise NoCheckpoint(f"{storage.place} holds no checkpoint", values={"path": storage.place})
        folders = [_Folder(storage, step_folder(step), step) for step in steps]
        return _verify_all(folders, committed, progress)


def _verify_all(folders: list[_Folder], committed: Sequence[int | None], progress: Progress | None) -> list[Verified]:
    sizes = [folder.size_bytes() for folder in folders]
    verdicts, done = [], 0
    for folder, size in zip(folders, sizes, strict=True):
        ticks = None if progress is None else _shifted(progress, done, sum(sizes))
        is_whole = folder.step in committed
        findings = tuple(folder.verify(ticks)) if is_whole else ()
        if findings and len(folders) > 1 and folder.is_removed():
            continue  # the run that owns it goes on
        verdicts.append(Verified(folder.where, folder.step, is_whole, size, findings))
        done += size
    return verdicts


class _Folder:
    """One checkpoint's folder while it is looked at."""

    def __init__(self, storage: Storage, folder: str, step: int | None) -> None:
        self.storage = storage
        self.folder = folder
        self.step = step
        self.where = join(storage.place, folder)
        is_link = bool(folder) and not storage.is_remote and storage.kind(folder) == "link"
        self.entries: dict[str, Entry] | None = None if is_link else storage.entries(folder)

    def quick(self) -> list[Finding]:
        manifest, findings = self.opened()
        if manifest is not None:
            findings = self.listing(manifest, pieces_by_file(manifest))
        return self.unless_removed(findings)

    def verify(self, progress: Progress | None) -> list[Finding]:
        manifest, findings = self.opened()
        if manifest is None:
            return self.unless_removed(findings)
        by_file = pieces_by_file(manifest)
        findings = [*self.listing(manifest, by_file), *contradictions(manifest, by_file)]
        total, done = self.size_bytes(), 0
        for file, stored in manifest.files.items():
            if self.kind(file) == "file":
                ticks = None if progress is None else _shifted(progress, done, total)
                findings += self.content(file, stored, by_file[file], ticks)
                done += stored.size_bytes
        if progress is not None:
            progress(total, total)
        return self.unless_removed(findings)

    def opened(self) -> tuple[Manifest | None, list[Finding]]:
        """The manifest, unless it or the mark is not what it should be."""
        if self.entries is None:
            return None, [Finding(self.folder, "the folder", "a folder", "a link")]
        for file in (COMMIT_FILE, MANIFEST_FILE):
            if self.kind(file) != "file":
                return None, [Finding(file, "the file", "a file", self.kind(file) or MISSING)]
        commit = None
        try:
            commit = commit_in(self.storage, self.folder, self.step)
            self.step = commit.step
            manifest = manifest_in(self.storage, self.folder, commit)
        except NoCheckpoint as error:
            if is_newer(error.values.get("format")):
                raise
            expected, actual = (str(error.values.get(key, "")) for key in ("expected", "actual"))
            if commit is not None and self.manifest_proves_itself():
                return None, [Finding(COMMIT_FILE, "the manifest it names", actual, expected)]
            file = COMMIT_FILE if commit is None else MANIFEST_FILE
            return None, [Finding(file, "the content", expected or "as it was written", actual or error.message)]
        except OSError as error:
            if not self.is_damage(error):
                raise
            file = COMMIT_FILE if commit is None else MANIFEST_FILE
            return None, [Finding(file, "the content", "to be readable", str(error))]
        outside = [
            file for file in manifest.files if "/" in file or file in ("", ".", "..", COMMIT_FILE, MANIFEST_FILE)
        ]
        findings = [Finding(MANIFEST_FILE, "the name of a file", "one in this folder", repr(file)) for file in outside]
        return None if findings else manifest, findings

    def unless_removed(self, findings: list[Finding]) -> list[Finding]:
        """What was found, or that alone: that the folder is gone."""
        return [Finding(self.folder, "the folder", "to stay", REMOVED)] if findings and self.is_removed() else findings

    def is_removed(self) -> bool:
        """Whether the mark has gone since the folder was opened: a run that lives deletes the mark before all else."""
        return self.kind(COMMIT_FILE) is not None and not self.storage.exists(self.name(COMMIT_FILE))

    def manifest_proves_itself(self) -> bool:
        """Whether the manifest is whole by its own digest: then it is the mark that was changed."""
        try:
            data = self.storage.read(self.name(MANIFEST_FILE))
            stated = msgspec.json.decode(data, type=Manifest)
            decode_manifest(data, commit_of(stated, data), self.where)
        except (msgspec.DecodeError, UnicodeDecodeError, NoCheckpoint, FileNotFoundError):
            return False
        return True

    def listing(self, manifest: Manifest, by_file: Mapping[str, Sequence[FilePiece]]) -> list[Finding]:
        """Files that are missing, too long or short, links, or not of this checkpoint."""
        findings = []
        for file, stored in manifest.files.items():
            kind, expected = self.kind(file), f"{stored.size_bytes} bytes"
            if kind != "file":
                expected = f"{expected} with {len(by_file[file])} pieces"
                findings.append(Finding(file, "the file", expected, f"a {kind}" if kind else MISSING))
            elif (size := self.size(file)) != stored.size_bytes:
                findings.append(Finding(file, "the length", expected, f"{size} bytes"))
        known = {COMMIT_FILE, MANIFEST_FILE, *manifest.files}
        unknown = [name for name in self.entries or () if name not in known]
        return findings + [Finding(name, "the file", "none of this name", f"a {self.kind(name)}") for name in unknown]

    def content(
        self, file: str, stored: StoredFile, pieces: Sequence[FilePiece], progress: Progress | None
    ) -> Iterator[Finding]:
        """Regions of a file whose bytes are not those that were written."""
        size = self.size(file)
        window, cut = Window(self.storage, self.name(file), size), 0
        for region in regions_of(stored, pieces):
            if region.end > size:
                cut += 1
                if cut == 1 or region.tensor is None:
                    actual = f"the file ends at byte {size}"
                    yield _damage(file, "the end", region, f"bytes {region.begin} to {region.end}", actual)
                continue
            try:
                found = window.checksum(region.begin, region.end)
            except OSError as error:
                if not self.is_damage(error):
                    raise
                yield _damage(file, "the content", region, "to be readable", str(error))
                continue
            if found != region.checksum:
                if region.tensor is None:
                    what = f"the header{window.first_difference(implied_header(pieces, stored.header_bytes))}"
                else:
                    what = f"the checksum of bytes {region.begin} to {region.end}"
                yield _damage(file, what, region, region.checksum, found)
            if progress is not None:
                progress(region.end, 0)
        if cut > 1:
            yield Finding(file, "the pieces", "all to be there", f"{cut} cut off")

    def is_damage(self, error: OSError) -> bool:
        """Whether a failed read speaks of the file, not of the way to it."""
        return error.errno == errno.ENOENT or (error.errno in DAMAGE and not self.storage.is_remote)

    def kind(self, file: str) -> Kind | None:
        return self.entries[file].kind if self.entries and file in self.entries else None

    def size(self, file: str) -> int:
        return self.entries[file].size if self.entries and file in self.entries else 0

    def name(self, file: str) -> str:
        return f"{self.folder}/{file}" if self.folder else file

    def size_bytes(self) -> int:
        return sum(entry.size for entry in (self.entries or {}).values())


def _damage(file: str, what: str, region: Region, expected: str, actual: str) -> Finding:
    return Finding(file, what, expected, actual, region.tensor, region.offset)


def _shifted(progress: Progress, begin: int, total: int) -> Progress:
    return lambda done, _: progress(min(total, begin + done), total)


__all__ = ["Finding", "Progress", "Verified", "quick", "verify", "verify_folder"]
