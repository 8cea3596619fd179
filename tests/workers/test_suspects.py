"""From looks at all ranks to the one that holds up the others: looks that are written down here."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.workers import screen, suspects
from paceline.workers.recorder import Entry, Seen
from paceline.workers.sample import Connection, Helper, Sample
from paceline.workers.suspects import RankView, Snapshot

RANKS = (0, 1, 2)
IN_COLLECTIVE = """Thread 0x02 (most recent call first):
  File "/x/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/u/job.py", line 40 in step
"""
IN_JOB = """Thread 0x02 (most recent call first):
  File "/home/u/job.py", line 33 in forward
  File "/home/u/job.py", line 39 in step
"""
IDLE_LOADER = """Thread 0x01 (most recent call first):
  File "/p/src/paceline/data/channel.py", line 60 in wait_for
  File "/p/src/paceline/data/worker.py", line 55 in main
"""
STUCK_LOADER = """Thread 0x01 (most recent call first):
  File "/home/u/dataset.py", line 12 in read_volume
  File "/p/src/paceline/data/worker.py", line 90 in _make
"""


def history(steps: int, last: tuple[str, str, str] | None = None, *, running: bool = False) -> Seen:
    """Steps of two collectives, and one more."""
    made, numbers = [], {"world": 0, "loss": 0}
    wanted = [("world", "all_reduce", "[[4000]]"), ("loss", "all_reduce", "[[2]]")] * steps
    for group, op, sizes in [*wanted, *([last] if last else [])]:
        numbers[group] += 1
        made.append(Entry(group, numbers[group], op, sizes, False))
    if running:
        made[-1] = made[-1]._replace(running=True)
    return Seen(tuple(made), {"world": RANKS, "loss": RANKS})


WAITS = history(4, ("world", "all_reduce", "[[4000]]"), running=True)
"""In the fifth collective of the first group."""


def view(rank: int, **changes: Any) -> RankView:
    base = RankView(
        rank, 4, "training step", "step", 3.0, False, Sample(100 + rank, "S", "S", 1.0, 1.0, "futex_do_wait"), 0.1,
        IN_COLLECTIVE, WAITS,
    )  # fmt: skip
    return base._replace(**changes)


def snapshot(*changed: RankView, before: tuple[RankView, ...] | None = None, seconds: float = 1.0) -> Snapshot:
    """Three ranks, those that are not given in the fifth collective; the look before shows the same unless given."""
    ranks = {rank: view(rank) for rank in RANKS} | {one.rank: one for one in changed}
    return Snapshot("vm", ranks, ranks | {one.rank: one for one in before or ()}, seconds)


def asleep(rank: int, **changes: Any) -> RankView:
    return view(rank, stack=IN_JOB, seen=history(4), **changes)


def test_a_stopped_process_comes_before_all_else() -> None:
    stopped = view(1, sample=Sample(101, "T", "T"), seen=None, stack="", pulse_age=3.0)
    found = suspects.find(snapshot(stopped, asleep(2)))
    assert (found.kind, found.ranks, found.doubt) == ("stopped", (1,), "none")
    assert found.waits_for is not None and found.waits_for.number == 5 and found.waiting == (0, 2)
    assert "its process 101 is stopped" in found.said


def test_a_rank_that_enters_no_collective_is_named_with_its_line_and_what_the_others_wait_in() -> None:
    seen = snapshot(asleep(2))
    found = suspects.find(seen)
    assert (found.kind, found.ranks, found.doubt, found.waiting) == ("missing-collective", (2,), "asleep", (0, 1))
    text = screen.screen(found, seen, 2.5, 3)
    for words in (
        "rank 2 of 3 on vm: missing-collective",
        "job.py:33 in forward",
        "all_reduce number 5 (sizes [[4000]])",
    ):
        assert words in text
    assert len(text.splitlines()) <= 20
    error = screen.stalled(found, seen, 2.5)
    assert error.exit_code == 76 and error.values["fault"] == "missing-collective" and error.values["rank"] == 2
    evidence = screen.evidence(found, seen)
    assert evidence.startswith("rank 2:") and evidence.count("training step") == 3


def test_a_rank_that_went_on_to_the_next_collective_skipped_one_and_that_is_certain() -> None:
    gone_on = view(1, seen=history(4, ("loss", "all_reduce", "[[2]]"), running=True))
    found = suspects.find(snapshot(gone_on))
    assert (found.kind, found.ranks, found.doubt) == ("missing-collective", (1,), "none")
    assert "waits in all_reduce number 5 (sizes [[2]]) in group loss instead" in found.said


def test_of_two_ranks_the_one_that_breaks_its_own_habit_skipped() -> None:
    ranks = {0: view(0), 1: view(1, seen=history(4, ("loss", "all_reduce", "[[2]]"), running=True))}
    ranks = {
        r: v._replace(seen=v.seen and v.seen._replace(members={"world": (0, 1), "loss": (0, 1)}))
        for r, v in ranks.items()
    }
    assert suspects.find(Snapshot("vm", ranks, ranks, 1.0)).ranks == (1,)


@pytest.mark.parametrize("other", [("world", "all_gather", "[[4000]]"), ("world", "all_reduce", "[[100]]")])
def test_another_operation_or_size_under_the_same_number_is_a_mismatch(other: tuple[str, str, str]) -> None:
    found = suspects.find(snapshot(view(0, seen=history(4, other, running=True))))
    assert (found.kind, found.ranks, found.doubt, found.waiting) == ("mismatched-collective", (0,), "none", (1, 2))
    assert other[1] in found.said and other[2] in found.said
    # Of two ranks nobody has the majority: its own habit tells.
    two = {0: history(4, other, running=True), 1: WAITS}
    pair = suspects.mismatch_at_end(two, [], certain=False)
    assert pair is not None and pair.ranks == (0,)


def test_gathers_of_any_size_are_no_mismatch() -> None:
    uneven = {rank: history(4, ("world", "all_gather", f"[[{rank}]]"), running=True) for rank in RANKS}
    assert suspects.mismatch_at_end(uneven, [], certain=False) is None


def test_an_aborted_rank_of_which_nothing_is_known_is_to_blame_where_the_others_kept_their_habit() -> None:
    others = {0: WAITS, 2: WAITS}
    assert suspects.mismatch_at_end(others, [1], certain=False) is None
    found = suspects.mismatch_at_end(others, [1], certain=True)
    assert found is not None and found.ranks == (1,)


def test_a_silent_pulse_is_a_held_lock() -> None:
    idle = asleep(1, pulse_age=3.0)._replace(seen=None)
    found = suspects.find(snapshot(idle))
    assert (found.kind, found.ranks, found.doubt) == ("gil", (1,), "asleep") and "process is idle" in found.said
    burns = idle._replace(sample=Sample(101, "R", "R", 2.0, 2.0))
    found = suspects.find(snapshot(burns, before=(idle,)))
    assert (found.kind, found.doubt) == ("gil", "busy") and "100% of a processor" in found.said


def test_work_without_an_end_spins_and_work_that_moves_is_slow() -> None:
    before = asleep(1)
    busy = before._replace(sample=Sample(101, "R", "R", 2.0, 2.0))
    assert suspects.find(snapshot(busy, before=(before,)))[:3] == ("spinning", (1,), "busy")
    # With many ranks on few processors it gets little of one, and is still no rank that sleeps.
    starved = before._replace(sample=Sample(101, "R", "R", 1.15, 1.15))
    assert suspects.find(snapshot(starved, before=(before,)))[:3] == ("spinning", (1,), "busy")
    elsewhere = busy._replace(stack=IN_JOB.replace("forward", "backward"))
    assert suspects.find(snapshot(elsewhere, before=(before,)))[:3] == ("slow", (1,), "works")
    # A compiler in a process of its own.
    compiler = Helper("cc1plus", Sample(7, "R", "R", 9.0, 9.0))
    waits = before._replace(helpers=(compiler,))
    started = before._replace(helpers=(compiler._replace(sample=Sample(7, "R", "R", 8.0, 8.0)),))
    assert suspects.find(snapshot(waits, before=(started,)))[:3] == ("slow", (1,), "works")


def test_a_stuck_loader_is_named_with_its_worker_and_line() -> None:
    helpers = (
        Helper("loader worker 0", Sample(7, "S", "S", 1.0, 1.0, "unix_stream_data_wait"), IDLE_LOADER),
        Helper("loader worker 1", Sample(8, "S", "S", 1.0, 1.0, "hrtimer_nanosleep"), STUCK_LOADER),
    )
    waits = asleep(0, section="data", phase="waiting for data", helpers=helpers)
    found = suspects.find(snapshot(waits))
    assert (found.kind, found.ranks, found.doubt) == ("loader", (0,), "asleep")
    assert "loader worker 1 (process 8) sleeps at /home/u/dataset.py:12 in read_volume" in found.said
    disk = helpers[1]._replace(sample=helpers[1].sample._replace(state="D", waits_in="folio_wait_bit"))
    assert suspects.find(snapshot(waits._replace(helpers=(helpers[0], disk)))).doubt == "storage"


def test_a_save_that_takes_long_is_storage_and_in_doubt() -> None:
    saves = asleep(0, section="save", phase="copying the state for a save")
    assert suspects.find(snapshot(saves))[:3] == ("storage", (0,), "storage")
    everyone = [view(r, waiting=True, phase="waiting for the save of step 4") for r in RANKS]
    assert suspects.find(snapshot(*everyone))[:2] == ("storage", RANKS)


def test_a_collective_that_all_have_entered_and_that_does_not_end_is_a_link() -> None:
    found = suspects.find(snapshot())
    assert (found.kind, found.ranks) == ("link", RANKS)
    homes = [view(r, addresses=frozenset({f"10.0.0.{r}"})) for r in RANKS]
    lost = [Connection("10.0.0.2", 5, 4096, 3)]
    homes = [h._replace(unacknowledged=tuple(lost)) if h.rank != 2 else h for h in homes]
    found = suspects.find(snapshot(*homes))
    assert found.kind == "link" and found.ranks == (2,)
    assert "rank 0 (10.0.0.0) to rank 2 (10.0.0.2)" in found.said and "rank 1 (10.0.0.1) to rank 2" in found.said
    # One rank was through with the collective when the link broke, and waits in the next.
    further = history(5, ("world", "all_reduce", "[[4000]]"), running=True)
    ahead = [homes[0]._replace(seen=further), *homes[1:]]
    assert suspects.find(snapshot(*ahead))[:2] == ("link", (2,))
    unbroken = [h._replace(unacknowledged=()) for h in ahead]
    assert suspects.find(snapshot(*unbroken)).kind == "missing-collective"


def test_waiting_ranks_are_consequences() -> None:
    # At a barrier of the host, and in work that was started before.
    barrier = view(0, waiting=True, stack=IN_JOB)
    started = view(1, stack=IN_JOB)
    assert suspects.find(snapshot(barrier, started, asleep(2))).ranks == (2,)
    # In a receive of a pipeline, which the engine does not record.
    receives = IN_JOB.replace("/home/u/job.py", "/p/src/paceline/parallel/pipeline/passes.py", 1)
    pipeline = [view(rank, seen=history(4), stack=receives) for rank in (0, 1)]
    assert suspects.find(snapshot(*pipeline, asleep(2))).ranks == (2,)


def test_without_a_word_of_the_engine_those_least_far_are_behind() -> None:
    blind = [view(rank, seen=None, stack=IN_JOB, step=4 + (rank != 1)) for rank in RANKS]
    assert suspects.find(snapshot(*blind)).ranks == (1,)
    level = [one._replace(step=4, silent_seconds=3.0 + one.rank) for one in blind]
    assert suspects.find(snapshot(*level)).ranks == (2,)


def test_a_rank_that_ended_early_is_named_where_the_others_wait_for_it() -> None:
    ended = view(0, sample=Sample(100, "gone"), stack="", seen=None)
    assert suspects.find(snapshot(ended))[:2] == ("dead", (0,))
    assert suspects.find(snapshot(ended, asleep(1)))[:2] == ("missing-collective", (1,))


def test_the_users_own_line_is_shown_before_a_librarys() -> None:
    assert suspects.source_line(IN_COLLECTIVE) == "/home/u/job.py:40 in step"
    assert suspects.source_line("") is None
