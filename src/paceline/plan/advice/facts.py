"""What rules of advice look at: the job, its cluster, what the search found, and the same job on one device. No torch."""

from __future__ import annotations

import msgspec

from paceline.cluster.spec import Cluster
from paceline.job.load import Job
from paceline.model.spec import ModelSpec, parameter_count
from paceline.plan.search import Found, search
from paceline.plan.weigh import Weighed, with_keys

STATE_BYTES_PER_PARAMETER = 16
"""Weight, gradient and two moments of AdamW, four bytes each; mixed precision with 16-bit weights comes to as much."""


class Facts(msgspec.Struct, frozen=True):
    """`best` is the chosen layout; `alone` the best one on a single device, None where the job does not fit on it."""

    job: Job
    cluster: Cluster
    spec: ModelSpec
    best: Weighed
    alone: Weighed | None

    @property
    def parameters(self) -> int:
        return parameter_count(self.spec)

    @property
    def state_bytes(self) -> int:
        """Of the whole model, wherever it is kept."""
        return STATE_BYTES_PER_PARAMETER * self.parameters

    @property
    def devices(self) -> int:
        return self.cluster.devices

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return self.best.resolved.memory_available_bytes

    @property
    def batch_tokens(self) -> int:
        return self.best.setting.tokens_per_step

    @property
    def tokens(self) -> int | None:
        """Of the whole run; None where its length is in epochs of data that is not read yet."""
        steps = self.best.resolved.steps
        return None if steps is None else steps * self.batch_tokens

    @property
    def run_seconds(self) -> float | None:
        steps = self.best.resolved.steps
        return None if steps is None else steps * self.best.seconds


def facts_of(found: Found, job: Job, cluster: Cluster) -> Facts | None:
    """The facts of a search; None where it found nothing that fits."""
    if not found.ranked:
        return None
    best = found.ranked[0]
    return Facts(job, cluster, best.setting.spec, best, best if cluster.devices == 1 else on_one_device(job, cluster))


def on_one_device(job: Job, cluster: Cluster) -> Weighed | None:
    """The job on a single device of the cluster, with a layout of its own."""
    single = msgspec.structs.replace(cluster, nodes=1, devices_per_node=1)
    if cluster.host.device_kind == "cpu":
        # A rank keeps its share of the host: one of them does not get the cores of all.
        host = msgspec.structs.replace(
            cluster.host,
            memory_bytes=cluster.host.memory_bytes // cluster.devices_per_node,
            cores=max(1, cluster.host.cores // cluster.devices_per_node),
        )
        single = msgspec.structs.replace(single, host=host)
    found = search(with_keys(job, {}, *ONE_DEVICE), single, shown=1, name_nearest=False)
    return found.ranked[0] if found.ranked else None


ONE_DEVICE = ("parallel.pp_layers", "parallel.reduce_every", "parallel.reduce_dtype", "parallel.bucket_bytes",
              "parallel.overlap", "parallel.sequence_parallel", "parallel.cp_method")  # fmt: skip
"""Keys that have no effect on one device."""
