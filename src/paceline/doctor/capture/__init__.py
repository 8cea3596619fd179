"""A snapshot of this machine. Each probe may fail by itself: what it would have captured is then missing, with the reason."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.cluster.probe import find_compiler
from paceline.doctor.capture import gpu, nccl_log, network, processor, rdma, system
from paceline.doctor.host import PARTS, Host, Place
from paceline.workers import environment

Probe = Callable[[], Any]


def capture(
    folders: Mapping[str, Path] | None = None,
    *,
    port: int | None = None,
    write_probe: bool = False,
    peers: tuple[str, ...] = (),
) -> Host:
    """This machine, now.

    Args:
        folders: directories that a job uses, by role; those of every job (shm, tmp, home, run) are added.
        port: TCP port that a run would listen on.
        write_probe: whether to measure how fast the checkpoint folder takes bytes.
        peers: names of other hosts that this one must reach.
    """
    probes: dict[str, Probe] = {
        "environment": system.environment_variables,
        "cpu": processor.cpu,
        "memory": processor.memory,
        "limits": system.limits,
        "folders": lambda: system.folders(folders or {}, write_probe),
        "interfaces": network.interfaces,
        "rdma": rdma.ports,
        "names": network.names,
        "peers": lambda: network.peers(peers),
        "port": lambda: network.port(port),
        "clock": system.clock,
        "versions": system.versions,
        "gpus": gpu.gpus,
        "topology": gpu.topology,
        "processes": gpu.processes,
        "xids": gpu.xids,
        "transports": lambda: nccl_log.transports(os.environ.get("NCCL_DEBUG_FILE", "")),
        "peer_memory": rdma.peer_memory,
        "bridges_checked": rdma.bridges_checked,
    }
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, probe in probes.items():
        try:
            found[name] = probe()
        except Exception as error:
            missing[name] = _reason(error)
    env = found.get("environment", {})
    return Host(
        name=system.host_name(),
        taken=time.time(),
        place=_place(),
        files=system.named_files(env),
        gpu_devices=gpu.on_the_bus(),
        virtual=system.is_virtual(),
        compiler=find_compiler(),
        missing={part: missing[part] for part in PARTS if part in missing},
        **found,
    )


def _reason(error: Exception) -> str:
    text = str(error).splitlines()
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return text[0] if text else type(error).__name__


def _place() -> Place | None:
    if not environment.is_worker():
        return None
    ranks = environment.ranks()
    return Place(
        rank=ranks.rank, local_rank=ranks.local_rank, world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
    )  # fmt: skip
