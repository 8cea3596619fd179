"""Threads and CPUs of ranks. BL-83"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.workers import affinity, environment
from paceline.workers.affinity import RankCpus, plan_affinity


# BL-83
@pytest.mark.parametrize(("ranks", "cpus"), [(4, 4), (4, 9), (2, 2), (3, 8), (8, 64), (1, 4)])
def test_threads_times_ranks_stay_within_the_allowed_cpus(ranks: int, cpus: int) -> None:
    allowed = range(10, 10 + cpus)
    plan = plan_affinity(ranks, allowed, None)
    assert sum(p.threads for p in plan) <= cpus
    assert sorted(cpu for p in plan for cpu in p.cpus) == list(allowed)
    assert all(len(p.cpus) >= p.threads for p in plan)
    assert len({p.threads for p in plan}) == 1


# BL-83: four ranks on four CPUs must not all sit on one.
def test_each_rank_has_cpus_of_its_own() -> None:
    plan = plan_affinity(4, (0, 1, 2, 3), None)
    assert [p.cpus for p in plan] == [(0,), (1,), (2,), (3,)]
    assert all(p.pinned for p in plan)


def test_more_ranks_than_cpus_share_all_of_them_with_one_thread_each() -> None:
    assert plan_affinity(4, (0, 1), None) == [RankCpus((0, 1), 1, False)] * 4


def test_a_quota_below_the_cpus_gives_threads_and_no_pinning() -> None:
    assert plan_affinity(2, range(8), 4.5) == [RankCpus(tuple(range(8)), 2, False)] * 2
    assert plan_affinity(2, range(8), 0.5)[0].threads == 1
    assert plan_affinity(2, range(8), 16.0)[0].pinned


def test_the_user_s_threads_stand() -> None:
    assert {p.threads for p in plan_affinity(2, range(4), None, threads=7)} == {7}


def test_a_rank_gets_cpus_of_one_socket() -> None:
    interleaved = {cpu: (cpu % 2, cpu // 2) for cpu in range(8)}
    plan = plan_affinity(2, range(8), None, order=interleaved)
    assert [p.cpus for p in plan] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_thread_variables_of_the_user_are_kept() -> None:
    env = affinity.thread_environment(RankCpus((0,), 1, True), {"OMP_NUM_THREADS": "6"})
    assert "OMP_NUM_THREADS" not in env
    # MKL's own variable would win over the user's.
    assert env["MKL_NUM_THREADS"] == "6"
    assert affinity.thread_environment(RankCpus((0,), 2, True), {"MKL_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("cpus", "helpers", "spare"), [(2, 2, 0), (14, 2, 0), (16, 0, 0), (16, 2, 1), (64, 2, 2), (64, 9, 4)]
)
def test_cpus_are_left_for_loader_and_writer_where_there_are_enough(cpus: int, helpers: int, spare: int) -> None:
    for plan in plan_affinity(2, range(cpus), None, helpers=helpers):
        assert plan.threads + spare == cpus // 2 and plan.spare == spare
        assert len(plan.cpus) == cpus // 2, "the loader may use all CPUs of its rank"
    for plan in plan_affinity(2, range(cpus), cpus - 1.0, helpers=helpers, pin=False):
        assert plan.threads + plan.spare == (cpus - 1) // 2 or cpus == 2
    assert {p.spare for p in plan_affinity(2, range(cpus), None, threads=3, helpers=helpers)} == {0}


def test_what_is_left_for_loader_and_writer_is_said() -> None:
    plan = plan_affinity(2, range(16), None, helpers=2)
    assert affinity.describe(plan) == "cpus: 2 ranks x 7 threads (1 left for loader and writer), pinned to 0-7 | 8-15"


NODES = (tuple(range(8)), tuple(range(8, 16)))


def test_a_rank_gets_cpus_near_its_device() -> None:
    """Devices 0 and 1 on the second node, 2 and 3 on the first, as boards are wired."""
    plan = plan_affinity(4, range(16), None, near=[NODES[1], NODES[1], NODES[0], NODES[0]])
    assert [p.cpus for p in plan] == [(8, 9, 10, 11), (12, 13, 14, 15), (0, 1, 2, 3), (4, 5, 6, 7)]
    assert all(p.pinned and p.threads == 4 for p in plan)


def test_near_cpus_outside_the_mask_are_not_taken() -> None:
    """Slurm gave this job CPUs of one node only: a rank whose device hangs on the other one keeps what it was given."""
    plan = plan_affinity(2, range(8), None, near=[NODES[0], NODES[1]])
    assert [p.cpus for p in plan] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    narrow = plan_affinity(2, [0, 1, 8, 9, 10, 11], None, near=[NODES[0], NODES[1]])
    assert [p.cpus for p in narrow] == [(0, 1), (8, 9, 10, 11)]
    assert {p.threads for p in narrow} == {2}, "all ranks have the threads of the one with least"


def test_oversubscription_is_said() -> None:
    assert affinity.warnings(plan_affinity(2, (0, 1), None), None, {}) == []
    [shared] = affinity.warnings(plan_affinity(4, (0, 1), None), None, {})
    assert "4 ranks share 2 CPUs" in shared
    [threads] = affinity.warnings(plan_affinity(2, (0, 1), None), None, {"OMP_NUM_THREADS": "4"})
    assert "2 ranks x 4 threads are more than 2 CPUs" in threads


def test_the_plan_is_one_line() -> None:
    plan = plan_affinity(2, range(8), None)
    assert affinity.describe(plan) == "cpus: 2 ranks x 4 threads, pinned to 0-3 | 4-7"
    shared = affinity.describe(plan_affinity(4, (0, 1), 1.5), 1.5, {"OMP_NUM_THREADS": "1"})
    assert shared == "cpus: 4 ranks x 1 thread (OMP_NUM_THREADS) on cpus 0-1, quota 1.5"


# BL-83
def test_a_mask_that_an_openmp_runtime_shrank_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "allowed_cpus", lambda: (2,))
    text = affinity.shrunk_mask_warning((2, 3), {"OMP_PROC_BIND": "close"})
    assert text is not None and "OMP_PROC_BIND=close bound this process to CPUs 2 of its 2-3" in text
    assert affinity.shrunk_mask_warning((2,), {"OMP_PROC_BIND": "close"}) is None


# BL-83
def test_loader_processes_may_use_the_rank_s_whole_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.CPUS, "0-2,5")
    assert affinity.rank_cpus() == (0, 1, 2, 5)


def test_cpu_lists_are_read_as_they_are_written() -> None:
    for cpus in ([0], [0, 1, 2], [3, 5, 6, 9]):
        assert affinity.parse_cpu_list(affinity.cpu_list(cpus)) == cpus


def test_the_quota_is_the_smallest_on_the_way_up(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert affinity.cpu_quota(tmp_path, membership) == 1.5


def test_the_quota_of_the_first_cgroup_version(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("3:cpuset:/x\n2:cpu,cpuacct:/job\n")
    folder = tmp_path / "cpu,cpuacct" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("200000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert affinity.cpu_quota(tmp_path, membership) == 2.0
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert affinity.cpu_quota(tmp_path, membership) is None


def test_apply_holds_this_thread_to_the_plan() -> None:
    before = affinity.allowed_cpus()
    try:
        affinity.apply(RankCpus(before[:1], 1, True))
        assert os.sched_getaffinity(0) == {before[0]}
    finally:
        affinity.apply(RankCpus(before, 1, True))
