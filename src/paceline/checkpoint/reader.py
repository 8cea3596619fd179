"""Loading: the boxes that a rank holds, filled from whatever pieces hold them, under any layout.

Each piece that is touched is read whole, once, and its checksum compared before any of its elements is copied. One piece
is in memory at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from paceline.checkpoint.boxes import Box, Placement, overlap
from paceline.checkpoint.manifest import Manifest, Piece
from paceline.checkpoint.pieces import PieceReader
from paceline.checkpoint.placed import Placed
from paceline.checkpoint.storage import Storage
from paceline.errors import JobError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""torch's type by the name that safetensors gives it."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

NEVER_ALLOWED = "optimizer/"
"""Names that no pattern excuses: a moment left at zero trains on with the right gradient and a wrong step."""
SHOWN = 8


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        loaded: names that were filled.
        missing: names that the checkpoint lacks and a pattern allowed: left at their value.
        unexpected: names that only the checkpoint has and a pattern allowed: not read.
        pieces, bytes_read: read and verified.
    """

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    pieces: int
    bytes_read: int


def load_tensors(
    storage: Storage,
    manifest: Manifest,
    wanted: Sequence[Placed],
    *,
    allow_missing: Iterable[str] = (),
    allow_unexpected: Iterable[str] = (),
    elsewhere: Iterable[str] = (),
    folder: str | None = None,
) -> LoadReport:
    """Fill the tensors of `wanted` in place.

    Args:
        storage, manifest: the checkpoint.
        wanted: a name may stand several times, with several boxes.
        allow_missing, allow_unexpected: patterns (`model/head.*`) of names that may be on one side only. None of them
            excuses a name of the optimizer.
        elsewhere: names that other ranks want, where this one has a part of the model.
        folder: the checkpoint's folder in the storage; that of the manifest's step unless given.

    Raises:
        JobError: names, shapes or types differ; all differences are listed and nothing was filled.
        NoCheckpoint: a piece is damaged or missing, or the manifest contradicts itself. Tensors may be half filled.
    """
    reader = PieceReader(storage, manifest, folder)
    missing, unexpected = _compare(reader, wanted, set(elsewhere), tuple(allow_missing), tuple(allow_unexpected))
    present = [placed for placed in wanted if placed.name in manifest.tensors]
    _fill(reader, present)
    loaded = sorted({placed.name for placed in present})
    return LoadReport(loaded, missing, unexpected, reader.pieces_read, reader.bytes_read)


def read_whole(
    storage: Storage, manifest: Manifest, names: Iterable[str] | None = None, *, folder: str | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole tensors on the host, one at a time: all of them by name, or `names` in their order.

    Raises:
        JobError: a name is not in the checkpoint.
        NoCheckpoint: as `load_tensors`.
    """
    reader = PieceReader(storage, manifest, folder)
    for name in sorted(manifest.tensors) if names is None else names:
        if name not in manifest.tensors:
            raise JobError(f"{reader.where} holds no tensor {name}", values={"path": reader.where, "tensor": name})
        stored = reader.tensor(name)
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        box, shape = Placement.whole(stored.shape)
        _fill(reader, [Placed(name, tensor, box, shape)])
        yield name, tensor


def piece_tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A piece's bytes as a tensor on the host."""
    if not data:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).view(shape)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor on any device, row-major."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _fill(reader: PieceReader, wanted: Sequence[Placed]) -> None:
    """Copy into each box what the pieces hold of it, file by file in the order of their bytes."""
    by_name: dict[str, list[Placed]] = defaultdict(list)
    for placed in wanted:
        by_name[placed.name].append(placed)
    touched: list[tuple[str, Piece, list[Placed]]] = []
    for name, boxes in by_name.items():
        for piece in reader.tensor(name).pieces:
            there = Box(piece.offset, piece.shape)
            if takers := [placed for placed in boxes if overlap(there, placed.box)]:
                touched.append((name, piece, takers))
    for name, piece, takers in sorted(touched, key=lambda t: (t[1].file, t[1].begin)):
        source = piece_tensor(reader.read(name, piece), reader.manifest.tensors[name].dtype, piece.shape)
        for placed in takers:
            _copy(source, Box(piece.offset, piece.shape), placed)


@torch.no_grad()
def _copy(source: Tensor, there: Box, placed: Placed) -> None:
    shared = overlap(there, placed.box)
    if shared is not None:
        part = _narrow(placed.tensor.detach(), shared.in_second, shared.shape)
        part.copy_(_narrow(source, shared.in_first, shared.shape))


def _narrow(tensor: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(begin, begin + extent) for begin, extent in zip(offset, shape, strict=True))]


def _compare(
    reader: PieceReader,
    wanted: Sequence[Placed],
    elsewhere: set[str],
    allow_missing: tuple[str, ...],
    allow_unexpected: tuple[str, ...],
) -> tuple[list[str], list[str]]:
    """The names that are on one side only and may be: missing and unexpected ones, of all ranks."""
    names, stored = elsewhere | {placed.name for placed in wanted}, reader.manifest.tensors
    missing, left = _split(names - set(stored), allow_missing)
    unexpected, ignored = _split(set(stored) - names, allow_unexpected)
    different = [text for placed in wanted if placed.name in stored for text in _differences(reader, placed)]
    if missing or unexpected or different:
        raise _misfit(reader.where, missing, unexpected, list(dict.fromkeys(different)))
    return left, ignored


def _split(names: set[str], allowed: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Names that no pattern excuses, and those that one does."""
    excused = {
        name
        for name in names
        if not name.startswith(NEVER_ALLOWED) and any(fnmatchcase(name, pattern) for pattern in allowed)
    }
    return sorted(names - excused), sorted(excused)


def _differences(reader: PieceReader, placed: Placed) -> Iterator[str]:
    stored, tensor = reader.tensor(placed.name), placed.tensor
    if stored.shape != placed.shape:
        yield f"{placed.name} has shape {stored.shape} in the checkpoint and {placed.shape} in the model"
    if DTYPES[stored.dtype] != tensor.dtype:
        held = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
        yield f"{placed.name} is {stored.dtype} in the checkpoint and {held} in the model"
    ends = zip(placed.box.offset, placed.box.shape, placed.shape, strict=True)
    if tuple(tensor.shape) != placed.box.shape or any(o + n > s for o, n, s in ends):
        raise ValueError(
            f"{placed.name}: a tensor of shape {tuple(tensor.shape)} was placed at {placed.box} of {placed.shape}"
        )


def _misfit(where: str, missing: list[str], unexpected: list[str], different: list[str]) -> JobError:
    parts = []
    if missing:
        parts.append(f"missing from the checkpoint: {_few(missing)}")
    if unexpected:
        parts.append(f"only in the checkpoint: {_few(unexpected)}")
    if different:
        parts.append(_few(different))
    fixed = any(name.startswith(NEVER_ALLOWED) for name in (*missing, *unexpected))
    return JobError(
        f"{where} does not fit: {'; '.join(parts)}",
        values={"path": where, "missing": missing, "unexpected": unexpected, "different": different},
        hint="Take the job that wrote the checkpoint"
        + (
            "; the optimizer's state must be there in full."
            if fixed or different
            else ", or name what may differ with checkpoint.allow_missing or checkpoint.allow_unexpected."
        ),
    )


def _few(names: list[str]) -> str:
    rest = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")
