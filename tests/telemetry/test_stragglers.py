"""Slow ranks are named from their own work, though all ranks' steps take equally long."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.parallel.layout import Layout
from paceline.run.records import RecordWriter, Straggler, Summary, Window
from paceline.telemetry import straggler_watch
from paceline.telemetry.straggler_watch import StragglerWatch
from paceline.telemetry.stragglers import THRESHOLD, Finding, find, score, work_of
from paceline.train.stragglers import alike, described

STEPS = 10


def summary(seconds: float, count: int = STEPS, longest: float | None = None) -> Summary:
    """Of `count` steps that took `seconds` each, one of them `longest`."""
    longest = seconds if longest is None else longest
    return Summary(count=count, sum=seconds * (count - 1) + longest, min=seconds, max=longest, worst_step=1)


def window(rank: int, parts: dict[str, float], last: int = 20, **more: Any) -> Window:
    return Window(
        step=last, first_step=last - STEPS + 1, rank=rank, host=f"host{rank}",
        parts={name: summary(seconds) for name, seconds in parts.items()}, **more,
    )  # fmt: skip


def works(*by_rank: dict[str, float], **more: Any) -> dict[int, Any]:
    return {rank: work_of(msgspec.to_builtins(window(rank, parts, **more))) for rank, parts in enumerate(by_rank)}


def rank_parts(compute: float, waits: float, data: float = 0.001, records: float = 0.0005) -> dict[str, float]:
    return {
        "data_wait": data, "forward": compute / 3, "backward": compute / 2, "optimizer": compute / 6,
        "reduce_exposed": waits, "telemetry": records,
    }  # fmt: skip


def found_in(windows: list[dict[int, Any]], ranks: int = 2) -> list[Finding]:
    return find(windows, [list(range(ranks))])


# R17: measured by hand on two ranks, the second with half a CPU: own work 14.1 and 24.1 ms, steps of 34 ms on both.
def test_half_a_cpu_is_named_though_steps_take_equally_long() -> None:
    two = [works(rank_parts(0.0141, 0.0194, 0.0, 0.0), rank_parts(0.0241, 0.0042, 0.0, 0.0))] * 2
    (found,) = found_in(two)
    assert (found.rank, found.host, found.cause) == (1, "host1", "compute")
    assert found.score == pytest.approx(14.1 / 24.1) and found.score < THRESHOLD
    assert score(0, [0, 1], two[0]) > 1


# R18
def test_slow_data_is_told_from_slow_computation() -> None:
    (found,) = found_in([works(rank_parts(0.02, 0.03), rank_parts(0.02, 0.001, data=0.03))] * 2)
    assert (found.rank, found.cause) == (1, "data")
    (found,) = found_in([works(rank_parts(0.02, 0.03), rank_parts(0.02, 0.001, records=0.03))] * 2)
    assert (found.rank, found.cause) == (1, "storage")


# R17: as seen under `cp`: the slow rank stands still in exchanges, and both seem to wait 80 ms for the other.
def test_a_rank_that_stands_still_in_an_exchange_is_slow_and_not_its_link() -> None:
    def both(held: float | None) -> dict[int, Any]:
        parts = rank_parts(0.0287, 0.08, 0.0, 0.0)
        facts = ({"held_back_seconds": None if held is None else held * STEPS}, {"held_back_seconds": 0.0})
        return {r: work_of(msgspec.to_builtins(window(r, parts, **facts[r]))) for r in (0, 1)}

    sound = works(*[rank_parts(0.0287, 0.0115, 0.0, 0.0)] * 2)
    (found,) = found_in([sound, sound, both(None), both(None)])
    assert found.cause == "link"
    (found,) = found_in([sound, sound, both(0.075), both(0.075)])
    assert (found.rank, found.cause) == (0, "compute") and found.score == pytest.approx(28.7 / 75)
    assert "a CPU quota holds it back for 75.0 ms of a step" in found.evidence
    # No longer than the step lasts, and nothing that own work shows already.
    assert both(1.0)[0].total == pytest.approx(0.1087) and both(1.0)[0].waits == pytest.approx(0.0)
    assert both(0.02)[0].total == pytest.approx(0.0287)


def test_waits_inside_of_forward_and_backward_are_no_work() -> None:
    """Ranks that exchange within a pass: both take 60 ms for it, of which the quick one waits 40."""

    def rank(waits: float) -> dict[str, Any]:
        own = {"forward": summary(0.06 - waits)}
        return {"parts": {"forward": 0.06}, "own": own}

    def found(*waits: float) -> list[Finding]:
        told = {}
        for at, seconds in enumerate(waits):
            of = rank(seconds)
            told[at] = work_of(msgspec.to_builtins(window(at, of["parts"], own=of["own"])))
        return found_in([told, told], len(waits))

    assert found(0.0, 0.0) == [] and found(0.04, 0.04) == []
    (slow,) = found(0.04, 0.0)
    assert (slow.rank, slow.cause) == (1, "compute") and slow.score == pytest.approx(1 / 3)
    assert "own work of a step 60.0 ms, its peers' 20.0 ms" in slow.evidence and "they 40.0 ms" in slow.evidence


def test_one_window_is_no_evidence_and_one_long_step_is_none() -> None:
    sound, slow = (
        works(rank_parts(0.02, 0.03), rank_parts(0.02, 0.03)),
        works(rank_parts(0.02, 0.03), rank_parts(0.05, 0.0)),
    )
    assert found_in([slow]) == [] and found_in([sound, slow]) == [] and found_in([slow, sound]) == []
    hiccup = {
        rank: work_of({"rank": rank, "parts": {"forward": msgspec.to_builtins(summary(0.02, longest=longest))}})
        for rank, longest in enumerate((0.02, 3.0))
    }
    assert found_in([hiccup, hiccup]) == []


def test_sound_ranks_that_differ_by_a_tenth_raise_no_alarm() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    drawn = random.Random(seed)
    windows = [works(*(rank_parts(drawn.uniform(0.9, 1.1) * 0.02, 0.005) for _ in range(4))) for _ in range(300)]
    assert all(found_in(windows[: at + 1], 4) == [] for at in range(len(windows)))


def test_stages_of_a_pipeline_are_compared_with_their_like() -> None:
    layout = Layout(dp_replicate=2, pp=2)
    groups = alike(layout)
    assert sorted(map(sorted, groups)) == [[0, 1], [2, 3]] or sorted(map(sorted, groups)) == [[0, 2], [1, 3]]
    stage_of = {rank: layout.coordinates(rank)["pp"] for rank in range(4)}
    # The second stage has twice the work by its cut; that is no straggler.
    uneven = works(*(rank_parts(0.02 * (1 + stage_of[rank]), 0.01) for rank in range(4)))
    assert find([uneven, uneven], groups) == []
    slow = next(rank for rank in range(4) if stage_of[rank] == 1)
    uneven[slow] = works(*[rank_parts(0.09, 0.001)] * (slow + 1))[slow]
    (found,) = find([uneven, uneven], groups)
    assert found.rank == slow
    assert found_in([works(rank_parts(0.5, 0.0))] * 2, 1) == []


# R16
def test_a_slow_link_is_named_by_the_connections_that_are_slow_while_busy() -> None:
    def ring(slow: int | None) -> dict[int, Any]:
        waits = 0.004 if slow is None else 0.2
        found = {}
        for rank in range(3):
            after = (rank + 1) % 3
            busy = 0.15 if slow in (rank, after) else 0.004
            links = {f"10.0.0.{after}": [4e6, busy * STEPS]}
            parts = {n: summary(s) for n, s in rank_parts(0.02, waits).items()}
            one = Window(
                step=20,
                first_step=11,
                rank=rank,
                host=f"host{rank}",
                parts=parts,
                address=f"10.0.0.{rank}",
                links=links,
            )
            found[rank] = work_of(msgspec.to_builtins(one))
        return found

    (found,) = found_in([ring(None), ring(1), ring(1)], 3)
    assert (found.rank, found.host, found.cause) == (1, "host1", "link")
    assert found.score == pytest.approx(0.004 / 0.2)
    assert found_in([ring(None)] * 3, 3) == [] and found_in([ring(1)] * 3, 3) == []
    # One quick window among many says nothing of the others.
    assert found_in([ring(1), ring(1), ring(None), ring(1), ring(1), ring(1)], 3) == []


def test_a_slow_network_on_one_host_names_no_rank() -> None:
    (found,) = found_in([works(rank_parts(0.02, w), rank_parts(0.02, w)) for w in (0.004, 0.3, 0.3)])
    assert (found.rank, found.cause) == (None, "link")


def test_a_rank_that_begins_to_seem_slow_is_waited_for_before_a_link_is_told() -> None:
    sound, mixed, slow = (
        works(rank_parts(0.02, waits), rank_parts(own, waits))
        for own, waits in ((0.02, 0.004), (0.025, 0.3), (0.08, 0.3))
    )
    assert [one.cause for one in found_in([sound, sound, mixed, mixed])] == ["link"]
    assert found_in([sound, sound, mixed, slow]) == []
    (found,) = found_in([sound, sound, mixed, slow, slow])
    assert (found.rank, found.cause) == (1, "compute")
    (found,) = found_in([sound, sound, slow, mixed])
    assert (found.rank, found.cause) == (None, "link")


def test_the_watch_reads_windows_as_they_are_written_and_tells_each_straggler_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Straggler] = []
    # One that comes and goes is told again after 4 windows, then not for 8.
    monkeypatch.setattr(straggler_watch, "QUIET_WINDOWS", 4)
    watch = StragglerWatch(tmp_path, 1, [[0, 1]], told.append)
    with RecordWriter(tmp_path, 1, name="rank0") as one, RecordWriter(tmp_path, 1, name="rank1") as two:
        # The first window warms up: however slow a rank is in it, it does not count.
        slow, sound = 0.05, 0.02
        course = [slow, slow, slow, sound, slow, slow, sound, slow, slow]
        for last, own in zip(range(10, 110, 10), (0.09, *course), strict=True):
            one.write(window(0, rank_parts(0.02, 0.03), last))
            watch.look()
            two.write(window(1, rank_parts(own, 0.001), last))
            watch.look()
            assert len(told) == (0 if last < 30 else 1 if last < 70 else 2)
    assert [(t.rank, t.cause, t.step) for t in told] == [(1, "compute", 30), (1, "compute", 70)]
    assert told[0].ratio == pytest.approx((0.05 + 0.0015) / (0.02 + 0.0015))
    assert "rank 1 on host1 is slow for its compute" in described(told[0])


def test_a_torn_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    told: list[Straggler] = []
    watch = StragglerWatch(tmp_path, 1, [[0, 1]], told.append)
    for rank, compute in enumerate((0.02, 0.05)):
        with RecordWriter(tmp_path, 1, name=f"rank{rank}") as writer:
            for last in (10, 20, 30):
                writer.write(window(rank, rank_parts(compute, 0.01), last))
    torn = tmp_path / "records" / "attempt-0001-rank1.jsonl"
    data = torn.read_bytes()
    torn.write_bytes(data[:-20])
    watch.look()
    assert told == []
    torn.write_bytes(data)
    watch.look()
    assert len(told) == 1
