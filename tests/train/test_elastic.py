"""How many ranks the next attempt has: asked for, or left out, as a policy without processes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.errors import PacelineError, Preempted, Stalled, WorkerFailed
from paceline.job.load import Job, load_job
from paceline.run.control import Control, ask_procs
from paceline.train.elastic import Ranks, resolve_nodes, resolve_range
from paceline.units import Procs, parse_procs
from paceline.workers.affinity import RankCpus
from paceline.workers.start import plan_here
from paceline.workers.watch import GroupResult
from tests.cli.job import SMALL
from tests.train.attempts import HOST

GPUS = msgspec.structs.replace(HOST, device_kind="cuda", devices=8, device_memory_bytes=2**36)


def ranks(folder: Path, procs: str = "2:4", *, without: bool = False, gpus: bool = False) -> tuple[Ranks, list[str]]:
    words = [*SMALL, "batch.global_batch=12", "parallel.compile=false", f"launch.procs_per_node={procs}"]
    said: list[str] = []
    host = GPUS if gpus else HOST
    sizes = resolve_range(load_job(None, words), host)
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"} if gpus else {}
    return Ranks(sizes, Control(folder), said.append, without_suspects=without, environment=visible), said


def ended(
    error: PacelineError, asked: str | None = None, rank: int | None = None, signal: int | None = None
) -> GroupResult:
    return GroupResult(error.exit_code, error, rank, None, {}, [], 1.0, signal, 5, 0.0, asked=asked)


def test_a_range_is_read_and_written_as_it_was() -> None:
    assert str(parse_procs("2:4")) == "2:4" and (parse_procs("2:4"), parse_procs("2:4").least) == (4, 2)
    assert str(parse_procs(3)) == f"{parse_procs(3)}" == "3" and Procs(3).least == 3
    for wrong in ("4:2", "0", "a:b", "2:", -1, True):
        with pytest.raises(ValueError, match=r"give 1 or more|write 2:4|neither a number"):
            parse_procs(wrong)


def test_asked_for_ranks_come_with_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.run.control.LOOK_SECONDS", 0.0)
    subject, said = ranks(tmp_path)
    assert subject.procs == 4 and subject.asked() is None
    ask_procs(tmp_path, 2)
    how = subject.asked()
    assert how == "control/procs = 2"
    assert subject.resized(ended(Preempted("saved"), how)) == "control/procs: 2 ranks instead of 4"
    assert subject.procs == 2 and subject.resolved.batch.accumulation * subject.resolved.batch.microbatch == 6
    assert not (tmp_path / "control" / "procs").exists() and said == []


def test_who_is_slow_is_left_out_with_its_device_or_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.run.control.LOOK_SECONDS", 0.0)
    for gpus in (True, False):
        subject, _ = ranks(tmp_path, gpus=gpus)
        subject.started([RankCpus((2 * rank, 2 * rank + 1), 2, True) for rank in range(4)])
        ask_procs(tmp_path, 3, without=1)
        how = subject.asked()
        assert how == "control/procs = 3 without 1"
        reason = subject.resized(ended(Preempted("saved"), how))
        assert reason == "control/procs: 3 ranks instead of 4, without rank 1" and subject.procs == 3
        assert subject.environment == ({"CUDA_VISIBLE_DEVICES": "4,6,7"} if gpus else {})
        assert subject.avoided_cpus == (frozenset() if gpus else {2, 3})
    # Who asks for more again may need them.
    ask_procs(tmp_path, 4)
    assert subject.resized(ended(Preempted("saved"), subject.asked())) and subject.avoided_cpus == frozenset()


def test_workers_are_kept_off_avoided_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.workers.affinity.allowed_cpus", lambda: (0, 1, 2, 3))
    monkeypatch.setattr("paceline.workers.affinity.cpu_quota", lambda: None)
    (alone,) = plan_here(1, avoided={1})
    assert alone.pinned and alone.cpus == (0, 2, 3)
    assert [one.cpus for one in plan_here(3, avoided={1})] == [(0,), (2,), (3,)]
    assert not plan_here(1, avoided={0, 1, 2, 3})[0].pinned, "nothing would be left"


def test_who_wants_to_stop_comes_before_who_wants_other_ranks(tmp_path: Path) -> None:
    subject, _ = ranks(tmp_path)
    ask_procs(tmp_path, 2)
    how = subject.asked()
    assert subject.resized(ended(Preempted("saved"), how, signal=15)) is None
    assert subject.procs == 4


@pytest.mark.parametrize(
    ("procs", "text", "why"),
    [("2:4", "5", "the range is 2:4"), ("2:4", "many", "the range is 2:4"), ("2:4", "4", "that many there are"),
     ("4", "2", "no range, such as --procs 1:4")],
)  # fmt: skip
def test_what_cannot_be_met_is_said_once(tmp_path: Path, procs: str, text: str, why: str) -> None:
    subject, said = ranks(tmp_path, procs)
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "procs").write_text(text)
    assert subject.asked() is None and subject.asked() is None
    assert len(said) == 1 and why in said[0] and repr(text) in said[0]


def test_a_rank_that_stalls_twice_is_left_out_with_its_device(tmp_path: Path) -> None:
    subject, _ = ranks(tmp_path, without=True, gpus=True)
    stall = Stalled("no progress", values={"ranks": [1]})
    assert not subject.without(ended(stall, rank=1))
    assert not subject.without(ended(Stalled("no progress"), rank=2))
    assert not subject.without(ended(WorkerFailed("rank 1 died"), rank=1)), "that is a crash, not a suspect"
    assert subject.without(ended(stall, rank=1)) == ["paceline: rank 1 stalled 2 times: 3 ranks instead of 4"]
    assert subject.procs == 3 and subject.environment == {"CUDA_VISIBLE_DEVICES": "4,6,7"}
    late = Stalled("did not join", key="recovery.start_timeout", values={"ranks": [2]})
    assert subject.without(ended(late)) == ["paceline: rank 2 did not start: 2 ranks instead of 3"]
    assert subject.environment == {"CUDA_VISIBLE_DEVICES": "4,6"}
    assert not subject.without(ended(late)), "the range ends there"


def test_no_rank_is_left_out_unless_the_job_says_so(tmp_path: Path) -> None:
    subject, _ = ranks(tmp_path)
    for _ in range(3):
        assert not subject.without(ended(Stalled("no progress"), rank=1))


def test_a_planned_layout_is_planned_for_each_number() -> None:
    words = [*SMALL, "launch.procs_per_node=1:2"]
    asked: list[tuple[int, int]] = []

    def planned(procs: int, nodes: int) -> Job:
        asked.append((procs, nodes))
        return load_job(None, [*words, f"parallel.tp={procs * nodes}", "parallel.layout=given"])

    job = load_job(None, [*words, "parallel.layout=auto"])
    found = resolve_range(job, HOST, planned)
    assert [one.layout.tp for one in found.values()] == [2, 1] and asked == [(2, 1), (1, 1)]
    several = [*SMALL, "launch.procs_per_node=1", "launch.nodes=1:2", "launch.rendezvous=a:1", "parallel.layout=auto"]
    hosts = resolve_nodes(load_job(None, several), 1, HOST, planned)
    assert [one.layout.tp for one in hosts.values()] == [2, 1] and asked[2:] == [(1, 2), (1, 1)]
