"""What the kernel says of a CPU quota, from files of both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.telemetry.held_back import HeldBack


def second_version(folder: Path, seconds: float, quota: str = "25000") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(f"{quota} 100000\n")
    (folder / "cpu.stat").write_text(f"usage_usec 5\nnr_throttled 3\nthrottled_usec {round(seconds * 1e6)}\n")


def test_the_seconds_since_the_last_call_of_the_group_that_was_held_back_longest(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text("0::/pod/rank\n")
    second_version(tmp_path / "pod", 5.0)
    second_version(tmp_path / "pod" / "rank", 1.0, quota="max")
    held = HeldBack(1, alone=True, root=tmp_path, membership=membership)
    assert held.since_last() == 0.0
    second_version(tmp_path / "pod", 6.5)
    assert held.since_last() == pytest.approx(1.5)
    # Two threads that are held back for a second are so on two processors.
    two = HeldBack(2, alone=True, root=tmp_path, membership=membership)
    second_version(tmp_path / "pod", 8.5)
    assert two.since_last() == pytest.approx(1.0)


def test_a_group_with_other_ranks_in_it_says_nothing_of_one(tmp_path: Path) -> None:
    membership, others = tmp_path / "cgroup", tmp_path / "parent"
    others.write_text("0::/pod\n")
    membership.write_text("0::/pod\n")
    second_version(tmp_path / "pod", 5.0)
    held = HeldBack(1, alone=False, root=tmp_path, membership=membership, others=others)
    second_version(tmp_path / "pod", 6.0)
    assert held.since_last() is None
    # Moved into one of its own: from the next call on.
    membership.write_text("0::/pod/rank\n")
    second_version(tmp_path / "pod" / "rank", 2.0)
    assert held.since_last() is None
    second_version(tmp_path / "pod" / "rank", 2.25)
    assert held.since_last() == pytest.approx(0.25)


def test_the_first_version_counts_in_nanoseconds_and_nothing_is_known_without_a_quota(tmp_path: Path) -> None:
    membership, group = tmp_path / "cgroup", tmp_path / "cpu" / "job"
    membership.write_text("2:cpu:/job\n1:cpuset:/\n")
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("25000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu.stat").write_text("nr_periods 9\nnr_throttled 3\nthrottled_time 1000000000\n")
    held = HeldBack(1, alone=True, root=tmp_path, membership=membership)
    (group / "cpu.stat").write_text("nr_periods 9\nnr_throttled 3\nthrottled_time 1750000000\n")
    assert held.since_last() == pytest.approx(0.75)
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert HeldBack(1, alone=True, root=tmp_path, membership=membership).since_last() is None
    assert HeldBack(1, alone=True, root=tmp_path, membership=tmp_path / "none").since_last() is None
