"""Groups that run one collective after the other."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from tests.pool.pool import Pool
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from paceline.workers.gloo import THREADS

LARGE, SMALL = 4 << 20, 8
TIMES = 20


def groups(rank: int, world_size: int) -> list[tuple[int, bool, datetime.timedelta]]:
    """Threads, kind and timeout of the world's group, of a new one and of a mesh's."""
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("one", "all"))
    made = [dist.group.WORLD, dist.new_group([0, 1]), mesh.get_group("all")]
    found = []
    for number, group in enumerate(made):
        assert group is not None
        distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=40 + number), group)
        backend = group._get_backend(torch.device("cpu"))
        kind = isinstance(backend, distributed_c10d.ProcessGroupGloo)
        found.append((backend.options._threads, kind, backend.options._timeout))
    return found


def overtakings(rank: int, world_size: int) -> int:
    """How often a small sum was through before a large one of the same group that began earlier."""
    found = 0
    for _ in range(TIMES):
        large, small = torch.ones(LARGE), torch.ones(SMALL)
        first, second = (dist.all_reduce(x, async_op=True) for x in (large, small))
        while not second.is_completed():
            pass
        found += not first.is_completed()
        first.wait()
        second.wait()
        assert large[-1] == small[-1] == world_size
    return found


def test_every_group_has_one_thread_and_keeps_its_place_in_torch(pool: Pool) -> None:
    for found in pool.run(groups, 2):
        assert [(threads, kind) for threads, kind, _ in found] == [(THREADS, True)] * 3
        assert found[1][2] == datetime.timedelta(seconds=41)


def test_no_collective_overtakes_an_earlier_one_of_its_group(pool: Pool) -> None:
    """Two that end at once would both write the group's note of the last one."""
    assert pool.run(overtakings, 2) == [0, 0]
