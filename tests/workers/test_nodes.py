"""Supervisors of several nodes, as threads of one process: they meet, leave, come, and are told when they cannot."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.errors import JobError, Stalled
from paceline.workers.nodes import Membership, NodeRange, Party, split_endpoint

pytestmark = pytest.mark.limit(60)
ONE_OR_TWO = NodeRange(1, 2)


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def member(endpoint: str, wanted: NodeRange = ONE_OR_TWO, last_call: float = 1.0) -> Membership:
    return Membership(endpoint, "run", wanted, last_call)


def met(threads: ThreadPoolExecutor, members: list[Membership]) -> list[Party]:
    """All of them meet at once; each says its place in the list."""
    futures = [threads.submit(one.meet, {"number": number}, 30.0) for number, one in enumerate(members)]
    return [future.result(timeout=40) for future in futures]


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
    coming = threads.submit(third.meet, {"number": 3}, 30.0)
    deadline = time.monotonic() + 15
    while not first.waiting():
        assert time.monotonic() < deadline and not coming.done()
        time.sleep(0.1)
    (again,) = met(threads, [first])
    assert again.nodes == 2 and coming.result(timeout=20).told == again.told
    # What one attempt said is not heard in the next.
    with pytest.raises(Stalled, match="said 'port'"):
        again.hear("port", seconds=0.2)
    for one in (first, third):
        one.leave()


def test_too_few_nodes_are_told_with_both_numbers(endpoint: str) -> None:
    with pytest.raises(Stalled, match=r"fewer than 2 nodes came to .* within 2.00 s") as raised:
        member(endpoint, NodeRange(2, 3)).meet({}, 2.0)
    assert raised.value.exit_code == 76 and raised.value.key == "launch.nodes"


@pytest.mark.parametrize("text", ["node0", "node0:", ":29400", "node0:x", "node0:0", "node0:65536"])
def test_an_endpoint_is_host_and_port(text: str) -> None:
    with pytest.raises(JobError, match="is no host:port"):
        split_endpoint(text)


def test_an_address_may_have_colons() -> None:
    assert split_endpoint("[::1]:29400") == ("::1", 29400)
