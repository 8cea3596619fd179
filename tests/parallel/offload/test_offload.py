"""Moments elsewhere against torch.optim.AdamW: equal to the bit; memory against what the moments weigh."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import DiskFull, JobError
from paceline.optim.config import OptimizerSection
from paceline.optim.optimizer import apply_step, build_optimizer, parameter_groups
from paceline.parallel.config import ParallelSection
from paceline.parallel.offload.apply import OffloadedAdamW, offloaded_adamw
from paceline.parallel.offload.config import OffloadConfig, file_system_of, offload_config
from paceline.parallel.offload.cost import CHUNK_ELEMENTS, moved_bytes, resident_moments_bytes
from paceline.parallel.offload.store import MappedFile, PinnedHost

ADAMW = OptimizerSection(weight_decay=0.1, eps=1e-6)
SHAPES = [(130, 70), (33,), (1,), (257, 129), (5, 3)]


def module(dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    return nn.ParameterDict(
        {f"p{i}": nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for i, s in enumerate(SHAPES)}
    )


def walk(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(3)
    for at in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        dtype = next(model.parameters()).dtype
        apply_step(optimizer, torch.tensor(0.37, dtype=dtype), 1e-2 * (at + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [4096, 2**22])
def test_weights_and_moments_are_bitwise_those_of_adamw(tmp_path: Path, dtype: torch.dtype, chunk: int) -> None:
    plain, offloaded = module(dtype), module(dtype)
    reference = build_optimizer(ADAMW, plain.named_parameters())
    optimizer = OffloadedAdamW(
        parameter_groups(offloaded.named_parameters(), ADAMW.weight_decay), lr=ADAMW.lr, betas=ADAMW.betas,
        eps=ADAMW.eps, make_store=lambda n, kind: MappedFile(tmp_path, n, kind), chunk_elements=chunk,
    )  # fmt: skip
    walk(plain, reference)
    walk(offloaded, optimizer)
    for p, q in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(p, q)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(reference.state[p][name], optimizer.state[q][name])


def test_host_memory_gives_the_same(tmp_path: Path) -> None:
    plain, offloaded = module(torch.float32), module(torch.float32)
    walk(plain, build_optimizer(ADAMW, plain.named_parameters()))
    walk(offloaded, offloaded_adamw(ADAMW, offloaded.named_parameters(), OffloadConfig("host")))
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), offloaded.parameters(), strict=True))


def test_state_goes_into_another_optimizer_and_back(tmp_path: Path) -> None:
    first, second = module(torch.float32), module(torch.float32)
    config = OffloadConfig("disk", tmp_path)
    source = offloaded_adamw(ADAMW, first.named_parameters(), config)
    walk(first, source)
    second.load_state_dict(first.state_dict())
    target = offloaded_adamw(ADAMW, second.named_parameters(), config)
    target.load_state_dict(source.state_dict())
    walk(first, source, 2)
    walk(second, target, 2)
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


def test_a_parameter_without_a_gradient_stays(tmp_path: Path) -> None:
    model = module(torch.float32)
    optimizer = offloaded_adamw(ADAMW, model.named_parameters(), OffloadConfig("disk", tmp_path))
    first, *others = model.parameters()
    before = first.detach().clone()
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.equal(first, before)
    assert optimizer.state[first]["step"] == 0 and optimizer.state[others[0]]["step"] == 1


def test_nothing_stays_in_the_folder(tmp_path: Path) -> None:
    model = module(torch.float32)
    optimizer = offloaded_adamw(ADAMW, model.named_parameters(), OffloadConfig("disk", tmp_path / "made"))
    assert list((tmp_path / "made").iterdir()) == []
    walk(model, optimizer, 1)


def test_a_full_disk_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull) as caught:
        MappedFile(tmp_path, 1 << 20, torch.float32)
    assert "4.00 MiB" in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "offload_dir" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match="offload_dir"):
        MappedFile(tmp_path / "file" / "folder", 8, torch.float32)


def test_places_without_effect_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.parallel.offload.config.MEMORY_FILE_SYSTEMS", frozenset())
    with pytest.raises(JobError, match="no effect where ranks run on the processor"):
        offload_config(ParallelSection(offload="host"), "cpu", tmp_path)
    assert offload_config(ParallelSection(offload="host"), "cuda", tmp_path).place == "host"
    assert offload_config(ParallelSection(offload="disk"), "cpu", tmp_path).folder == tmp_path
    named = ParallelSection(offload="disk", offload_dir=str(tmp_path / "x"))
    assert offload_config(named, "cpu", tmp_path).folder == tmp_path / "x"


@pytest.mark.skipif(file_system_of(Path("/dev/shm")) != "tmpfs", reason="no tmpfs at /dev/shm")
def test_a_folder_in_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="its files are memory"):
        offload_config(ParallelSection(offload="disk", offload_dir="/dev/shm/moments"), "cpu", tmp_path)


def test_mounts_inside_each_other(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("none / ext4 rw 0 0\nnone /scratch tmpfs rw 0 0\nnone /scratch/nvme xfs rw 0 0\n")
    assert file_system_of(Path("/home/x"), mounts) == "ext4"
    assert file_system_of(Path("/scratch/x"), mounts) == "tmpfs"
    assert file_system_of(Path("/scratch/nvme/x/y"), mounts) == "xfs"
    assert file_system_of(Path("/home"), tmp_path / "none") is None


def test_cost_of_offloaded_moments() -> None:
    whole = 2 * 10**9 * 4
    assert resident_moments_bytes(whole, 10**9, 100, 4, "none") == whole
    assert resident_moments_bytes(whole, 10**9, 100, 4, "disk") == 2 * CHUNK_ELEMENTS * 4 + 400
    assert resident_moments_bytes(800, 100, 0, 4, "disk") == 800
    assert moved_bytes(10**9, 4, "disk") == 2 * whole and moved_bytes(10**9, 4, "none") == 0


CHILD = """
import json, sys
from pathlib import Path
import torch
from paceline.optim.config import OptimizerSection
from paceline.optim.optimizer import build_optimizer, apply_step
from paceline.parallel.offload.apply import offloaded_adamw
from paceline.parallel.offload.config import OffloadConfig
torch.set_num_threads(1)
rows = 24 * 2**20 // 1024

def status(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) * 1024

def optimizer(named):
    if sys.argv[1] == "none":
        return build_optimizer(OptimizerSection(), named)
    return offloaded_adamw(OptimizerSection(), named, OffloadConfig("disk", Path(sys.argv[2])))

small = [("p", torch.nn.Parameter(torch.ones(64, 64)))]
small[0][1].grad = torch.ones(64, 64)
apply_step(optimizer(small), torch.tensor(1.0), 1e-3)
before = status("VmRSS")
named = [(f"p{i}", torch.nn.Parameter(torch.ones(rows // 4, 1024))) for i in range(4)]
for _, p in named:
    p.grad = torch.ones_like(p)
made = optimizer(named)
for _ in range(3):
    apply_step(made, torch.tensor(1.0), 1e-3)
print(json.dumps({"growth": status("VmHWM") - before, "weights": rows * 1024 * 4}))
"""


def child(place: str, folder: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, place, str(folder)], capture_output=True, text=True, timeout=60, check=True
    )
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_falls_by_the_moments(tmp_path: Path) -> None:
    """25 M weights: moments of 201 MB go to the disk, a chunk of 34 MB stays."""
    kept, offloaded = child("none", tmp_path), child("disk", tmp_path)
    elements = kept["weights"] // 4
    moments = 8 * elements
    saved = moments - resident_moments_bytes(moments, elements, 4, 4, "disk")
    assert kept["growth"] - offloaded["growth"] == pytest.approx(saved, rel=0.1)


def test_pinned_host_memory_starts_from_zeros() -> None:
    store = PinnedHost(10, torch.float32)
    store.release(0, 10)
    assert store.flat.shape == (10,) and not store.flat.any()
