"""From a job and the hosts it would run on to the numbers that checks weigh. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.checkpoint import grace
from paceline.checkpoint.space import checkpoint_bytes
from paceline.cluster import probe
from paceline.data.shared import shared_memory_need
from paceline.doctor.host import Host
from paceline.doctor.job_facts import BYTES_PER_TOKEN, PREFETCH, JobFacts, broken
from paceline.errors import JobError
from paceline.job.load import Job
from paceline.job.resolve import Resolved, resolve_job
from paceline.model.spec import parameter_count
from paceline.optim.schedule import batch_factor


def facts_of(job: Job, hosts: Sequence[Host]) -> JobFacts:
    """The job on these hosts, with as many ranks on each as `launch.procs_per_node` says or the host has devices for."""
    here = _machine(hosts[0])
    each = int(job.launch.procs_per_node or hosts[0].local_ranks())
    names = dict.fromkeys(host.name for host in hosts)
    try:
        resolved = resolve_job(job, each * len(names), here, ranks_per_host=each)
    except JobError as error:
        return broken(job.name, error)
    return _facts(resolved, each, hosts[0])


def _facts(resolved: Resolved, each: int, host: Host) -> JobFacts:
    job, batch, optimizer = resolved.job, resolved.batch, resolved.job.optimizer
    took = grace.measured_in(job.run_path)
    promised = grace.chain(took, float(job.recovery.grace), host.environment)
    on_cpu = resolved.host.device_kind == "cpu"
    element = 8 if resolved.precision == "fp64" else 4
    return JobFacts(
        name=job.name,
        world_size=resolved.layout.world_size,
        local_ranks=each,
        global_batch=batch.global_batch,
        data_ranks=batch.dp,
        microbatch=batch.microbatch,
        accumulation=batch.accumulation,
        tokens_per_step=resolved.tokens_per_step,
        optimizer=optimizer.name,
        lr=optimizer.lr,
        lr_factor=batch_factor(optimizer, batch.global_batch),
        lr_scaling=optimizer.lr_scaling,
        lr_reference_batch=optimizer.lr_reference_batch,
        warmup_steps=int(optimizer.warmup_steps),
        clip_norm=optimizer.clip_norm,
        parameters=parameter_count(resolved.spec),
        steps=resolved.steps,
        loader_workers=job.data.workers,
        shared_memory=shared_memory_need(
            batch_bytes=batch.per_rank * job.data.sequence_length * BYTES_PER_TOKEN,
            workers=job.data.workers, prefetch=PREFETCH, ranks=1,
        ),
        memory=resolved.memory.total_bytes,
        memory_available=resolved.memory_available_bytes,
        on_cpu=on_cpu,
        checkpoint=checkpoint_bytes(resolved.spec, optimizer, element),
        checkpoint_place=job.checkpoint.place(job.run_path),
        keep=job.checkpoint.keep,
        port=job.launch.port,
        collective_timeout=job.recovery.collective_seconds,
        threads=job.launch.threads,
        saved=took.save,
        step_seconds=took.step,
        grace=promised.grace,
        grace_source=promised.source,
    )  # fmt: skip


def _machine(host: Host) -> probe.Host:
    """A captured host as the planner reads one."""
    gpus, memory = host.gpus, host.memory
    limit = min(memory.limit or memory.total, memory.total) if memory else 0
    return probe.Host(
        name=host.name,
        device_kind="cuda" if gpus else "cpu",
        devices=len(gpus),
        device_name=gpus[0].name if gpus else (host.cpu.model if host.cpu else ""),
        device_memory_bytes=gpus[0].memory if gpus else limit,
        cores=host.cpu.usable if host.cpu else 1,
        memory_bytes=limit,
        fast_bf16=bool(gpus) or (host.cpu is not None and host.cpu.bf16),
        compiler=host.compiler,
        fp16=bool(gpus) or (host.cpu is not None and host.cpu.fp16),
    )
