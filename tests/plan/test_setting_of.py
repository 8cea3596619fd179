"""The setting of a job on a cluster: what was measured before the catalogue, and everything that was assumed said."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.cluster.catalogue import device
from paceline.cluster.measured import Compute, Curve, MeasuredCluster, save_measured
from paceline.cluster.probe import Host
from paceline.cluster.spec import Cluster
from paceline.errors import UsageError
from paceline.job.resolve import resolve_job
from paceline.parallel.pipeline.config import PipelineConfig
from paceline.plan.machine import ASSUMED_FABRIC, machine
from paceline.plan.search import Search
from paceline.plan.setting import Setting
from paceline.plan.setting_of import fewer_blocks, setting_of
from paceline.plan.step_time import predict_step, spread
from tests.cluster.test_measured import COLLECTIVES, DATE, FIT
from tests.plan.places import CPU, cluster, job

RATES = Curve("matmul", "fp32", (256, 512), (1e11, 2e11), (0.01, 0.02))
COMPUTE = Compute(DATE, "paceline bench compute", (RATES,), 2e10, 5e-6)


@pytest.fixture
def measured(tmp_path: Path) -> MeasuredCluster:
    return save_measured(tmp_path / "cluster.toml", CPU, 1, 4, collectives=COLLECTIVES, compute=COMPUTE)


def setting(place: Cluster, *words: str) -> Setting:
    return setting_of(resolve_job(job(*words), place.devices, place.host, ranks_per_host=place.devices_per_node), place)


def test_measured_rates_take_the_place_of_the_catalogues(measured: MeasuredCluster) -> None:
    place = msgspec.structs.replace(cluster("1x4xcpu"), measured=measured)
    found = setting(place, "parallel.precision=fp32")
    curve = found.device.curves[0]
    assert (curve.sizes, curve.rates) == ((2 * 256**3, 2 * 512**3), RATES.rates)
    assert found.device.peak["fp32"] == 2e11, "a processor's peak is the best that was seen"
    assert (found.device.memory_bytes_per_second, found.device.memory_reached) == (2e10, 1.0)
    assert found.device.launch_seconds == 5e-6
    # An all-reduce of 4 ranks moves 1.5 times its size over each rank's link.
    assert found.link is not None and found.link.reached_bytes_per_second == pytest.approx(1.5 * FIT.bytes_per_second)
    assert found.fits == (FIT,)
    assert any(DATE in told for told in found.assumed)
    plain = setting(cluster("1x4xcpu"), "parallel.precision=fp32")
    assert plain.fits == () and predict_step(plain).seconds != predict_step(found).seconds


def test_bounds_hold_where_collectives_were_measured(measured: MeasuredCluster) -> None:
    place = msgspec.structs.replace(cluster("1x4xcpu"), measured=measured)
    looking = Search(job("parallel.precision=fp32", "model.num_layers=4"), place)
    pool = looking.pool(looking.allowed())
    order = looking.in_order(pool)
    for index in order[:: max(1, len(order) // 60)]:
        choice = pool.choice(int(index))
        assert pool.seconds[index] <= looking.scale.step(looking.scale.setting_of(choice)).seconds, choice


def test_a_rank_of_a_processor_has_its_share_of_the_cores() -> None:
    whole, half = machine(cluster("1x1xcpu")), machine(cluster("1x2xcpu"))
    assert whole.device.peak["fp32"] == 8 * device("cpu").peak["fp32"] == 2 * half.device.peak["fp32"]
    assert whole.device.curves[0].rates[0] == 2 * half.device.curves[0].rates[0]
    assert "4 of the host's 8 cores" in half.assumed[0]
    assert half.device.peak["bf16"] == 2 * half.device.peak["fp32"], "this host has instructions for bf16"


def test_a_fabric_that_is_not_named_is_assumed_and_said() -> None:
    found = machine(cluster("2x8xh100-sxm"))
    assert found.fabric is not None and ASSUMED_FABRIC in found.assumed[0]
    assert found.fabric.bytes_per_second == pytest.approx(100e9 / 8 / 8), "one port for 8 devices"
    assert machine(cluster("1x8xh100-sxm")).assumed == ()


def test_an_accelerator_that_the_catalogue_lacks_is_refused_by_name() -> None:
    host = Host("test", "cuda", 1, "Some Accelerator", 2**34, 8, 2**34, True, None)
    with pytest.raises(UsageError, match="Some Accelerator") as raised:
        machine(Cluster("here", 1, 1, host))
    assert "h100-sxm" in (raised.value.hint or "")
    known = msgspec.structs.replace(host, device_name="NVIDIA H100 80GB HBM3")
    assert machine(Cluster("here", 1, 1, known)).device.key == "h100-sxm"


@pytest.mark.parametrize(
    ("layers", "ranks", "per_rank", "own"),
    [
        ((3, 4, 4, 3), 4, 1, [3, 4, 4, 3]),
        ((8, 8, 8, 7), 4, 1, [8, 8, 8, 7]),
        ((2, 2, 2, 2), 4, 1, [2, 2, 2, 2]),
        ((4, 4, 4, 3), 2, 2, [8, 7]),
        ((1, 2, 2, 1, 1), 5, 1, [1, 2, 2, 1, 1]),
    ],
)
def test_uneven_stages_are_told_by_what_the_ends_lack(
    layers: tuple[int, ...], ranks: int, per_rank: int, own: list[int]
) -> None:
    schedule = "1f1b" if per_rank == 1 else "interleaved-1f1b"
    first, last = fewer_blocks(PipelineConfig(schedule, ranks, per_rank, layers))
    assert sorted(spread(sum(layers), ranks, first, last)) == sorted(own)
