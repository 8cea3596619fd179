"""A plain safetensors file of whole tensors, read in parts, once its header has been checked. No torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from paceline.checkpoint.manifest import ELEMENT_BYTES
from paceline.errors import JobError

MOST_HEADER_BYTES = 100 * 10**6
"""What the safetensors library takes at most."""


class PlainTensor(NamedTuple):
    """A tensor in the file; `begin` counts from the file's first byte."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    size_bytes: int


class PlainFile:
    """The tensors of a file.

    Raises:
        JobError: it is not there, is no safetensors file, or its tensors do not lie end to end in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise JobError(f"cannot read {path}: {error.strerror}", values={"path": str(path)}) from None
        try:
            self.entries = self._header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, tensor: PlainTensor, begin: int, size: int) -> bytes:
        """Bytes of a tensor, from its `begin` on."""
        self._file.seek(tensor.begin + begin)
        data = self._file.read(size)
        if len(data) != size:
            raise self._bad(f"it ended while it was read, at byte {tensor.begin + begin + len(data)}")
        return data

    def _header(self) -> dict[str, PlainTensor]:
        size = self.path.stat().st_size
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
            raise self._bad(f"it has {size} bytes, and a header of {length}")
        try:
            fields = json.loads(self._file.read(length))
            fields.pop("__metadata__", None)
            entries = {name: _entry(field, 8 + length) for name, field in fields.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._bad(f"its header cannot be read: {error}") from None
        end = 8 + length
        for name, tensor in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].size_bytes)):
            if tensor.begin != end:
                raise self._bad(f"{name} begins at byte {tensor.begin}, not {end}")
            end += tensor.size_bytes
        if end != size:
            raise self._bad(f"it has {size} bytes where its header states {end}")
        return entries

    def _bad(self, reason: str) -> JobError:
        return JobError(
            f"{self.path} is no whole safetensors file: {reason}", values={"path": str(self.path), "reason": reason}
        )


def _entry(field: dict[str, Any], data_begin: int) -> PlainTensor:
    dtype, shape = field["dtype"], tuple(field["shape"])
    begin, end = field["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise ValueError(f"{field} has a number that is none")
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"type {dtype!r} is unknown")
    if end - begin != math.prod(shape) * ELEMENT_BYTES[dtype]:
        raise ValueError(f"{end - begin} bytes where {dtype} of shape {shape} needs others")
    return PlainTensor(dtype, shape, data_begin + begin, end - begin)
