"""What follows an attempt on several nodes, without any of them."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import Interrupted, PacelineError, Preempted, Stalled, WorkerFailed
from paceline.run.control import DOOR
from paceline.train.node_outcome import Follows, Report, follows

HOSTS = {0: "a", 1: "b", 2: "c"}
DEAD = WorkerFailed("rank 1 of 2 was ended by SIGKILL")
ECHO = Stalled("rank 0 waited in vain")
SAVED = Preempted("stopped by SIGTERM after step 5, state saved")


def report(error: PacelineError | None = None, **more: Any) -> Report:
    return Report(host="h", error=None if error is None else error.to_record(), **more)


def told(*reports: Report | None, least: int = 1) -> Follows:
    return follows(dict(enumerate(reports)), HOSTS, least)


def test_all_done_is_done() -> None:
    assert told(report(), report()).kind == "done"


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_cause_is_the_node_that_failed_by_itself(order: int) -> None:
    pair = (report(ECHO, cause="consequence", ended_at=1.0), report(DEAD, cause="own", ended_at=2.0))[::order]
    found = told(*pair)
    assert found.kind == "failed" and str(found.error) == str(DEAD) and found.node == (1 if order == 1 else 0)


def test_a_node_that_is_gone_is_the_cause_of_what_others_saw_of_it() -> None:
    found = told(report(ECHO, cause="timeout"), None, report())
    assert found.kind == "failed" and found.node == 1 and isinstance(found.error, WorkerFailed)
    assert "node 1 (b) is gone" in found.error.message and "started there again" in str(found.error.hint)
    # What one knows of itself comes before what is only not heard of another.
    assert told(report(DEAD, cause="own"), None).node == 0


def test_of_two_that_failed_by_themselves_the_earlier_one_counts() -> None:
    assert told(report(DEAD, ended_at=2.0), report(DEAD, ended_at=1.0)).node == 1


def test_who_leaves_leaves_alone() -> None:
    found = told(report(SAVED, asked="a signal to one of the workers"), report(SAVED, leaving="SIGTERM"))
    assert found.kind == "meet" and found.reason == "node 1 (b) left; 1 node goes on"
    # It left at once, and the rest saw connections break.
    found = told(report(ECHO, cause="consequence"), report(Interrupted("left at once"), leaving="Ctrl-C"))
    assert found.kind == "meet"


def test_the_rest_is_told_why_it_ends_where_it_is_not_enough() -> None:
    found = told(report(SAVED), report(SAVED, leaving="SIGTERM"), least=2)
    assert found.kind == "stops" and isinstance(found.error, Preempted)
    assert "node 1 (b) left, and 1 node is fewer than the 2 of launch.nodes" in found.error.message
    found = told(report(SAVED), report(SAVED, leaving="SIGTERM", serves=True))
    assert found.kind == "stops" and "whose supervisor serves launch.rendezvous" in str(found.error)
    both = told(report(SAVED, leaving="SIGTERM"), report(SAVED, leaving="SIGTERM"))
    assert both.kind == "stops" and "all nodes were asked to stop" in str(both.error)


def test_a_node_that_comes_is_let_in_unless_the_run_is_to_end() -> None:
    comes = report(SAVED, asked=f"{DOOR}: a node has come")
    assert told(comes, report(SAVED, asked="a signal to one of the workers")).reason == "a node has come"
    found = told(comes, report(SAVED, asked="control/stop"))
    assert found.kind == "stops" and isinstance(found.error, Preempted) and str(found.error) == str(SAVED)


def test_a_failure_beside_a_node_that_leaves_is_a_failure() -> None:
    found = told(report(DEAD, cause="own"), report(SAVED, leaving="SIGTERM"))
    assert found.kind == "failed" and found.node == 0


def test_a_failure_ends_a_run_that_was_told_to_stop_on_all_nodes() -> None:
    dead = report(DEAD)
    assert not told(dead, report(ECHO, cause="consequence")).ends
    assert told(dead, report(ECHO, cause="consequence", asked="control/stop")).ends
    # One that leaves may be done without, unless the others meet at it.
    assert not told(dead, report(ECHO, cause="consequence", leaving="SIGTERM")).ends
    assert told(dead, report(ECHO, cause="consequence", leaving="SIGTERM", serves=True)).ends
