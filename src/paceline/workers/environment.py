"""The variables through which a launcher tells a worker who it is. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = "PACELINE_WORKER_FOLDER"
RUN_ID = "PACELINE_RUN_ID"
LISTEN_FD = "PACELINE_LISTEN_FD"
PARENT = "PACELINE_PARENT_PID"
CPUS = "PACELINE_CPUS"
TERMINAL = "PACELINE_TERMINAL_COLUMNS"
BEFORE = "PACELINE_BEFORE_WORKER"
"""A module that a worker imports before its own, and whose `arm()` it calls: how a drill gets its faults in."""

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
ELASTIC = "TORCHELASTIC_"
"""What torchrun's agent tells its workers of itself begins with this; a run inside such a worker must not hear it."""

OWN = (FOLDER, RUN_ID, LISTEN_FD, PARENT, CPUS, TERMINAL)


class Ranks(NamedTuple):
    """This process's place, with torchrun's meaning of each word."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    group_rank: int


def is_worker(env: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher (ours or torchrun) started this process as one rank."""
    env = os.environ if env is None else env
    return "RANK" in env and "WORLD_SIZE" in env


def is_supervised() -> bool:
    """Whether our own launcher started this process and waits for its verdict."""
    return FOLDER in os.environ


def ranks(env: Mapping[str, str] | None = None) -> Ranks:
    """The place of this process; alone it is rank 0 of 1."""
    env = os.environ if env is None else env
    if not is_worker(env):
        return Ranks(0, 0, 1, 1, 0)
    rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
    local_world_size = int(env.get("LOCAL_WORLD_SIZE", world_size))
    local_rank = int(env.get("LOCAL_RANK", rank % local_world_size))
    return Ranks(rank, local_rank, world_size, local_world_size, int(env.get("GROUP_RANK", rank // local_world_size)))


def folder() -> Path | None:
    """Where this worker leaves its verdict and heartbeat, or None without a supervisor."""
    path = os.environ.get(FOLDER)
    return Path(path) if path else None


def terminal_columns() -> int | None:
    """Width of the terminal that shows rank 0's output, or None where none does: a worker writes into a pipe."""
    text = os.environ.get(TERMINAL, "")
    return int(text) if text.isdigit() else None
