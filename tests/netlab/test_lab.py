"""The lab itself: rates, names, delay, loss, cut links, and that nothing of it is left."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.netlab import collectives
from tests.netlab.lab import NAMED, PREFIX, Host, Lab, sweep
from tests.pool.launch import Launcher

from paceline.bench.resent import segments

RATES_MBIT = (100.0, 200.0, 1000.0)
SECONDS = 0.25
"""Of data at the shaped rate."""

SHARE = 0.9
"""Of the shaped rate: a frame of 1514 bytes carries 1448 of payload, which is 95.6%."""

TCP = str(Path(__file__).with_name("tcp.py"))


@pytest.fixture(scope="module")
def pair(netlab: Callable[..., Lab]) -> Lab:
    return netlab(racks=(2,))


def tcp_rate(lab: Lab, source: Host, target: Host, size: int) -> float:
    """Bytes per second of one connection."""
    python = [sys.executable, "-I", "-S", TCP]
    take = [*lab.prefix(target), *python, "take", target.address, str(size)]
    with subprocess.Popen(take, stdout=subprocess.PIPE, text=True) as taker:
        assert taker.stdout is not None and taker.stdout.readline() == "ready\n"
        subprocess.run([*lab.prefix(source), *python, "give", target.address, str(size)], check=True, timeout=30)
        return float(taker.stdout.readline())


@pytest.mark.parametrize("mbit", RATES_MBIT)
def test_one_connection_has_the_shaped_rate_in_both_directions(pair: Lab, mbit: float) -> None:
    first, second = pair.hosts
    for host in pair.hosts:
        pair.link(host, mbit)
    for source, target in ((first, second), (second, first)):
        rate = tcp_rate(pair, source, target, round(max(4 << 20, SECONDS * mbit * 1e6 / 8))) * 8 / 1e6
        print(f"{mbit:g} Mbit/s shaped: {rate:.1f}")
        assert SHARE * mbit <= rate <= mbit


def test_each_direction_of_a_link_is_shaped_apart(pair: Lab) -> None:
    first, second = pair.hosts
    pair.link(first, 200)
    pair.link(second, out=40, into=200)
    assert 36 <= tcp_rate(pair, second, first, 2 << 20) * 8 / 1e6 <= 40
    assert 180 <= tcp_rate(pair, first, second, 4 << 20) * 8 / 1e6 <= 200


@pytest.mark.parametrize("mbit", RATES_MBIT)
def test_collectives_have_the_shaped_rate(pair: Lab, mbit: float) -> None:
    for host in pair.hosts:
        pair.link(host, mbit)
    found = pair.crew.run(collectives.bus_bandwidths, 2)[0]
    print(f"{mbit:g} Mbit/s shaped:", {name: round(rate * 8 / 1e6, 1) for name, rate in found.items()})
    for rate in found.values():
        assert SHARE * mbit <= rate * 8 / 1e6 <= mbit


def test_every_host_has_its_own_name(pair: Lab) -> None:
    for host in pair.hosts:
        pair.link(host, None)
    assert pair.crew.run(collectives.names, 2) == [("r0h0", 1.0), ("r0h1", 1.0)]
