"""The plain final save: whole weights as safetensors with a manifest, in a directory that appears complete or not at all.

Written by one rank after the last step, read by `generate`. Nothing in it is a pickle: reading it cannot run code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import NoCheckpoint
from paceline.run.files import disk_full, is_no_space

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "paceline.weights/1"
WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def save_weights(
    checkpoints: Path, step: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]
) -> tuple[Path, int]:
    """Write the weights after `step` optimizer steps; returns the folder and its bytes.

    The folder is written under a temporary name, synced and renamed. One that is already there stays as it is: a step's
    checkpoint is never overwritten.

    Raises:
        DiskFull: no space; the half-written folder is removed.
    """
    from safetensors.torch import save_file

    folder = step_folder(checkpoints, step)
    if folder.exists():
        return folder, sum(f.stat().st_size for f in folder.iterdir())
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        weights = partial / WEIGHTS_FILE
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, weights)
        manifest = {
            "format": FORMAT,
            "step": step,
            **about,
            "files": {WEIGHTS_FILE: {"bytes": weights.stat().st_size, "sha256": _sha256(weights)}},
        }
        (partial / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (weights, partial / MANIFEST_FILE, partial):
            _sync(path)
        partial.rename(folder)
        _sync(checkpoints)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        # safetensors reports a full disk in words of its own.
        if (isinstance(error, OSError) and is_no_space(error)) or "No space left" in str(error):
            needed = sum(t.numel() * t.element_size() for t in tensors.values())
            raise disk_full(checkpoints, needed, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) from None
        raise
    return folder, sum(f.stat().st_size for f in folder.iterdir())


def read_manifest(run_dir: Path) -> tuple[Path, dict[str, Any]]:
    """The newest saved folder of a run and its manifest.

    Raises:
        NoCheckpoint: nothing was saved, or the newest save is damaged.
    """
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    if not folders:
        raise NoCheckpoint(
            f"{run_dir} holds no saved weights",
            values={"run_dir": str(run_dir)},
            hint="A run saves its weights when it ends: start the same `paceline train` again to finish it.",
        )
    folder = folders[-1]
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NoCheckpoint(f"{folder / MANIFEST_FILE} cannot be read: {error}", values={"path": str(folder)}) from None
    return folder, manifest


def load_weights(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a saved folder, after its checksum was compared.

    Raises:
        NoCheckpoint: a file is missing or its bytes are not those that were saved.
    """
    from safetensors.torch import load_file

    for name, wanted in manifest["files"].items():
        path = folder / name
        found = _sha256(path) if path.exists() else "missing"
        if found != wanted["sha256"]:
            raise NoCheckpoint(
                f"{path} is damaged: sha256 {wanted['sha256'][:16]} was saved, {found[:16]} is there",
                values={"path": str(path), "expected": wanted["sha256"], "actual": found},
            )
    tensors: dict[str, Tensor] = load_file(folder / WEIGHTS_FILE)
    return tensors


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
