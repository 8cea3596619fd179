"""Clusters and jobs that tests of the search plan for."""

from __future__ import annotations

import msgspec

from paceline.cluster.probe import Host
from paceline.cluster.spec import Cluster, parse_cluster
from paceline.job.load import Job, load_job

CPU = Host("test", "cpu", 0, "a processor", 2**34, 8, 2**34, True, None)


def cluster(text: str, memory_bytes: int | None = None) -> Cluster:
    """A described cluster whose devices have another memory, where given."""
    found = parse_cluster(text, CPU)
    if memory_bytes is None:
        return found
    host = msgspec.structs.replace(found.host, device_memory_bytes=memory_bytes, memory_bytes=memory_bytes)
    return msgspec.structs.replace(found, host=host)


def job(*words: str) -> Job:
    return load_job(None, ["batch.global_batch=8", "data.sequence_length=64", *words])
