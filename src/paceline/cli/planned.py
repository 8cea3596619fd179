"""`parallel.layout = "auto"`: the planner's choice as words of the command line, the same ones for every rank."""

from __future__ import annotations

from paceline.errors import PacelineError
from paceline.job.load import Job

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from paceline.cluster.spec import Cluster


def planned_job(args: argparse.Namespace) -> tuple[Job, list[str]]:
    """The job of a command's words with the planner's layout where it asks for that, and the words of the choice, which
    `args.words` then end with. Of a range of ranks each number has a choice of its own: `planner_of`."""
    from paceline.cli.job_words import job_of
    from paceline.workers.environment import is_worker

    job = job_of(args)
    if _is_range(job) and not is_worker():
        return job, []
    chosen = planned_words(job)
    if chosen:
        args.words = [*args.words, *chosen]
        job = job_of(args)
    return job, chosen


def planner_of(args: argparse.Namespace, job: Job) -> Callable[[int, int], Job]:
    """What makes of the job the one for so many ranks on each of so many hosts."""

    def planned(procs: int, nodes: int) -> Job:
        from paceline.cli.job_words import worker_words
        from paceline.job.load import load_job, split_words

        chosen = planned_words(job, procs, nodes)
        return load_job(*split_words([*worker_words(args), *chosen])) if chosen else job

    return planned


def _is_range(job: Job) -> bool:
    return any(asked is not None and asked.least < asked for asked in (job.launch.procs_per_node, job.launch.nodes))


def planned_words(job: Job, procs: int | None = None, nodes: int | None = None) -> list[str]:
    """`section.key=value` words of the layout that the planner chooses for the ranks of this run; none unless it is asked.

    A worker's are those of the world that its launcher made, on nodes like its own; else those of `procs` ranks here, as many
    as the job asks for unless given, on each of `nodes` hosts, likewise.

    Raises:
        JobError: the job is wrong under every layout.
        PacelineError: no layout fits.
    """
    if job.parallel.layout != "auto":
        return []
    from paceline.plan.search import search

    cluster = _cluster(job, procs, nodes)
    found = search(job, cluster, shown=1)
    if not found.ranked:
        raise PacelineError(
            f"no layout of {cluster.devices} ranks has memory for this job",
            key="parallel.layout",
            values={"ranks": cluster.devices},
            hint="See paceline plan with the same words: it names what is nearest, and what would fit.",
        )
    keys = {**found.ranked[0].choice.keys(), "parallel.layout": "given"}
    return [f"{key}={value}" for key, value in keys.items()]


def _cluster(job: Job, procs: int | None, nodes: int | None) -> Cluster:
    from paceline.workers.environment import is_worker, ranks

    if not is_worker():
        return cluster_here(job, procs, nodes)
    world = ranks()
    each = world.local_world_size
    return cluster_here(job, each, max(1, world.world_size // each))


def cluster_here(job: Job, procs: int | None = None, nodes: int | None = None) -> Cluster:
    """Hosts like this one: as many, and each with as many devices, as given or else as the job says."""
    import msgspec

    from paceline.cluster.probe import probe_host
    from paceline.cluster.spec import HERE, parse_cluster

    here = parse_cluster(HERE, probe_host())
    return msgspec.structs.replace(
        here,
        nodes=nodes or int(job.launch.nodes or 1),
        devices_per_node=procs or int(job.launch.procs_per_node or here.devices),
    )
