"""Where text comes from: the documents of each kind of source, in a fixed order. Imports no numpy and no torch.

A source gives pieces of text. One JSONL line, Parquet row or Hugging Face row is one piece and one document. A text
file is one document, given in pieces of about 32 KiB cut at line ends, so that any length of file can be streamed and
a part of a single file can be held out.
"""

from __future__ import annotations

import glob
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.config import nearest
from paceline.data.config import Source
from paceline.errors import DataError

STDLIB = "stdlib"
HUGGING_FACE = "hf:"
DEFAULT_TEXT_KEY = "text"
PIECE_CHARACTERS = 32 * 1024
_LINE_LIMIT = 1024 * 1024
_NOT_SOURCE = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
_NOT_SOURCE |= {"ensurepip", "pydoc_data"}
_JSONL = (".jsonl", ".ndjson")
_PARQUET = ".parquet"


class Piece(NamedTuple):
    """Some text, and whether it goes on where the piece before it ended."""

    text: str
    continues: bool


@dataclass(frozen=True)
class OpenSource:
    """A source whose files are known.

    Attributes:
        name: as the job names it.
        key: the job key that names it.
        files: in reading order; empty for Hugging Face data sets.
        text_key: field of keyed rows.
        weight: relative share of the samples, or None.
    """

    name: str
    key: str
    files: tuple[Path, ...]
    text_key: str
    weight: float | None = None

    @property
    def is_keyed(self) -> bool:
        """Whether rows have fields, so that a text key has an effect."""
        return not self.files or any(f.suffix == _PARQUET or f.suffix in _JSONL for f in self.files)

    @property
    def size_bytes(self) -> int | None:
        """Bytes of the files, or None where they are not known."""
        return sum(f.stat().st_size for f in self.files) if self.files else None

    def identity(self) -> list[str]:
        """What changes when the text may have changed: names, sizes and times of the files."""
        if self.name == STDLIB:
            return [STDLIB, sys.version, str(_stdlib_folder())]
        stats = [(f, f.stat()) for f in self.files]
        return [self.name, *(f"{f.absolute()}:{s.st_size}:{s.st_mtime_ns}" for f, s in stats), self.text_key]

    def pieces(self) -> Iterator[Piece]:
        """The text, always in the same order.

        Raises:
            DataError: a file is not readable, is no text, or a row lacks the text key.
        """
        if not self.files:
            yield from _hugging_face_pieces(self)
        for file in self.files:
            try:
                yield from self._file_pieces(file)
            except OSError as error:
                raise _unreadable(self.key, file, error.strerror or str(error)) from None

    def _file_pieces(self, file: Path) -> Iterator[Piece]:
        if file.suffix in _JSONL:
            return _jsonl_pieces(self, file)
        if file.suffix == _PARQUET:
            return _parquet_pieces(self, file)
        return _text_pieces(self, file)


def open_source(source: Source, key: str, text_key: str | None) -> OpenSource:
    """Find the files of a source.

    Args:
        source: the source as the job names it.
        key: the job key that names it, for messages.
        text_key: `data.text_key`, where the source has none of its own.

    Raises:
        DataError: no such file; the text names the nearest one there is. Or a text key that has no effect.
    """
    wanted = source.text_key or text_key
    files = _files(source.source, key)
    opened = OpenSource(source.source, key, files, wanted or DEFAULT_TEXT_KEY, source.weight)
    if source.text_key and not opened.is_keyed:
        raise DataError(
            f"text_key = {source.text_key!r} has no effect on {source.source}: plain text has no fields",
            key=key,
            hint="Leave text_key out; it is for .jsonl, .parquet and hf: sources.",
        )
    return opened


def _files(name: str, key: str) -> tuple[Path, ...]:
    if name == STDLIB:
        return _stdlib_files()
    if name.startswith(HUGGING_FACE):
        return ()
    path = Path(name).expanduser()
    if path.is_file():
        return (path,)
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.is_file() and not _hidden(p.relative_to(path))]
    else:
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = [Path(p) for p in matches if Path(p).is_file()]
    if not found:
        raise _missing(path, key)
    return tuple(found)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _stdlib_files() -> tuple[Path, ...]:
    root = _stdlib_folder()
    found: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(n for n in inner if n not in _NOT_SOURCE and not n.startswith("config-"))
        found += [Path(folder) / n for n in sorted(names) if n.endswith(".py")]
    if not found:
        raise DataError(
            f"this Python has no standard library source at {root}",
            key="data.source",
            hint="Set data.source to a text file, a folder or a glob.",
        )
    return tuple(found)


def _text_pieces(source: OpenSource, file: Path) -> Iterator[Piece]:
    errors = "replace" if source.name == STDLIB else "strict"
    with file.open(encoding="utf-8", newline="", errors=errors) as stream:
        continues = False
        try:
            while text := stream.read(PIECE_CHARACTERS) + stream.readline(_LINE_LIMIT):
                if "\0" in text and source.name != STDLIB:
                    raise _unreadable(source.key, file, "it holds NUL bytes, so it is no text")
                yield Piece(text, continues)
                continues = True
        except UnicodeDecodeError as error:
            raise _unreadable(source.key, file, f"it is not UTF-8 text ({error.reason})") from None


def _jsonl_pieces(source: OpenSource, file: Path) -> Iterator[Piece]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise _unreadable(source.key, file, f"line {number} is not JSON: {error}") from None
            text = _field(source, row, f"{file}, line {number}")
            if text:
                yield Piece(text, False)


def _parquet_pieces(source: OpenSource, file: Path) -> Iterator[Piece]:
    parquet = _pyarrow_parquet(source.key, file)
    try:
        table = parquet.ParquetFile(file)
    except Exception as error:  # pyarrow's own errors, whatever they are in its version
        raise _unreadable(source.key, file, f"it is not Parquet ({error})") from None
    if source.text_key not in table.schema_arrow.names:
        raise _no_field(source, table.schema_arrow.names, str(file))
    for batch in table.iter_batches(batch_size=1024, columns=[source.text_key]):
        for text in batch.column(0).to_pylist():
            if checked := _text_of(source, text, str(file)):
                yield Piece(checked, False)


def _hugging_face_pieces(source: OpenSource) -> Iterator[Piece]:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{source.name} needs the datasets package, which is not installed",
            key=source.key,
            hint="pip install 'paceline[datasets]'",
        ) from None
    name, _, split = source.name.removeprefix(HUGGING_FACE).partition("#")
    name, _, config = name.partition("@")
    try:
        rows = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # the library raises many kinds: network, names, configurations
        raise DataError(
            f"cannot load {source.name}: {error}", key=source.key, hint="Write hf:<dataset>[@config][#split]."
        ) from None
    for number, row in enumerate(rows):
        if text := _field(source, row, f"{source.name}, row {number}"):
            yield Piece(text, False)


def _pyarrow_parquet(key: str, file: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{file} needs the pyarrow package, which is not installed", key=key, hint="pip install 'paceline[parquet]'"
        ) from None
    return pyarrow.parquet


def _field(source: OpenSource, row: Any, place: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{place}: {type(row).__name__} instead of an object with fields", key=source.key)
    if source.text_key not in row:
        raise _no_field(source, list(row), place)
    return _text_of(source, row[source.text_key], place)


def _text_of(source: OpenSource, value: Any, place: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"{place}: field {source.text_key!r} holds {type(value).__name__}, not text",
            key="data.text_key",
            values={"text_key": source.text_key},
        )
    return value


def _no_field(source: OpenSource, names: list[str], place: str) -> DataError:
    near = nearest(source.text_key, names)
    listed = ", ".join(names[:8]) or "none"
    return DataError(
        f"{place}: no field {source.text_key!r}; there are {listed}",
        key="data.text_key",
        values={"text_key": source.text_key, "fields": names},
        hint=f"Set data.text_key = {near or (names[0] if names else 'the field that holds the text')}.",
    )


def _missing(path: Path, key: str) -> DataError:
    if nearest(str(path), [STDLIB]):
        hint = f"Did you mean {STDLIB}?"
    elif path.is_dir():
        hint = "The folder is empty; give one that holds .txt, .jsonl or .parquet files."
    elif path.parent.is_dir():
        near = nearest(path.name, (p.name for p in path.parent.iterdir()))
        hint = f"Did you mean {path.parent / near}?" if near else f"List what is there: ls {path.parent}"
    else:
        hint = f"There is no folder {path.parent} either; paths start at {Path.cwd()}."
    what = "matches no file" if glob.has_magic(str(path)) else "there is no file or folder"
    verb = f"{path} {what}" if glob.has_magic(str(path)) else f"{what} {path}"
    return DataError(verb, key=key, values={"path": str(path)}, hint=hint)


def _unreadable(key: str, file: Path, reason: str) -> DataError:
    return DataError(
        f"cannot read {file}: {reason}",
        key=key,
        values={"path": str(file)},
        hint="Mend or remove the file, or narrow the source with a glob such as data/*.txt.",
    )
