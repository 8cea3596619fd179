"""What a study of a fabric says, against a fabric that is arithmetic: faults of drawn size and place, and sound ones."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from paceline.bench.fabric_findings import Finding, doubted, findings_of, placement_of, uplinks
from paceline.bench.fabric_flows import seen_of
from paceline.bench.fabric_study import Company, Study, fill
from paceline.bench.pairs import MANY_HOSTS, Flow, Seen, each_alone, tournament
from paceline.bench.resent import Segments, segments
from tests.bench.fabric_model import SEGMENTS, Model
from tests.netlab.cases import KINDS, Case, Kind, draw_case, wrong

DRAWS = 20
FABRICS = [(2, 2), (4,), (4, 4), (3, 5), (8,), (4, 4, 4), (8, 8)]
RACKED = [racks for racks in FABRICS if len(racks) > 1]


def studied(model: Model) -> Study:
    study = Study(model.hosts)
    fill(study, model.measure, doubted)
    return study


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_drawn_faults_are_named_with_their_place_and_size(kind: Kind) -> None:
    first = secrets.randbelow(10**6)
    print(f"seeds {first} to {first + DRAWS - 1}")
    problems = []
    for seed in range(first, first + DRAWS):
        racks = random.Random(seed).choice(RACKED if kind == "oversubscribed" else FABRICS)
        case = draw_case(seed, kind, racks)
        order = random.Random(seed).sample(range(sum(racks)), sum(racks))
        problems.append(wrong(case, *_found(Model(case, seed, order))))
    assert problems == [None] * DRAWS


def _found(model: Model) -> tuple[list[str], list[Finding]]:
    return model.hosts, findings_of(studied(model))


def test_a_slow_host_behind_a_shared_uplink_is_named_as_well() -> None:
    model = Model(Case("slow", (4, 4), host=1, size=5.0), seed=1)
    model.case = Both("slow", (4, 4), host=1, size=5.0)
    study = studied(model)
    findings = findings_of(study)
    assert [(finding.id, finding.host) for finding in findings] == [
        ("link-slow", "h1"),
        # The slow host's own link is narrower than its share of the uplink: nothing that is seen tells where it stands.
        ("uplink-oversubscribed", "uplink of h0 h2 h3"),
    ]
    assert uplinks(study)[0].factor == pytest.approx(3.0, rel=0.1)  # of the three hosts that are named


class Both(Case):
    """A slow link, and uplinks of a quarter."""

    def uplink(self, rack: int) -> float:
        return self.racks[rack] / 4


def test_two_hosts_have_a_pair_at_fault_but_no_host() -> None:
    findings = findings_of(studied(Model(Case("asymmetric", (2,), host=0, way="out", size=8.0), seed=1)))
    assert [(finding.id, finding.host) for finding in findings] == [("path-slow", "h0 h1")]
    assert "from h0 to h1" in findings[0].found


@pytest.mark.parametrize("seed", range(5))
def test_noise_that_does_not_repeat_itself_is_no_finding(seed: int) -> None:
    model, draw = Model(Case("healthy", (2, 2)), seed), random.Random(seed)

    def disturbed(flows: Sequence[Flow], company: Company) -> list[Seen]:
        found = model.measure(flows)
        if draw.random() > 0.2:
            return found
        # A machine that does something else for a moment: rates fall, and what waits too long is sent again.
        left = draw.uniform(0.1, 0.6)
        return [replace(seen, bytes_per_second=left * seen.bytes_per_second, resent=2 / SEGMENTS) for seen in found]

    study = Study(model.hosts)
    fill(study, disturbed, doubted)
    assert findings_of(study) == []


def test_without_counters_of_the_system_stalls_tell_of_loss() -> None:
    model = Model(Case("lossy", (4,), host=2, size=0.05), seed=3)

    def measure(flows: Sequence[Flow], company: Company) -> list[Seen]:
        return [replace(seen, resent=None, stalled=0.4 if 2 in seen.flow else 0.0) for seen in model.measure(flows)]

    study = Study(model.hosts)
    fill(study, measure, doubted)
    findings = findings_of(study)
    assert [(finding.id, finding.host) for finding in findings] == [("link-loses", "h2")]
    assert "6 of 6 flows over it stalled" in findings[0].found


def test_the_placement_keeps_groups_together_and_leaves_bad_hosts_out() -> None:
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    model = Model(Case("oversubscribed", (4, 4), size=4.0), seed=5, order=order)
    study = studied(model)
    placement = placement_of(study, findings_of(study))
    assert placement.groups == [["h0", "h2", "h4", "h6"], ["h1", "h3", "h5", "h7"]]
    assert placement.order == [*placement.groups[0], *placement.groups[1]] and placement.leave_out == []
    assert "h0 h2 h4 h6 | h1 h3 h5 h7" in placement.say
    slow = studied(Model(Case("slow", (4,), host=2, size=4.0), seed=5))
    assert placement_of(slow, findings_of(slow)).leave_out == ["h2"]


def test_every_pair_meets_once_and_no_host_has_two_partners() -> None:
    for hosts in range(2, 12):
        rounds = tournament(list(range(hosts)))
        flows = [flow for one in rounds for flow in one]
        assert sorted(flows) == sorted(set(flows)) and len(flows) == hosts * (hosts - 1)
        for one in rounds:
            assert len({flow.source for flow in one}) == len({flow.target for flow in one}) == len(one)


def test_of_many_hosts_a_few_partners_of_each_are_measured_alone() -> None:
    many = 4 * MANY_HOSTS
    flows = each_alone(many)
    assert len(each_alone(MANY_HOSTS)) == MANY_HOSTS * (MANY_HOSTS - 1)
    partners = {host: {flow.target for flow in flows if flow.source == host} for host in range(many)}
    assert {len(found) for found in partners.values()} == {2 * 6 - 1}
    assert all(Flow(flow.target, flow.source) in flows for flow in flows)


def test_a_rate_its_error_and_its_stalls_come_from_arrivals() -> None:
    steady = seen_of(Flow(0, 1), 1000, [0.01 * k for k in range(41)])
    assert steady.bytes_per_second == pytest.approx(1e5) and steady.error < 1e-9 and steady.stalled == 0.0
    # One gap of 0.2 s in 0.01 s ones: 0.16 s beyond four usual gaps.
    halted = seen_of(Flow(0, 1), 1000, [0.01 * k + (0.19 if k > 20 else 0.0) for k in range(41)])
    assert halted.stalled == pytest.approx(0.16 / (0.51 + 0.0), rel=0.15)
    assert halted.error > 0.05


def test_segments_are_read_by_name(tmp_path: Path) -> None:
    table = tmp_path / "snmp"
    table.write_text("Ip: A B\nIp: 1 2\nTcp: MaxConn OutSegs RetransSegs\nTcp: -1 700 3\n")
    assert segments(table) == Segments(sent=700, resent=3)
    assert segments(tmp_path / "absent") is None
