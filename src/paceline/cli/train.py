"""`paceline train`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from pathlib import Path
    from typing import Any

    from paceline.job.resolve import Resolved

EXAMPLE = """\
example:
  paceline train examples/tiny.toml run.steps=30 parallel.precision=fp32 --procs 2
  torchrun --nproc-per-node 2 -m paceline train examples/tiny.toml run.steps=5
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="JOB.toml | section.key=value", help="a job file and overrides")
    parser.add_argument(
        "--procs", metavar="N|MIN:MAX", help="local worker processes, or a range of them; one per device unless given"
    )
    parser.add_argument("--explain", action="store_true", help="print the resolved job and its origins; start nothing")


def run(args: argparse.Namespace) -> int:
    from paceline.cli import print_document, say
    from paceline.cli.job_words import worker_words
    from paceline.cli.planned import planned_job, planner_of
    from paceline.workers.environment import is_worker

    job, chosen = planned_job(args)
    if chosen and not is_worker():
        say(f"layout = auto: {' '.join(chosen)}")
    if is_worker() and not args.explain:
        # By name: the supervisor must not pay for the import of torch.
        import importlib

        return int(importlib.import_module("paceline.train.worker").run_worker(job, _plan_here, _write_report))
    if args.explain:
        from paceline.cli.explain import explain
        from paceline.cluster.probe import probe_host
        from paceline.job.resolve import procs_here, resolve_here

        most = planner_of(args, job)(procs_here(job, probe_host()), int(job.launch.nodes or 1))
        return explain(resolve_here(most), as_json=args.json)
    from paceline.train.run import supervise

    summary = supervise(job, worker_words(args), _plan_here, _write_report, planner_of(args, job))
    if args.json:
        print_document("train", summary)
    return int(summary["exit"])


def _plan_here(resolved: Resolved) -> dict[str, Any]:
    """What is predicted for a run on this host; without times where the catalogue does not know its devices."""
    import msgspec

    from paceline.cluster.spec import HERE, parse_cluster
    from paceline.errors import UsageError
    from paceline.job.resolve import procs_here
    from paceline.plan.figures import fixed_with_time
    from paceline.plan.fixed import fixed_plan

    try:
        cluster = parse_cluster(HERE, resolved.host)
        ranks, nodes = resolved.layout.world_size, 1
        if resolved.job.launch.nodes:
            nodes = ranks // procs_here(resolved.job, resolved.host)
        return fixed_with_time(resolved, msgspec.structs.replace(cluster, nodes=nodes, devices_per_node=ranks // nodes))
    except UsageError as error:
        document = fixed_plan(resolved, HERE)
        return {**document, "assumptions": [*document["assumptions"], str(error)]}


def _write_report(run_dir: Path) -> str:
    from paceline.report.page import write_page
    from paceline.report.summary import summarise

    return str(write_page([run_dir], [summarise(run_dir)], None))
