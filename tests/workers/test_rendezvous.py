"""Joining: who may, who may not, and how long it takes to say so."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.pool.pool import Pool, RankFailed

from paceline.errors import JobError, Stalled
from paceline.workers import ports, rendezvous, run_store
from paceline.workers.barrier import store_barrier


def meet(rank: int, world_size: int, run_ids: list[str], start_timeout: float) -> float:
    world = rendezvous.join(20.0, start_timeout=start_timeout, run_id=run_ids[rank])
    value = torch.ones(1)
    dist.all_reduce(value)
    rendezvous.leave(world)
    return value.item()


def drift(rank: int, world_size: int) -> float:
    world = rendezvous.join(1.0, run_id="a")
    if rank == 0:
        time.sleep(2.5)
    world.host_barrier("evaluation")
    value = torch.ones(1)
    dist.all_reduce(value)
    rendezvous.leave(world)
    return value.item()


def meet_twice_the_same(rank: int, world_size: int) -> None:
    os.environ["RANK"] = "1" if rank else "0"
    rendezvous.join(20.0, start_timeout=3.0)


def meet_a_stranger(rank: int, world_size: int) -> float:
    os.environ.update(RANK="1", WORLD_SIZE="2")
    run_store.HANDSHAKE_SECONDS = 0.5
    began = time.monotonic()
    try:
        rendezvous.join(20.0, start_timeout=60.0)
    finally:
        assert time.monotonic() - began < 10
    return 0.0


def meet_nobody(rank: int, world_size: int) -> None:
    os.environ.update(RANK="1", WORLD_SIZE="2")
    rendezvous.join(20.0, start_timeout=0.5)


def address(port: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    with ports.listen() as listener:
        return int(listener.getsockname()[1])


def test_ranks_of_one_run_meet(pool: Pool) -> None:
    assert pool.run(meet, 3, ["a", "a", "a"], 20.0, env=address(free_port()), group=False) == [3.0] * 3


# BL-87
def test_ranks_may_drift_at_a_host_barrier_for_longer_than_a_collective_may_take(pool: Pool) -> None:
    assert pool.run(drift, 3, env=address(free_port()), group=False) == [3.0] * 3


# BL-70
def test_a_process_of_another_run_cannot_join(pool: Pool) -> None:
    with pytest.raises(RankFailed) as caught:
        pool.run(meet, 2, ["a", "b"], 3.0, env=address(free_port()), group=False)
    assert caught.value.rank == 1 and isinstance(caught.value.exception, JobError)
    assert "this process belongs to run 'b' of 2 ranks, but those that meet here belong to run 'a'" in str(caught.value)


def test_two_processes_of_one_rank_are_refused(pool: Pool) -> None:
    with pytest.raises(RankFailed, match="two processes call themselves rank 1 of run 'none' of 3 ranks"):
        pool.run(meet_twice_the_same, 3, env=address(free_port()), group=False)


# BL-70
def test_a_stranger_at_the_port_is_named(pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        with pytest.raises(RankFailed) as caught:
            pool.run(meet_a_stranger, 1, env=address(port), group=False)
    assert isinstance(caught.value.exception, JobError)
    assert f"cannot join at 127.0.0.1 port {port}, held by process {os.getpid()}" in str(caught.value)


# BL-70
def test_a_port_that_rank_0_cannot_have_is_named(pool: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(RankFailed) as caught:
            pool.run(meet, 1, ["a"], 5.0, env=address(port), group=False)
    assert isinstance(caught.value.exception, JobError) and caught.value.exception.values["pid"] == os.getpid()


def test_an_absent_rank_0_is_said(pool: Pool) -> None:
    port = free_port()
    with pytest.raises(RankFailed, match=f"rank 0 did not listen at 127.0.0.1 port {port} within 500 ms"):
        pool.run(meet_nobody, 1, env=address(port), group=False)


def test_a_store_barrier_lets_nobody_through_before_the_last() -> None:
    store = dist.HashStore()
    passed: list[int] = []
    threads = [
        threading.Thread(target=lambda rank=rank: (store_barrier(store, "b", rank, 3, 10.0), passed.append(rank)))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert passed == []
    store_barrier(store, "b", 2, 3, 10.0)
    for thread in threads:
        thread.join(10)
    assert sorted(passed) == [0, 1]


def test_a_store_barrier_names_who_did_not_come() -> None:
    store = dist.HashStore()
    store.set("b/rank-2", "here")
    with pytest.raises(Stalled, match="waited 100 ms at 'b' for ranks 1, 3"):
        store_barrier(store, "b", 0, 4, 0.1)
