"""Names and interfaces: what is this host's own, what a variable selects, what is refused before ranks wait."""

from __future__ import annotations

import os
import socket
import time

import pytest
from tests.pool.launch import Launcher
from tests.pool.pool import Pool

from paceline.errors import JobError
from paceline.workers import rendezvous
from paceline.workers.interfaces import (
    GLOO,
    NCCL,
    Interface,
    check_interfaces,
    interfaces,
    is_own_address,
    route_interface,
    selected,
)

LO, ETH, IB = (
    Interface("lo", True, True, "127.0.0.1"),
    Interface("eth0", True, False, "10.0.0.5"),
    Interface("ib0", False, False),
)
DOCKER = Interface("docker0", True, False, "172.17.0.1")
TABLE = [LO, ETH, IB, DOCKER]


# BL-71
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "host name", "own address"])
def test_every_name_of_this_host_is_recognised_as_its_own(name: str) -> None:
    own = [one.address for one in interfaces() if one.address]
    assert "127.0.0.1" in own
    known = {"host name": socket.gethostname(), "own address": own[-1]}
    assert is_own_address(known.get(name, name))


# BL-71
@pytest.mark.parametrize("name", ["no-such-host.invalid", "192.0.2.1"])
def test_others_are_not(name: str) -> None:
    assert not is_own_address(name)


def meet_by_name(rank: int, world_size: int) -> tuple[JobError, float]:
    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    began = time.monotonic()
    with pytest.raises(JobError) as refused:
        rendezvous.join(20.0, start_timeout=120.0)
    return refused.value, time.monotonic() - began


# BL-71
def test_a_name_that_cannot_be_resolved_is_told_soon_with_the_way_around_it(pool: Pool) -> None:
    nowhere = {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"}
    ((error, seconds),) = pool.run(meet_by_name, 1, env=nowhere, group=False)
    assert seconds < 15
    assert f"{socket.gethostname()} cannot resolve 'no-such-host.invalid'" in error.message
    assert "MASTER_ADDR=ADDRESS" in str(error.hint) and "--local-addr" in str(error.hint)


# BL-72
@pytest.mark.parametrize(
    ("variable", "value", "names"),
    [
        (GLOO, "eth0", ["eth0"]),
        (GLOO, "eth", []),
        (GLOO, "lo,eth0", ["lo", "eth0"]),
        (NCCL, "eth", ["eth0"]),
        (NCCL, "=eth", []),
        (NCCL, "=eth0,ib0", ["eth0", "ib0"]),
        (NCCL, "^docker", ["lo", "eth0", "ib0"]),
        (NCCL, "^=docker", ["lo", "eth0", "ib0", "docker0"]),
    ],
)
def test_values_select_as_nccl_and_gloo_do(variable: str, value: str, names: list[str]) -> None:
    assert [one.name for one in selected(variable, value, TABLE)] == names


# BL-72
@pytest.mark.parametrize(
    ("value", "several", "table", "says"),
    [
        ("nope0", False, TABLE, "selects no interface of this host; there are lo, eth0, ib0 (down), docker0"),
        ("ib0", False, TABLE, "selects ib0, which is down"),
        ("lo", True, TABLE, "is the loopback of this host, which the ranks of other hosts cannot reach"),
        ("^docker0,eth,ib", False, [DOCKER], "no interface"),
    ],
)
def test_a_variable_that_cannot_work_is_refused(value: str, several: bool, table: list[Interface], says: str) -> None:
    with pytest.raises(JobError) as refused:
        check_interfaces({NCCL: value}, several, (NCCL,), table)
    assert says in refused.value.message and refused.value.key == NCCL and f"Unset {NCCL}" in str(refused.value.hint)


# BL-72
def test_an_exclusion_that_leaves_the_loopback_is_a_warning_between_hosts() -> None:
    (note,) = check_interfaces({NCCL: "^docker0"}, True, (NCCL,), [LO, DOCKER])
    assert "leaves only lo, the loopback" in note
    assert check_interfaces({NCCL: "^docker0"}, True, (NCCL,), TABLE) == []
    assert check_interfaces({NCCL: "^docker0"}, False, (NCCL,), [LO, DOCKER]) == []


def test_what_has_no_effect_or_is_not_set_is_not_judged() -> None:
    assert check_interfaces({NCCL: "nope0"}, True, (GLOO,), TABLE) == []
    assert check_interfaces({GLOO: ""}, True, (GLOO, NCCL), TABLE) == []
    assert check_interfaces({GLOO: "lo"}, False, (GLOO,), TABLE) == []


# BL-72
def test_a_launch_with_an_interface_that_is_not_there_is_refused_at_once(launch: Launcher) -> None:
    done = launch(["bench", "collectives", "--procs", "2"], env={GLOO: "nope0"}, timeout=30)
    assert done.returncode == 78 and done.seconds < 10, done.stderr
    assert "GLOO_SOCKET_IFNAME=nope0 selects no interface of this host; there are lo" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_way_to_a_loopback_is_no_interface_and_real_ones_have_addresses() -> None:
    assert route_interface("127.0.0.1", 1) is None and route_interface("no-such-host.invalid", 1) is None
    real = [one for one in interfaces() if one.address and not one.loopback]
    for one in real:
        found = route_interface(one.address, 1)
        # The way to an own address leads through the loopback, but from that address.
        assert found is None or found.address == one.address
