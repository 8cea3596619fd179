"""`torch.distributed.checkpoint` on this format: its planner and resharding, our files, manifest, commit and checksums.

    dcp.load(state_dict, storage_reader=ManifestReader("runs/tiny"))
    dcp.save(state_dict, storage_writer=ManifestWriter("checkpoints", step=100))

Keys of the state dict are the names of the checkpoint's tensors; `prefix="model/"` spares writing it before each. What is
no tensor is refused by name: that library would pickle it. Only programs that use these classes pay for importing the
planner (1.1 s); training reads and writes without it (`reader.py`, `plan.py`).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from paceline import __version__
from paceline.checkpoint.boxes import Box
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.piece_file import (
    NewPiece,
    WrittenFile,
    begin_step,
    commit_step,
    cut,
    file_name,
    tensors_of,
    write_piece_file,
)
from paceline.checkpoint.pieces import PieceReader
from paceline.checkpoint.places import find_one
from paceline.checkpoint.reader import DTYPE_NAMES, DTYPES, piece_tensor, tensor_bytes
from paceline.checkpoint.storage import open_storage
from paceline.errors import JobError

Place = str | os.PathLike[str]


class ManifestReader(StorageReader):
    """Reads a checkpoint for `dcp.load`: each piece that is touched is verified before an element of it is copied.

    Args:
        place: a step's folder, or a checkpoints folder or run directory, whose newest checkpoint is taken; or a URL.
        prefix: read the names that begin with it, under their rest.

    Raises (inside the `CheckpointException` of the library):
        NoCheckpoint: there is none, or what is needed of it is damaged.
        JobError: a type differs, or an item is no tensor.
    """

    def __init__(self, place: Place, prefix: str = "") -> None:
        self.place = os.fspath(place)
        self.prefix = prefix
        self._pieces: PieceReader | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        return True

    def reset(self, checkpoint_id: Place | None = None) -> None:
        if checkpoint_id is not None:
            self.place = os.fspath(checkpoint_id)
        self._pieces = None

    @property
    def manifest(self) -> Manifest:
        """Of the checkpoint that is read: its step and everything that is no tensor."""
        return self._reader.manifest

    @property
    def _reader(self) -> PieceReader:
        if self._pieces is None:
            found = find_one(self.place)
            self._pieces = PieceReader(found.storage, found.manifest(), found.folder)
        return self._pieces

    def read_metadata(self) -> Metadata:
        named = {
            name.removeprefix(self.prefix): self._reader.tensor(name)
            for name in self.manifest.tensors
            if name.startswith(self.prefix)
        }
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=DTYPES[stored.dtype]),
                    torch.Size(stored.shape),
                    [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.shape)) for p in stored.pieces],
                )
                for key, stored in named.items()
            },
            planner_data={key: (key,) for key in named},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        pickled = [item.dest_index.fqn for item in plan.items if item.type == LoadItemType.BYTE_IO]
        if pickled:
            raise _no_tensors(pickled, "read")
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items: dict[tuple[str, tuple[int, ...]], list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[item.storage_index.fqn, tuple(item.storage_index.offset or ())].append(item)
        for (key, offset), readers in items.items():
            self._read_piece(self.prefix + key, offset, readers, planner)
        return _done(None)

    @torch.no_grad()
    def _read_piece(self, name: str, offset: tuple[int, ...], items: list[ReadItem], planner: LoadPlanner) -> None:
        stored = self._reader.tensor(name)
        piece = next(p for p in stored.pieces if p.offset == offset and 0 not in p.shape)
        source = piece_tensor(self._reader.read(name, piece), stored.dtype, piece.shape)
        for item in items:
            target = planner.resolve_tensor(item).detach()
            if target.dtype != source.dtype:
                raise JobError(
                    f"{name} is {stored.dtype} in the checkpoint and {target.dtype} in the state dict",
                    values={"tensor": name, "stored": stored.dtype, "wanted": str(target.dtype)},
                    hint="Convert it first: `paceline checkpoint convert PATH --to PLACE --weights-only --dtype ...`.",
                )
            begins = zip(item.storage_offsets, item.lengths, strict=True)
            target.copy_(source[tuple(slice(begin, begin + extent) for begin, extent in begins)])
            planner.commit_tensor(item, target)


class ManifestWriter(StorageWriter):
    """Writes a checkpoint for `dcp.save`: a file per rank, then manifest and commit mark on the coordinator.

    Args:
        place: a checkpoints folder or a URL; the checkpoint is `step-<step>` in it. Ranks must see the same one.
        step, samples: optimizer steps done and samples consumed.
        prefix: put before each name of the state dict.
        state, about: what is no tensor, as JSON has it.

    Raises (inside the `CheckpointException` of the library):
        JobError: the step is there already, or an item is no tensor.
        DiskFull and other errors of the storage.
    """

    def __init__(
        self,
        place: Place,
        *,
        step: int,
        samples: int = 0,
        prefix: str = "",
        state: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.step = step
        self.samples = samples
        self.prefix = prefix
        self.state = dict(state or {})
        self.about = dict(about or {})
        self.reset(place)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Place) -> bool:
        return True

    def reset(self, checkpoint_id: Place | None = None) -> None:
        if checkpoint_id is not None:
            self.storage = open_storage(os.fspath(checkpoint_id))

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self.coordinates = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        pickled = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if pickled:
            raise _no_tensors(pickled, "written")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        folder = begin_step(self.storage, self.step)
        return [
            SavePlan(plan.items, (folder, file_name(rank)), plan.planner_data, plan.usable)
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        items = {piece: item for item in plan.items for piece in cut(self._piece(item))}
        folder, file = plan.storage_data

        def content(piece: NewPiece) -> memoryview:
            item = items[piece]
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)  # what is not was refused with the plan
            if not piece.box.shape:
                return tensor_bytes(tensor)
            first = piece.box.offset[0] - self._piece(item).box.offset[0]
            return tensor_bytes(tensor[first : first + piece.box.shape[0]])

        if not items:
            return _done([])
        written = write_piece_file(self.storage, folder, file, items, content)
        return _done([WriteResult(plan.items[0].index, written.file.size_bytes, written)])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: list[WrittenFile] = [result.storage_data for rank in results for result in rank]
        manifest = Manifest(
            version=__version__,
            run_id="",
            attempt=0,
            step=self.step,
            samples=self.samples,
            time=time.time(),
            world_size=len(results),
            layout={},
            tensors=tensors_of(files),
            files={written.name: written.file for written in files},
            state=self.state,
            ranks=[{} for _ in results],
            about=self.about,
        )
        commit_step(self.storage, manifest)

    def _piece(self, item: WriteItem) -> NewPiece:
        data = item.tensor_data
        assert data is not None  # BYTE_IO was refused with the plan
        dtype = DTYPE_NAMES.get(data.properties.dtype)
        if dtype is None:
            raise JobError(
                f"{item.index.fqn} is {data.properties.dtype}, which safetensors has no name for",
                values={"tensor": item.index.fqn, "dtype": str(data.properties.dtype)},
                hint="Leave it out of the state dict, or save it in another type.",
            )
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        return NewPiece(self.prefix + item.index.fqn, dtype, tuple(data.size), box)


def _no_tensors(names: list[str], done: str) -> JobError:
    return JobError(
        f"not a tensor, so not {done} (it would be pickled, and reading a pickle can run code): {', '.join(names)}",
        values={"names": names},
        hint="Leave it out of the state dict; ManifestWriter(state=...) stores JSON beside the tensors.",
    )


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
