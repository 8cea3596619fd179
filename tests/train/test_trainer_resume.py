"""A user's script that is stopped and started again: the same numbers, in the pool's ranks."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import trainer as trainers
from paceline.checkpoint.convert import convert
from paceline.checkpoint.places import find_one
from paceline.errors import JobError
from paceline.train.keep import Keeper
from paceline.train.state import TrainingState
from tests.checkpoint.savers import hooked
from tests.pool.pool import Pool, RankFailed
from tests.train.attempts import left, said, world_of, writing_by

CPU = torch.device("cpu")
STEPS, SAVED, LEFT_AT = 8, 4, 6


class Counted(nn.Module):
    """Puts a new tensor in its buffer's place at each pass, with numbers that are this rank's own, and counts passes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().sum(0)[:3]
        self.passes += 1
        return x + 1e-3 * self.seen.sum() + 1e-3 * (self.passes % 5)

    def get_extra_state(self) -> dict[str, int]:
        return {"passes": self.passes}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Opaque(nn.Linear):
    """Has a state that only pickle would take."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(2)


class Net(nn.Module):
    """Batch norm, dropout, a buffer that is put anew, and an embedding that is also the head."""

    def __init__(self, first: str = "first") -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)), Counted()])
        self.add_module(first, nn.Linear(6, 6))
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.embedding.weight
        self._first = first

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.get_submodule(self._first)(x))
        return out


def item(index: int) -> dict[str, Any]:
    return {"inputs": np.int64(index * 7 % 8), "label": np.int64(index % 8)}


def noisy_forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Draws from every generator that there is."""
    out: Tensor = model(batch["inputs"])
    return out * (1 + 0.1 * random.random()) + 0.1 * float(np.random.normal())


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total = nn.functional.cross_entropy(output, batch["label"], reduction="sum")
    return total, torch.tensor(float(len(output)))


class Stream:
    """Endless, another one on each rank; says where it is if `tells`."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at, self.reads = rank, 0, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            found = item(self.at * 3 + self.rank)
            self.at += 1
            self.reads += 1
            yield found


class TellingStream(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class OpaqueStream(TellingStream):
    def state_dict(self) -> dict[str, Any]:
        return {"at": {1, 2}}


class ShortStream(Stream):
    """Ends after four steps of one process."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return itertools.islice(super().__iter__(), 4 * 12)


class Ran(NamedTuple):
    """What a rank had at the end of its attempt."""

    buffers: dict[str, list[float]]
    scratch: list[float]
    is_tied: bool
    reads: int


STREAMS = {"": None, "stream": Stream, "telling": TellingStream, "opaque": OpaqueStream, "short": ShortStream}


def script(
    rank: int,
    world_size: int,
    run: Path,
    stream: str = "",
    stop: int | None = None,
    first: str = "first",
    seed: int = 0,
    writer: Sequence[str] = (),
    **more: Any,
) -> Ran:
    """One start of the script. `stop`: it is left there, as if killed. `seed`: of its own generators."""
    for seed_it in (torch.manual_seed, random.seed, np.random.seed):
        seed_it(10 * seed + rank)
    kind = STREAMS[stream]
    data: Any = [item(i) for i in range(48)] if kind is None else kind(rank)
    model = Net(first)
    if rank == 0:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
    layout = more.pop("layout", "auto")
    with _in_pool(rank, world_size), writing_by(writer):
        trainer = paceline.Trainer(
            model, loss, forward=noisy_forward, data=data, global_batch=12, run=run, workers=0, layout=layout,
            optimizer={"lr": 0.05, "warmup_steps": 0}, checkpoint={"every": SAVED} | more,
        )  # fmt: skip
        steps = trainer.steps(STEPS)
        for step in steps:
            if step.step == stop:
                break
        steps.close()
    buffers = {name: buffer.flatten().tolist() for name, buffer in model.named_buffers() if "scratch" not in name}
    scratch = model.layers[1].get_buffer("scratch").tolist()
    return Ran(buffers, scratch, model.head.weight is model.embedding.weight, getattr(data, "reads", 0))


@contextlib.contextmanager
def _in_pool(rank: int, world_size: int) -> Iterator[None]:
    """The pool's process group in the place of one that the script joins; saves are waited for."""
    save = Keeper.save

    def save_and_wait(keeper: Keeper, *rest: Any) -> None:
        save(keeper, *rest)
        keeper._wait(rest[0])

    world = world_of(rank, world_size)
    with mock.patch.object(trainers, "_world", world), mock.patch.object(Keeper, "save", save_and_wait):
        yield


def scripts(rank: int, world_size: int, calls: list[dict[str, Any]]) -> list[Ran]:
    return [script(rank, world_size, **call) for call in calls]


KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "two": (2, {}),
    "two, sharded": (2, {"layout": {"dp_shard": 2}}),
    "two, stream": (2, {"stream": "stream"}),
    "two, stream that tells": (2, {"stream": "telling"}),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.limit(90)
def test_a_script_started_again_goes_on_as_if_it_had_not_ended(pool: Pool, tmp_path: Path, name: str) -> None:
    # BL-35, BL-66, BL-67: dropout and other draws, batch statistics and buffers of each rank's own, tied weights.
    ranks, options = KINDS[name]
    straight, broken = {"run": tmp_path / "straight", **options}, {"run": tmp_path / "broken", **options}
    found = pool.run(scripts, ranks, [straight, {**broken, "stop": LEFT_AT}, {**broken, "seed": 1}], timeout=80)
    whole, resumed = left(tmp_path / "straight"), left(tmp_path / "broken")
    assert list(whole.curve) == list(range(1, STEPS + 1))
    assert resumed.curve == whole.curve and resumed.tensors == whole.tensors and resumed.state == whole.state
    assert [r["step"] for r in said(tmp_path / "broken", "run_started")] == [0, SAVED]
    for first, before, second in found:
        assert second.buffers == first.buffers and second.scratch == [0.0, 0.0]
        assert all(ran.is_tied for ran in (first, before, second)) or "sharded" in name
        assert before.buffers != first.buffers
    names = {n for n in whole.tensors if not n.startswith("optimizer/")}
    assert names == {
        *(f"model/{n}" for n in ("embedding.weight", "first.weight", "first.bias", "layers.0.0.weight", "layers.0.0.bias",
                                 "layers.0.1.weight", "layers.0.1.bias")),
        *(f"buffer/{rank}/layers.{n}" for rank in range(ranks)
          for n in ("0.1.running_mean", "0.1.running_var", "0.1.num_batches_tracked", "1.seen")),
    }  # fmt: skip
    if ranks == 2:
        assert found[0][0].buffers != found[1][0].buffers
    per_rank = 12 // ranks
    if name == "two, stream":
        assert [ran.reads for ran in found[0]] == [STEPS * per_rank, LEFT_AT * per_rank, STEPS * per_rank]
    if name == "two, stream that tells":
        assert [ran.reads for ran in found[0]] == [STEPS * per_rank, LEFT_AT * per_rank, (STEPS - SAVED) * per_rank]


def test_streams_of_other_ranks_are_refused_before_training(pool: Pool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pool.run(scripts, 2, [{"run": run, "stream": "stream", "stop": LEFT_AT}], timeout=40)
    with pytest.raises(RankFailed) as failed:
        pool.run(scripts, 1, [{"run": run, "stream": "stream"}], timeout=40)
    error = failed.value.exception
    assert isinstance(error, JobError) and "saved by 2 ranks: 1 cannot go on" in error.message
    assert [r["step"] for r in said(run, "step")] == list(range(1, LEFT_AT + 1))
    with pytest.raises(RankFailed) as failed:
        pool.run(scripts, 2, [{"run": tmp_path / "other", "stream": "opaque"}], timeout=40)
    assert "is not plain JSON" in str(failed.value.exception) and said(tmp_path / "other", "step") == []


def test_a_renamed_layer_is_one_missing_and_one_unexpected_name(pool: Pool, tmp_path: Path) -> None:  # BL-49
    run = tmp_path / "run"
    pool.run(scripts, 2, [{"run": run, "stop": LEFT_AT}], timeout=40)
    with pytest.raises(RankFailed) as failed:
        pool.run(scripts, 2, [{"run": run, "first": "renamed"}], timeout=40)
    error = failed.value.exception
    assert isinstance(error, JobError) and len(failed.value.tracebacks) == 2
    moments = ("exp_avg", "exp_avg_sq")
    for which, name in (("missing", "renamed"), ("unexpected", "first")):
        assert set(error.values[which]) == {
            f"{kind}{name}.{part}" for part in ("weight", "bias")
            for kind in ("model/", *(f"optimizer/{m}/" for m in moments))
        }  # fmt: skip
        assert f"model/{name}.weight" in error.message
    # Weights alone may be fitted in, by name.
    convert(str(run), str(tmp_path / "weights"), weights_only=True)
    allowed = {"allow_missing": ["model/renamed.*"], "allow_unexpected": ["model/first.*"]}
    more = {"run": tmp_path / "fitted", "first": "renamed", "resume": str(tmp_path / "weights"), **allowed}
    pool.run(scripts, 1, [more], timeout=40)
    assert "model/renamed.weight" in find_one(str(tmp_path / "fitted")).manifest().tensors


def test_buffers_of_fewer_ranks_go_round(pool: Pool, tmp_path: Path) -> None:
    # What rank 2 of 3 begins with is what rank 0 of 2 had.
    run = tmp_path / "run"
    pool.run(scripts, 2, [{"run": run, "stop": LEFT_AT}], timeout=40)
    found = [ran for (ran,) in pool.run(scripts, 3, [{"run": run, "stop": 5}], timeout=40)]
    assert len({str(ran.buffers) for ran in found}) == 3
    assert [r["step"] for r in said(run, "run_started")] == [0, SAVED]


def test_a_stream_that_ends_at_a_failed_save_is_saved_once_more(pool: Pool, tmp_path: Path) -> None:
    # The stream ends after step 4, whose periodic save found no space; the run is not done before its state is safe.
    pool.run(scripts, 1, [{"run": tmp_path, "stream": "short", "every": 2, "writer": hooked("fail-odd")}], timeout=40)
    states = [(r["state"], r["step"]) for r in said(tmp_path, "checkpoint") if r["state"] in ("durable", "failed")]
    assert states == [("durable", 2), ("failed", 4), ("durable", 4)]
    assert [r["exit"] for r in said(tmp_path, "run_finished")] == [0]


def test_extra_state_that_json_has_not_is_refused_before_training() -> None:
    model = nn.Sequential(Opaque(2, 2))
    with pytest.raises(JobError, match=r"the extra state of module .0. \(Tensor\) is nothing that JSON has"):
        TrainingState(model, mock.Mock(parameters=[]), torch.optim.SGD(model.parameters()), None, rank=0, device=CPU)
