"""Every check catches a sick host, and none says anything of a healthy one."""

from __future__ import annotations

import re

import pytest

from paceline.doctor.check import ALL_HOSTS, Check, Given
from paceline.doctor.examine import Examination, all_checks, examine
from paceline.doctor.host import Clock, Host, Place
from tests.doctor.hosts import change, cpu_host, h100_host, healthy_hosts, roce_host, with_folder, with_variables
from tests.doctor.sick import Sick, job, sick, small_job

CHECKS = {check.id: check for check in all_checks()}
SICK = sick()
CASES = [(name, case) for name, cases in SICK.items() for case in cases]


def test_every_check_has_a_sick_snapshot() -> None:
    assert set(SICK) == set(CHECKS)


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{n}-{c.says[0][:40]}" for n, c in CASES])
def test_a_check_catches_its_sick_snapshot(name: str, case: Sick) -> None:
    found = examine(case.given, [CHECKS[name]])
    assert found.not_checked == () or found.findings
    texts = [finding.found for finding in found.findings]
    assert any(all(words in text for words in case.says) for text in texts), texts
    for finding in found.findings:
        assert finding.id == name
        assert finding.mend and finding.source and re.search(r"\d", finding.why), finding


@pytest.mark.parametrize("kind", healthy_hosts())
def test_no_check_says_anything_of_a_healthy_host(kind: str) -> None:
    host = healthy_hosts()[kind]
    assert examine(Given(hosts=(host,))).findings == ()


@pytest.mark.parametrize("kind", healthy_hosts())
def test_no_check_says_anything_of_two_healthy_hosts_and_a_healthy_job(kind: str) -> None:
    host = with_folder(healthy_hosts()[kind], "checkpoint", kind="nfs4")
    facts = job() if host.gpus else small_job()
    found = examine(Given(hosts=(host, change(host, name="other")), job=facts))
    assert found.findings == ()
    left = {(entry.id, entry.host) for entry in found.not_checked}
    # Two hosts and a job leave nothing out but what those hosts do not have, and clocks at one moment.
    assert left <= {
        (i, h) for i in NEEDS_DEVICES | {"clocks-differ", "peers", "port-free"} for h in (ALL_HOSTS, host.name, "other")
    }


NEEDS_DEVICES = {check.id for check in CHECKS.values() if check.gpus or check.rdma}


def test_a_check_that_is_not_made_says_why() -> None:
    host = change(cpu_host(), cpu=None, missing={"cpu": "/proc/cpuinfo: Permission denied"})
    found = examine(Given(hosts=(host,)))
    reasons = {entry.id: entry.reason for entry in found.not_checked}
    assert reasons["threads"] == "cpu was not captured: /proc/cpuinfo: Permission denied"
    assert reasons["gpu-xid"] == "this host has no GPU"
    assert reasons["rdma-ports"] == "this host has no RDMA device"
    assert reasons["job-batch"] == "no job was named: paceline doctor JOB.toml"
    assert reasons["versions-differ"].startswith("one host;")
    assert set(reasons) | set(found.checked) == set(CHECKS)


def test_differences_between_hosts_come_first_and_errors_before_warnings() -> None:
    first = with_variables(h100_host("node1"), NCCL_IB_DISABLE="1", NCCL_DEBUG="INFO")
    second = change(h100_host("node2"), versions={})
    found = examine(Given(hosts=(first, second))).findings
    kinds = [(CHECKS[f.id].compare is None, f.severity == "warning") for f in found]
    assert kinds == sorted(kinds)
    assert {True, False} == {kind for kind, _ in kinds}


def test_what_ranks_of_one_host_say_alike_is_said_once() -> None:
    host = with_variables(cpu_host(), NCCL_IB_DISABLE="1")
    assert len(examine(Given(hosts=(host, host))).findings) == 1


def test_ranks_of_one_healthy_host_do_not_differ() -> None:
    """Each rank has its own device and the host's own directories."""
    host = with_folder(with_folder(h100_host(), "checkpoint", kind="ext4"), "run", kind="ext4")
    ranks = tuple(
        change(
            with_variables(host, CUDA_VISIBLE_DEVICES="0,1,2,3,4,5,6,7", TORCHELASTIC_RUN_ID="x"),
            place=Place(rank=n, local_rank=n, world_size=8, local_world_size=8),
            clock=Clock(synchronised=True, offset=0.001 * n),
        )
        for n in range(8)
    )
    assert examine(Given(hosts=ranks, job=job())).findings == ()


def test_variables_that_name_versions_and_places_may_differ() -> None:
    first = with_variables(h100_host("node1"), NCCL_VERSION="2.29", CUDA_HOME="/usr/local/cuda", TORCH_HOME="/a")
    assert examine(Given(hosts=(first, h100_host("node2")))).findings == ()


def test_roce_counts_as_a_fabric_that_the_variable_takes_away() -> None:
    """A source that is often followed says to set it on RoCE, where it leaves IP sockets only."""
    [finding] = _of(with_variables(roce_host(), NCCL_IB_DISABLE="1"), "variables").findings
    assert finding.severity == "error" and "RoCE" in finding.found and finding.mend == "unset NCCL_IB_DISABLE"


def test_a_fixed_gid_index_that_holds_the_right_gid_is_left_alone() -> None:
    host = with_variables(roce_host(), NCCL_IB_GID_INDEX="3")
    assert examine(Given(hosts=(host, change(host, name="other")))).findings == ()
    [finding] = _of(with_variables(cpu_host(), NCCL_IB_GID_INDEX="3"), "variables").findings
    assert "no RoCE port here" in finding.why


def test_a_variable_that_turns_rdma_off_weighs_more_where_there_is_rdma() -> None:
    severities = [
        _of(with_variables(h, NCCL_IB_DISABLE="1"), "variables").findings[0].severity for h in (roce_host(), cpu_host())
    ]
    assert severities == ["error", "warning"]


def _of(host: Host, name: str) -> Examination:
    return examine(Given(hosts=(host,)), [CHECKS[name]])


@pytest.mark.parametrize("check", CHECKS.values(), ids=list(CHECKS))
def test_a_check_s_file_has_its_name_and_its_words_a_figure(check: Check) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", check.id)
    assert re.search(r"\d", check.why), check.why
    assert (check.look is None) != (check.compare is None)
    assert check.source and check.mend and check.title
