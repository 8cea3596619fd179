"""Attempts of a real run inside the pool's ranks: the worker's own path, without the seconds of a command's start."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from paceline.checkpoint.places import find_one
from paceline.cluster.probe import Host
from paceline.job.load import load_job
from paceline.job.resolve import resolve_job
from paceline.run.records import read_records
from paceline.train import loop, shared_run, startup, worker
from paceline.train.session import Session
from paceline.workers.rendezvous import World
from tests.cli.job import SMALL, TEXT

HOST = Host("test", "cpu", 0, "cpu", 2**34, 4, 2**34, True, None)
STEPS = 12
WORDS = (
    *SMALL, "batch.global_batch=12", "data.eval_sequences=7", f"run.steps={STEPS}", "run.record_samples=true",
    "parallel.precision=fp32", "parallel.compile=false", "model.dropout=0.1", "data.workers=1", "checkpoint.every=end",
)  # fmt: skip


def attempt(rank: int, world_size: int, folder: Path, words: Sequence[str], stop: int | None = None) -> None:
    """One attempt of the run in `folder`, up to its end or (as if it had been told to) step `stop`."""
    with contextlib.chdir(folder), _stopped_at(stop), _in_a_hurry():
        if rank == 0:
            Path("text.txt").write_text(TEXT) if not Path("text.txt").exists() else None
        resolved = resolve_job(load_job(None, [*WORDS, *words]), world_size, HOST)
        store = dist.PrefixStore("attempt", dist.distributed_c10d._get_default_store())
        world = World(rank, rank, world_size, world_size, torch.device("cpu"), store)
        with shared_run._shared(lambda: shared_run.open_run(resolved), world) as directory:
            if directory.finished is None:
                worker._attempt(resolved, world, directory, time.time())


@contextlib.contextmanager
def _stopped_at(stop: int | None) -> Iterator[None]:
    """The learning rate still follows the whole run, and no record says that the run is done."""
    if stop is None:
        yield
        return
    whole = loop.train

    def train(session: Session, *rest: Any) -> loop.Outcome:
        session.steps = stop
        return whole(session, *rest)

    with mock.patch.object(loop, "train", train), mock.patch.object(worker, "_finish"):
        yield


@contextlib.contextmanager
def _in_a_hurry() -> Iterator[None]:
    """Without what takes a second and changes nothing: the matmul peak and the sample of text."""
    with (
        mock.patch.object(startup, "measured_peak", return_value=1e9),
        mock.patch.object(worker, "_sample", return_value="a sample"),
    ):
        yield


class Left(NamedTuple):
    """What a run left: by step its loss and norm and sample numbers; checksums of all pieces; verdicts of resumes."""

    curve: dict[int, tuple[float, float]]
    samples: dict[int, list[int]]
    tensors: dict[str, list[str]]
    state: dict[str, object]
    verdicts: list[str]


def left(run: Path) -> Left:
    """What is there to compare."""
    curve, samples, verdicts = {}, {}, []
    for record in read_records(run, kinds=("step", "samples", "certificate")):
        if record["kind"] == "step":
            assert record["step"] not in curve, f"step {record['step']} stands twice"
            curve[record["step"]] = (record["loss"], record["grad_norm"])
        elif record["kind"] == "samples":
            samples[record["step"]] = record["ids"]
        else:
            verdicts.append(record["verdict"])
    manifest = find_one(str(run)).manifest()
    tensors = {name: [p.checksum for p in t.pieces] for name, t in manifest.tensors.items()}
    return Left(curve, samples, tensors, {**manifest.state, "ranks": manifest.ranks}, verdicts)
