"""From a job of ours and a cluster to a `Setting`. What was measured of the cluster comes before the catalogue. No torch."""

from __future__ import annotations

from collections import Counter
from typing import cast

import msgspec

from paceline.cluster.device import Device, Link, ProductType
from paceline.cluster.measured import ACROSS_NODES, IN_NODE, Compute, Curve, MeasuredCluster, TierName
from paceline.cluster.spec import Cluster
from paceline.job.resolve import Resolved
from paceline.parallel.pipeline.config import PipelineConfig
from paceline.parallel.strategy import CollectiveKind
from paceline.parallel.wire import bus_factor
from paceline.plan.machine import Machine, machine
from paceline.plan.setting import Setting
from paceline.plan.step_time import spread

MEASURED_LINK: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
"""Collectives that say what a link moves, the first one that was measured."""


def setting_of(resolved: Resolved, cluster: Cluster) -> Setting:
    """The setting of a resolved job on the devices of a cluster.

    Raises:
        UsageError: the catalogue lacks the device or the fabric; names the nearest.
    """
    found = measured_machine(machine(cluster), cluster.measured)
    layout, pipeline = resolved.layout, resolved.pipeline
    few = min(cluster.devices_per_node, layout.world_size)
    fewer = fewer_blocks(pipeline)
    return Setting(
        name=resolved.job.name, spec=resolved.spec, device=found.device,
        nodes=max(1, layout.world_size // few), devices_per_node=few,
        link=found.link if few > 1 else None, fabric=found.fabric if layout.world_size > few else None,
        layout=layout, microbatch=resolved.batch.microbatch, accumulation=resolved.batch.accumulation,
        sequence_length=resolved.job.data.sequence_length,
        precision=cast("ProductType", resolved.precision),
        recompute=resolved.transforms.recompute,
        zero_stage=resolved.fsdp.zero_stage if layout.dp_shard > 1 else 0,
        schedule=pipeline.schedule, stages_per_rank=pipeline.stages_per_rank,
        first_layers=fewer[0], last_layers=fewer[1],
        sequence_parallel=resolved.tensor.sequence_parallel, context_method=resolved.context.method,
        fused_attention=not resolved.spec.attention_dropout, compile=resolved.compile,
        loss_chunk_tokens=resolved.transforms.loss_chunk_tokens,
        reduce_every_microbatch=layout.dp_shard > 1 and resolved.fsdp.reduce_every_microbatch,
        layers=pipeline.layers if resolved.job.parallel.pp_layers else (),
        parameter_dtype=resolved.transforms.parameter_dtype,
        offload=resolved.transforms.offload, ddp=resolved.ddp,
        gradient_bytes=2 if resolved.ddp.reduce_bf16 else 0, optimizer=resolved.job.optimizer,
        fits=cluster.measured.collectives.fits if cluster.measured and cluster.measured.collectives else (),
        assumed=found.assumed,
    )  # fmt: skip


def fewer_blocks(pipeline: PipelineConfig) -> tuple[int, int]:
    """Blocks that the first and the last rank of a pipeline have fewer than most: of none, or of what their counts say,
    whichever comes nearer to the blocks that each rank has."""
    if pipeline.ranks == 1:
        return 0, 0
    own = [sum(pipeline.layers[stage] for stage in pipeline.stages_of(rank)) for rank in range(pipeline.ranks)]
    usual = Counter(own[1:-1] or own).most_common(1)[0][0]
    stated = max(0, usual - own[0]), max(0, usual - own[-1])

    def off(fewer: tuple[int, int]) -> tuple[bool, int]:
        told = spread(sum(own), pipeline.ranks, *fewer)
        # Where on the way a longer stage stands changes nothing; the last one has the head besides.
        apart = sum(abs(a - b) for a, b in zip(sorted(own), sorted(told), strict=True))
        return min(told) < 1, apart + abs(own[-1] - told[-1])

    return min((0, 0), stated, key=off)


def measured_machine(found: Machine, measured: MeasuredCluster | None) -> Machine:
    """The machine with its rates replaced by those that were measured."""
    if measured is None:
        return found
    device = found.device if measured.compute is None else measured_device(found.device, measured.compute)
    return msgspec.structs.replace(
        found, device=device,
        link=_measured_link(found.link, measured, IN_NODE), fabric=_measured_link(found.fabric, measured, ACROSS_NODES),
        assumed=tuple(measured.dates()) + (found.assumed if measured.compute is None else ()),
    )  # fmt: skip


def measured_device(device: Device, compute: Compute) -> Device:
    """The device with its measured rates: products by size in FLOP, copies, launches."""
    products = tuple(
        Curve(c.operation, c.dtype, tuple(2 * n**3 for n in c.sizes), c.rates, c.spreads)
        if c.operation == "matmul" else c
        for c in compute.curves
    )  # fmt: skip
    best = {c.dtype: max(c.rates) for c in products if c.operation == "matmul"}
    # A processor has no data sheet: what its products reached at best stands for its peak.
    peak = device.peak if device.kind != "cpu" else {**device.peak, **cast("dict[ProductType, float]", best)}
    return msgspec.structs.replace(
        device, curves=products, peak=peak, memory_bytes_per_second=compute.memory_bytes_per_second, memory_reached=1.0,
        launch_seconds=compute.launch_seconds, sources=(*device.sources, f"measured {compute.date}"),
    )  # fmt: skip


def _measured_link(link: Link | None, measured: MeasuredCluster, tier: TierName) -> Link | None:
    """What a ring of the measured ranks moved: bus bandwidth of large messages, and latency of one hop."""
    for kind in MEASURED_LINK:
        fit = measured.fit(kind, tier)
        if fit is None:
            continue
        hops = {"all_reduce": 2 * (fit.ranks - 1), "send_recv": 1}.get(kind, fit.ranks - 1)
        return Link(
            name=f"measured ({kind})", bytes_per_second=fit.bytes_per_second * bus_factor(kind, fit.ranks), reached=1.0,
            latency_seconds=max(0.0, fit.latency_seconds) / max(1, hops),
            source=f"measured on {fit.ranks} ranks of {fit.nodes} nodes",
        )  # fmt: skip
    return link
