"""CPUs near each rank's device, read from folders as the kernel lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.workers.near import device_cpus

BUSES = ("0000:07:00.0", "0000:0f:00.0", "0000:47:00.0", "0000:4e:00.0")
NEAR = {"0000:07:00.0": "0-3,16-19", "0000:0f:00.0": "0-3,16-19", "0000:47:00.0": "4-7", "0000:4e:00.0": "4-7"}


@pytest.fixture
def drivers(tmp_path: Path) -> tuple[Path, ...]:
    for bus in BUSES:
        (tmp_path / "driver" / bus).mkdir(parents=True)
        (tmp_path / "pci" / bus).mkdir(parents=True)
        (tmp_path / "pci" / bus / "local_cpulist").write_text(NEAR[bus] + "\n")
    # The folder of a driver holds other entries too.
    (tmp_path / "driver" / "module").mkdir()
    return (tmp_path / "nowhere", tmp_path / "driver")


FIRST, SECOND = (0, 1, 2, 3, 16, 17, 18, 19), (4, 5, 6, 7)


def test_each_rank_has_the_cpus_of_its_device_s_node(tmp_path: Path, drivers: tuple[Path, ...]) -> None:
    assert device_cpus(4, {}, drivers, tmp_path / "pci") == [FIRST, FIRST, SECOND, SECOND]
    assert device_cpus(2, {}, drivers, tmp_path / "pci") == [FIRST, FIRST]


def test_visible_devices_are_counted_in_their_order(tmp_path: Path, drivers: tuple[Path, ...]) -> None:
    assert device_cpus(2, {"CUDA_VISIBLE_DEVICES": "3,0"}, drivers, tmp_path / "pci") == [SECOND, FIRST]


@pytest.mark.parametrize("visible", ["GPU-5e2e", "-1", "", "0,9"])
def test_devices_that_are_not_numbered_are_nobody_s(tmp_path: Path, drivers: tuple[Path, ...], visible: str) -> None:
    assert device_cpus(1, {"CUDA_VISIBLE_DEVICES": visible}, drivers, tmp_path / "pci") == []


def test_nothing_is_near_without_devices(tmp_path: Path, drivers: tuple[Path, ...]) -> None:
    assert device_cpus(5, {}, drivers, tmp_path / "pci") == []
    assert device_cpus(1, {}, (tmp_path / "nowhere",), tmp_path / "pci") == []
    (tmp_path / "pci" / BUSES[0] / "local_cpulist").unlink()
    assert device_cpus(1, {}, drivers, tmp_path / "pci") == []
