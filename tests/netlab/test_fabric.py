"""`bench fabric` on real links: an uplink that is shared by too many, slow, uneven and lossy links, and sound ones."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Callable

import pytest

from paceline.bench.fabric_findings import findings_of
from tests.netlab.cases import KINDS, Case, Kind, draw_case, wrong
from tests.netlab.fabrics import MBIT, set_up, study_case
from tests.netlab.lab import Lab
from tests.pool.launch import Completed, Launcher, Running

RACKS = (2, 2)
DRAWS = 20


@pytest.fixture(scope="module")
def lab(netlab: Callable[..., Lab]) -> Lab:
    return netlab(RACKS)


def start(launch: Launcher, lab: Lab, ranks: int, *words: str) -> list[Running]:
    """`paceline bench fabric` on the first hosts, one rank each."""
    hosts = lab.hosts[:ranks]
    return [
        launch.start(["bench", "fabric", *words], prefix=lab.prefix(host), env=lab.variables(rank, hosts))
        for rank, host in enumerate(hosts)
    ]


def test_an_uplink_of_a_quarter_of_its_hosts_links_is_named_with_its_factor(lab: Lab, launch: Launcher) -> None:
    set_up(lab, Case("oversubscribed", RACKS, size=4.0), seed=0)
    ends: list[Completed] = [running.wait(90.0) for running in start(launch, lab, 4, "--json")]
    assert [end.returncode for end in ends] == [1, 0, 0, 0], ends[0].stderr
    document = json.loads(ends[0].stdout)
    assert [finding["id"] for finding in document["findings"]] == ["uplink-oversubscribed"]
    (uplink,) = document["uplinks"]
    print(f"reported {uplink['factor']:.2f} +- {uplink['error']:.2f}")
    assert uplink["factor"] == pytest.approx(4.0, abs=0.4)
    assert document["findings"][0]["host"] == "uplink of r0h0 r0h1"
    assert document["groups"] == document["placement"]["groups"] == [["r0h0", "r0h1"], ["r1h0", "r1h1"]]
    assert len(document["rows"]) == 12 + 12 + 12 and document["complete"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "oversubscribed"])
def test_a_drawn_fault_is_named_and_a_sound_fabric_is_not(lab: Lab, kind: Kind) -> None:
    seed = secrets.randbelow(10**6)
    _judge(lab, draw_case(seed, kind, RACKS), seed)


@pytest.mark.soak
@pytest.mark.limit(900)
def test_twenty_drawn_faults_are_named(lab: Lab) -> None:
    first = secrets.randbelow(10**6)
    for seed in range(first, first + DRAWS):
        kind = KINDS[seed % len(KINDS)]
        _judge(lab, draw_case(seed, kind, RACKS), seed)


def _judge(lab: Lab, case: Case, seed: int) -> None:
    print(f"seed {seed}: {case} at {MBIT:g} Mbit/s")
    study = study_case(lab, case, seed)
    assert wrong(case, study.hosts, findings_of(study)) is None


def test_a_host_that_dies_leaves_one_line_and_what_was_measured(lab: Lab, launch: Launcher) -> None:
    set_up(lab, Case("healthy", RACKS), seed=0)
    first, second = start(launch, lab, 2, "--json", "--seconds", "30s")
    first.until("ends of flows", 60.0)
    second.signal(signal.SIGKILL)
    end = first.wait(30.0)
    assert end.returncode not in (0, 1) or "paceline:" in end.stderr
    document = json.loads(end.stdout)
    assert not document["complete"] and document["error"]["message"]
    assert "Traceback" not in end.stderr
    second.wait(10.0)


def test_a_host_that_never_comes_is_named(lab: Lab, launch: Launcher) -> None:
    host = lab.hosts[0]
    words = ["bench", "fabric", "--start-timeout", "2s"]
    end = launch(words, prefix=lab.prefix(host), env=lab.variables(0, lab.hosts[:2]), timeout=60.0)
    assert end.returncode == 76
    assert "for ranks 1" in end.stderr and "Traceback" not in end.stderr
