"""What a machine cannot do is told with its reason, and what is borrowed from it is given back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.drill import reach
from paceline.drill.disk_writer import _Disk
from paceline.drill.faults import BY_KIND, FAULTS
from paceline.drill.order import Order, read_truth


def test_one_rank_has_nobody_to_wait_for() -> None:
    alone = {fault.kind for fault in FAULTS if reach.why_not(fault, 1)}
    assert {"skipped-collective", "slow-rank", "slow-data", "slow-link"} <= alone
    assert "this drill has 1" in str(reach.why_not(BY_KIND["slow-rank"], 1))
    assert not alone & {"kill", "stop", "preemption", "crash-loop", "corrupted-checkpoint", "full-disk", "nan"}


def test_what_needs_root_is_told_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    reach._no_quota.cache_clear()
    reach._no_shaping.cache_clear()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    try:
        for kind in ("slow-cpu", "slow-link"):
            assert "root" in str(reach.why_not(BY_KIND[kind], 2))
    finally:
        reach._no_quota.cache_clear()
        reach._no_shaping.cache_clear()


def test_a_quota_slows_a_busy_process_and_leaves_no_group() -> None:
    if reason := reach._no_quota():
        pytest.skip(reason)
    spin = "import sys, time; t = time.time() + 1.0\nwhile time.time() < t: pass\nprint(time.process_time())"
    with reach.little_cpu(f"paceline-drill-test-{os.getpid()}") as members:
        joined = f"open({members!r}, 'w').write('0')\n{spin}"
        spent = float(subprocess.run([sys.executable, "-c", joined], capture_output=True, text=True, check=True).stdout)
    assert spent < 0.5  # of one second; without a quota all of it, as far as the machine is free
    assert not Path(members).parent.exists()


def test_a_small_disk_is_small_and_gone_afterwards(tmp_path: Path) -> None:
    with reach.small_disk(tmp_path / "disk", 2**20) as disk:
        if not disk:
            pytest.skip("no file system can be mounted here")
        with pytest.raises(OSError) as raised:
            (Path(disk) / "file").write_bytes(bytes(2**21))
        assert raised.value.errno == errno.ENOSPC
    assert not (tmp_path / "disk" / "file").exists()


def test_the_disk_is_full_for_one_save_and_once_in_a_run(tmp_path: Path) -> None:
    order = Order(kind="full-disk", rank=0, step=9, truth=str(tmp_path / "truth.jsonl"))
    disk = _Disk(order)
    for operation, step in (("mkdir", 6), ("write", 6), ("mkdir", 12)):
        disk.about_to(operation, f"/x/checkpoints/step-{step:08d}/a")
    assert [entry["step"] for entry in read_truth(tmp_path / "truth.jsonl")] == [12]
    for operation in ("create", "write", "sync"):
        with pytest.raises(OSError) as raised:
            disk.about_to(operation, "/x/checkpoints/step-00000012/rank-00000.safetensors")
        assert raised.value.errno == errno.ENOSPC
    disk.about_to("unlink", "/x/checkpoints/step-00000012/rank-00000.safetensors")
    disk.about_to("write", "/x/checkpoints/.writer-0.lock")
    for operation in ("mkdir", "create", "write"):
        disk.about_to(operation, "/x/checkpoints/step-00000018/a")
    disk.about_to("write", "/x/checkpoints/step-00000024/a")
    assert order.done() and len(order.done()) == 1
