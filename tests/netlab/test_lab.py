"""The lab itself: rates, names, delay, loss, cut links, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netlab import collectives
from tests.netlab.lab import NAMED, Host, Lab, LabError, refusal, sweep
from tests.pool.launch import Launcher
from tests.pool.proc import process_state

RATES_MBIT = (100.0, 200.0, 1000.0)
SECONDS = 0.25
"""Of data at the shaped rate."""

SHARE = 0.9
"""Of the shaped rate: a frame of 1514 bytes carries 1448 of payload, which is 95.6%."""

ALL_GATHER_SHARE = 0.85
"""Gloo waits at each half of a part, and gets two thirds of a link with two ranks (docs/log.md)."""

TCP = str(Path(__file__).with_name("tcp.py"))


@pytest.fixture
def pair(put_right: Lab) -> tuple[Host, Host]:
    """Two hosts of a rack."""
    return put_right.hosts[0], put_right.hosts[1]


def tcp_rate(lab: Lab, source: Host, target: Host, size: int) -> float:
    """Bytes per second of one connection."""
    python = [sys.executable, "-I", "-S", TCP]
    take = [*lab.prefix(target), *python, "take", target.address, str(size)]
    with subprocess.Popen(take, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdout is not None and taker.stdout.readline() == "ready\n"
        subprocess.run([*lab.prefix(source), *python, "give", target.address, str(size)], check=True, timeout=30)
        return float(taker.stdout.readline())


@pytest.mark.parametrize("mbit", RATES_MBIT)
def test_one_connection_has_the_shaped_rate_in_both_directions(lab: Lab, pair: tuple[Host, Host], mbit: float) -> None:
    for host in pair:
        lab.link(host, mbit)
    for source, target in (pair, pair[::-1]):
        rate = tcp_rate(lab, source, target, round(max(4 << 20, SECONDS * mbit * 1e6 / 8))) * 8 / 1e6
        print(f"{mbit:g} Mbit/s shaped: {rate:.1f}")
        assert SHARE * mbit <= rate <= mbit


def test_each_direction_of_a_link_is_shaped_apart(lab: Lab, pair: tuple[Host, Host]) -> None:
    first, second = pair
    lab.link(first, 200)
    lab.link(second, out=40, into=200)
    assert 36 <= tcp_rate(lab, second, first, 2 << 20) * 8 / 1e6 <= 40
    assert 180 <= tcp_rate(lab, first, second, 4 << 20) * 8 / 1e6 <= 200


@pytest.mark.usefixtures("put_right")
def test_racks_meet_over_their_uplinks(lab: Lab) -> None:
    lab.uplink(50)
    inside = tcp_rate(lab, lab.hosts[0], lab.hosts[1], 2 << 20)
    across = tcp_rate(lab, lab.hosts[0], lab.hosts[2], 2 << 20)
    assert across * 8 / 1e6 == pytest.approx(47.8, rel=0.05) and inside > 2 * across


# R30: bus bandwidth follows the shaped rate.
@pytest.mark.parametrize("mbit", RATES_MBIT)
def test_collectives_have_the_shaped_rate(lab: Lab, pair: tuple[Host, Host], mbit: float) -> None:
    for host in pair:
        lab.link(host, mbit)
    _within(lab, 2, ("all_reduce", "broadcast", "send_recv"), mbit, SHARE)


def test_all_gather_has_most_of_the_shaped_rate(lab: Lab, pair: tuple[Host, Host]) -> None:
    for host in lab.hosts:
        lab.link(host, 100)
    _within(lab, 4, ("all_gather",), 100, ALL_GATHER_SHARE)


def _within(lab: Lab, ranks: int, kinds: tuple[str, ...], mbit: float, least: float) -> None:
    found = lab.crew.run(collectives.bus_bandwidths, ranks, kinds, timeout=60.0)[0]
    print(f"{mbit:g} Mbit/s shaped, {ranks} ranks:", {name: round(rate * 8 / 1e6, 1) for name, rate in found.items()})
    assert set(found) == set(kinds)
    for rate in found.values():
        assert least * mbit <= rate * 8 / 1e6 <= mbit


def test_every_host_has_its_own_name_and_they_meet_without_a_named_interface(lab: Lab) -> None:
    found = lab.crew.run(collectives.names, 4)
    assert found == [("r0h0", 6.0), ("r0h1", 6.0), ("r1h0", 6.0), ("r1h1", 6.0)]


def test_frames_are_delayed_both_ways(lab: Lab, pair: tuple[Host, Host]) -> None:
    near = round_trip(lab, *pair)
    lab.impair(pair[0], delay_seconds=0.02)
    far = round_trip(lab, *pair)
    assert 0.04 <= far < 0.04 + 10 * near + 0.05
    lab.mend(pair[0])
    assert round_trip(lab, *pair) < 0.04


def test_frames_are_lost_and_tcp_sends_them_again(lab: Lab, pair: tuple[Host, Host]) -> None:
    lab.link(pair[0], 100)
    lab.impair(pair[0], loss=0.02, seed=7)
    before = resent(lab, pair[0])
    tcp_rate(lab, *pair, 2 << 20)
    # 1448 segments at 2%, of which a retransmission of several counts once or more.
    assert resent(lab, pair[0]) - before >= 5


def test_what_a_crashed_process_left_is_swept(launch: Launcher, lab: Lab) -> None:
    crashed = launch([], module="tests.netlab.left_behind")
    switch, host, sleeper = crashed.stdout.split()
    assert crashed.returncode == -signal.SIGKILL
    assert {switch, host} <= {path.name for path in NAMED.iterdir()} and process_state(int(sleeper)) != "gone"
    assert {switch, host} <= set(sweep())
    assert not {switch, host} & {path.name for path in NAMED.iterdir()}
    assert process_state(int(sleeper)).startswith(("gone", "Z"))


def test_a_live_lab_is_not_swept_and_takes_everything_along(lab: Lab) -> None:
    with Lab((1, 1)) as other:
        names = {other.switch, *(host.namespace for host in other.hosts)}
        assert not names & set(sweep())
        command = [*other.prefix(other.hosts[0]), "sh", "-c", "echo there; exec sleep 300"]
        sleeper = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert sleeper.stdout is not None and sleeper.stdout.readline() == b"there\n"
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
    assert not names & {path.name for path in NAMED.iterdir()}


def test_a_machine_without_the_means_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match=r"not root.*-m 'not netlab'"):
        Lab((2,))
    monkeypatch.setenv("PATH", "")
    assert "ip, tc, unshare, setpriv not found" in (refusal() or "")


def round_trip(lab: Lab, source: Host, target: Host) -> float:
    """Seconds of a TCP handshake that is refused: once there, once back; the best of three."""
    code = (
        "import socket, time\n"
        "def once():\n"
        "    began = time.monotonic()\n"
        f"    socket.socket().connect_ex(({target.address!r}, 9))\n"
        "    return time.monotonic() - began\n"
        "once(); print(min(once() for _ in range(3)))"
    )
    command = [*lab.prefix(source), sys.executable, "-I", "-S", "-c", code]
    return float(subprocess.run(command, check=True, capture_output=True, timeout=10).stdout)


def resent(lab: Lab, host: Host) -> int:
    """Segments that a host's TCP has sent again so far."""
    command = ["ip", "netns", "exec", host.namespace, "cat", "/proc/net/snmp"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])
