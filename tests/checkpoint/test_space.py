"""The size of a checkpoint, and room for it before step 0."""

from __future__ import annotations

import pytest

from paceline.checkpoint.space import checkpoint_bytes, preflight
from paceline.cluster.probe import probe_host
from paceline.errors import DiskFull
from paceline.job.load import load_job
from paceline.job.resolve import resolve_job
from paceline.optim.config import OptimizerSection
from paceline.parallel.memory import layout_cost, parameter_sizes, staging_bytes
from paceline.plan.fixed import fixed_plan
from paceline.units import MiB


class Volume:
    place = "/mnt/full"

    def __init__(self, free: int | None, files: int | None = None) -> None:
        self.free, self.files = free, files

    def free_bytes(self) -> int | None:
        return self.free

    def free_files(self) -> int | None:
        return self.files


def test_bl_43_a_volume_without_room_is_refused_before_step_0() -> None:
    with pytest.raises(DiskFull) as raised:
        preflight(Volume(10 * MiB), 64 * MiB, keep=3)
    assert raised.value.exit_code == 79
    assert raised.value.values == {"path": "/mnt/full", "needed": 64 * MiB, "free": 10 * MiB}
    assert all(part in str(raised.value) for part in ("/mnt/full", "64.0 MiB", "10.0 MiB", "checkpoint.dir"))


def test_r9_missing_inodes_are_told_apart() -> None:
    with pytest.raises(DiskFull, match="inodes") as raised:
        preflight(Volume(10**12, files=5), 64 * MiB, keep=3, ranks=4)
    assert raised.value.values == {"path": "/mnt/full", "needed": 8, "free": 5}
    assert preflight(Volume(10**12, files=8), 64 * MiB, keep=3, ranks=4) == []


def test_r8_less_than_two_is_warned_of() -> None:
    (note,) = preflight(Volume(100 * MiB), 64 * MiB, keep=3)
    assert "second save will fail" in note and "100 MiB" in note
    (note,) = preflight(Volume(150 * MiB), 64 * MiB, keep=3)
    assert "checkpoint.keep = 3 needs 256 MiB" in note
    assert preflight(Volume(256 * MiB), 64 * MiB, keep=3) == []
    assert preflight(Volume(None), 64 * MiB, keep=3) == []  # an object store does not say
    # A resumed run needs room for one more only.
    assert preflight(Volume(65 * MiB), 64 * MiB, keep=3, present=3) == []


def test_a_checkpoint_is_weights_and_moments() -> None:
    adamw, sgd = OptimizerSection(), OptimizerSection(name="sgd")
    assert checkpoint_bytes([1000, 24], adamw) == pytest.approx(12 * 1024, abs=3 * 1024)
    assert checkpoint_bytes([10**6], sgd) == pytest.approx(4 * 10**6, abs=2048)
    assert checkpoint_bytes([10**6], adamw, 8) == pytest.approx(24 * 10**6, abs=2048)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], 4),
        (["parallel.dp_shard=4"], 4),
        (["parallel.dp_shard=2"], 4),
        (["parallel.dp_shard=2", "parallel.precision=fp64"], 4),
    ],
)
def test_each_rank_stages_its_share(words: list[str], parts: int) -> None:
    resolved = resolve_job(load_job(None, words), 4, probe_host())
    width = 8 if resolved.precision == "fp64" else 4
    state = layout_cost(
        parameter_sizes(resolved.spec, width), resolved.layout, resolved.job.optimizer, resolved.ddp, resolved.fsdp, 1
    ).state
    share = staging_bytes(state, resolved.layout)
    whole = fixed_plan(resolved, "here")["chosen"]["checkpoint_bytes"]
    assert share * parts == pytest.approx(whole, rel=0.02)
    if resolved.host.device_kind == "cpu":
        assert resolved.memory.buffers_bytes >= share
