"""`paceline plan`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

    from paceline.job.load import Job

EXAMPLE = """\
example:
  paceline plan examples/tiny.toml --fixed --cluster here
  paceline plan model.preset=llama3-8b --fixed --cluster 1x8xh100-sxm --json
  paceline plan --against tests/golden/published_runs.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="JOB.toml | section.key=value", help="a job file and overrides")
    parser.add_argument(
        "--cluster", default="here", metavar="SPEC", help="here, a measured cluster.toml, or NODESxDEVICESxDEVICE[:FABRIC]"
    )  # fmt: skip
    parser.add_argument("--procs", type=int, metavar="N", help="ranks, where the cluster is here")
    parser.add_argument("--against", metavar="RUNS.jsonl|RUN_DIR", help="predict published or own runs, print the error of each")
    parser.add_argument("--fixed", action="store_true", help="weigh the given layout only")


def run(args: argparse.Namespace) -> int:
    from paceline.cli import print_document
    from paceline.cli.job_words import job_of
    from paceline.cluster.probe import probe_host
    from paceline.cluster.spec import HERE, parse_cluster
    from paceline.errors import UsageError
    from paceline.job.resolve import resolve_job
    from paceline.plan.fixed import describe, fixed_plan

    if args.against:
        return _against(args)
    if not args.fixed:
        raise UsageError(
            "this version weighs a given layout and does not search for one",
            hint="Add --fixed: paceline plan JOB.toml --fixed --cluster SPEC.",
        )
    job = job_of(args)
    cluster = parse_cluster(args.cluster, probe_host())
    here = args.cluster == HERE
    if args.procs is not None and not here:
        raise UsageError(
            f"--procs {args.procs} has no effect beside --cluster {args.cluster}, which says how many devices there are",
            hint="Write the number into --cluster, or remove --procs.",
        )
    ranks = _ranks(job, cluster.devices, here)
    resolved = resolve_job(job, ranks, cluster.host, ranks_per_host=None if here else cluster.devices_per_node)
    document = fixed_plan(resolved, args.cluster, ranks if here else cluster.devices_per_node, cluster.measured)
    if args.json:
        print_document("plan", document)
    else:
        print(describe(resolved, document))
    return 0 if resolved.fits else 1


def _against(args: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.cli import print_document
    from paceline.errors import UsageError
    from paceline.plan.against import against
    from paceline.plan.against_text import describe_against

    if args.words or args.fixed:
        raise UsageError("--against predicts the runs of a file and takes no job", key="--against", hint="Remove the other words.")
    document = against(Path(args.against))
    if args.json:
        print_document("plan", document)
    else:
        print(describe_against(document))
    return 0


def _ranks(job: Job, devices: int, here: bool) -> int:
    return int(job.launch.procs_per_node) if here and job.launch.procs_per_node else devices
