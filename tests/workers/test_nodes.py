"""Supervisors of several nodes, as threads of one process: they meet, leave, come, and are told when they cannot."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.errors import JobError, Stalled
from paceline.units import Procs, parse_procs
from paceline.workers.nodes import Membership, NotHeard, Party, RunOver, lost_endpoint, split_endpoint
from paceline.workers.presence import Presence, ended_key

pytestmark = pytest.mark.limit(60)
ONE_OR_TWO = parse_procs("1:2")


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def member(endpoint: str, wanted: Procs = ONE_OR_TWO, seconds: float = 30.0) -> Membership:
    return Membership(endpoint, "run", wanted, seconds, last_call=1.0)


def met(threads: ThreadPoolExecutor, members: list[Membership]) -> list[Party]:
    """All of them meet at once; each says its place in the list."""
    futures = [threads.submit(one.meet, {"number": number}) for number, one in enumerate(members)]
    return [future.result(timeout=40) for future in futures]


def presence(party: Party, one: Membership, gone_seconds: float = 1.5) -> Presence:
    return Presence(party, one.waiting, lambda: lost_endpoint("there"), gone_seconds)


# BL-76
def test_nodes_leave_and_come_back(endpoint: str, threads: ThreadPoolExecutor) -> None:
    first, second = member(endpoint), member(endpoint)
    assert first.serves and not second.serves
    parties = met(threads, [first, second])
    assert sorted(party.node_rank for party in parties) == [0, 1]
    for number, party in enumerate(parties):
        assert party.told == parties[0].told and party.told[party.node_rank] == {"number": number}
    parties[0].share("port", 1234)
    assert parties[1].hear("port") == 1234

    # Leaving is local: the others go on, within seconds, without it.
    second.leave()
    began = time.monotonic()
    (alone,) = met(threads, [first])
    assert alone.nodes == 1 and time.monotonic() - began < 10

    # Who comes waits at the door until the others meet again.
    third = member(endpoint)
    coming = threads.submit(third.meet, {"number": 3})
    deadline = time.monotonic() + 15
    while not first.waiting():
        assert time.monotonic() < deadline and not coming.done()
        time.sleep(0.1)
    (again,) = met(threads, [first])
    assert again.nodes == 2 and coming.result(timeout=20).told == again.told
    # What one attempt said is not heard in the next.
    with pytest.raises(NotHeard, match="said 'port'"):
        again.hear("port", seconds=0.2)
    for one in (first, third):
        one.leave()


def test_who_waits_while_others_train_is_a_spare_and_hears_when_the_run_is_over(
    endpoint: str, threads: ThreadPoolExecutor
) -> None:
    first, spare = member(endpoint, Procs(1)), member(endpoint, Procs(1), seconds=1.0)
    met(threads, [first])
    waits = threads.submit(spare.meet, {})
    # Longer than it waits for nodes to come: they are there, and need it no less later.
    time.sleep(4.0)
    assert not waits.done() and first.waiting() == 0, "there is no room that it waits for"
    first.end()
    with pytest.raises(RunOver):
        waits.result(timeout=20)
    spare.leave()


def test_a_spare_takes_the_place_of_a_node_that_goes(endpoint: str, threads: ThreadPoolExecutor) -> None:
    members = [member(endpoint, Procs(2)) for _ in range(3)]
    met(threads, members[:2])
    spare = threads.submit(members[2].meet, {"number": 3})
    time.sleep(1.0)
    assert not spare.done()
    members[1].leave()
    (party,) = met(threads, members[:1])
    assert [told["number"] for told in sorted(party.told, key=lambda told: told["number"])] == [0, 3]
    assert spare.result(timeout=20).told == party.told
    for one in members:
        one.leave()


def test_a_node_that_falls_silent_is_gone_unless_it_has_told_its_end(
    endpoint: str, threads: ThreadPoolExecutor
) -> None:
    members = [member(endpoint), member(endpoint)]
    parties = met(threads, members)
    with presence(parties[0], members[0]) as ours:
        with presence(parties[1], members[1]):
            time.sleep(2.0)
            assert ours.gone() == [] and ours.at_the_door == 0
            ours.check()
        deadline = time.monotonic() + 10
        while not ours.gone():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert ours.gone() == [parties[1].node_rank]
        parties[1].share(ended_key(parties[1].node_rank), {})
        while ours.gone():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    for one in members:
        one.leave()


def test_a_supervisor_that_was_itself_stopped_takes_nobody_for_lost(endpoint: str) -> None:
    one = member(endpoint, Procs(1))
    subject = presence(one.meet({}), one)
    now = time.monotonic()
    # Its thread is not started: nothing is heard.
    subject._answered, subject._checked = now - 60.0, now - 59.0
    subject.check()
    subject._answered = now - 60.0
    with pytest.raises(Stalled, match="does not answer"):
        subject.check()
    one.leave()


def test_too_few_nodes_are_told_with_both_numbers(endpoint: str) -> None:
    with pytest.raises(Stalled, match=r"fewer than 2 nodes came to .* within 2.00 s") as raised:
        member(endpoint, parse_procs("2:3"), seconds=2.0).meet({})
    assert raised.value.exit_code == 76 and raised.value.key == "launch.nodes"


def test_an_endpoint_that_nobody_serves_is_named_with_the_reason() -> None:
    with pytest.raises(JobError, match=r"nobody serves 192\.0\.2\.1:29400 after 1.00 s: "):
        member("192.0.2.1:29400", seconds=1.0)


@pytest.mark.parametrize("text", ["node0", "node0:", ":29400", "node0:x", "node0:0", "node0:65536"])
def test_an_endpoint_is_host_and_port(text: str) -> None:
    with pytest.raises(JobError, match="is no host:port"):
        split_endpoint(text)


def test_an_address_may_have_colons() -> None:
    assert split_endpoint("[::1]:29400") == ("::1", 29400)
