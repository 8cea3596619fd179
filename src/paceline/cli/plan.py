"""`paceline plan`."""

from __future__ import annotations

from paceline.cli.plan_money import add_money_arguments, money_text, pay_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from pathlib import Path
    from typing import Any

    from paceline.cluster.spec import Cluster
    from paceline.job.load import Job

EXAMPLE = """\
example:
  paceline plan examples/tiny.toml --cluster here
  paceline plan model.preset=llama3-8b batch.global_batch=256 data.sequence_length=8192 --cluster 1x8xh100-sxm
  paceline plan model.preset=llama3-8b --fixed --cluster 1x8xh100-sxm --json
  paceline plan model.preset=llama3-8b --fixed parallel.pp=8 --cluster 1x8xh100-sxm --picture plan.html
  paceline plan --against tests/golden/published_runs.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="JOB.toml | section.key=value", help="a job file and overrides")
    parser.add_argument(
        "--cluster", action="append", metavar="SPEC",
        help="here, a measured cluster.toml, NODESxDEVICESxDEVICE[:FABRIC], or NODESxNODETYPE as sold; given again, another "
        "one to compare",
    )  # fmt: skip
    parser.add_argument("--procs", type=int, metavar="N", help="ranks, where the cluster is here")
    parser.add_argument(
        "--against", metavar="RUNS.jsonl|RUN_DIR", help="predict published or own runs, print the error of each"
    )
    parser.add_argument("--fixed", action="store_true", help="weigh the given layout only")
    parser.add_argument(
        "--prefer", choices=("time", "money"), default="time", help="which of several clusters to plan for (time)"
    )
    parser.add_argument("--write", action="store_true", help="put the chosen layout into the job file")
    parser.add_argument("--picture", metavar="FILE.html", help="draw the plan: a step over time, memory by stage")
    add_money_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from paceline.cli.job_words import job_of
    from paceline.errors import UsageError
    from paceline.job.load import split_words

    if args.against:
        return _against(args)
    specs = list(args.cluster or ["here"])
    job = job_of(args)
    if args.fixed and (args.write or len(specs) > 1):
        beside = "--write" if args.write else "several --cluster"
        raise UsageError(
            f"--fixed has no effect beside {beside}: it weighs the layout that the job gives",
            hint=f"Remove --fixed, or {beside}.",
        )
    if args.prefer == "money" and len(specs) == 1:
        raise UsageError(
            "--prefer money has no effect with one cluster: on the same devices the fastest layout is the cheapest",
            key="--prefer",
            hint="Give several --cluster, or remove --prefer.",
        )
    path, _ = split_words(args.words)
    if args.write:
        from paceline.plan.write import check_writable

        check_writable(path)
    clusters = [cluster_of(job, args.procs, text) for text in specs]
    if args.fixed:
        return _fixed(args, job, clusters[0])
    return _search(args, job, clusters, path)


def cluster_of(job: Job, procs: int | None, text: str) -> Cluster:
    """The cluster of `--cluster`; of this host as many devices as `--procs` or the job say, and as many such hosts."""
    from paceline.cli.planned import cluster_here
    from paceline.cluster.probe import probe_host
    from paceline.cluster.spec import HERE, parse_cluster
    from paceline.errors import UsageError

    if text == HERE:
        # The command line has put --procs into the job.
        return cluster_here(job)
    if procs is not None:
        raise UsageError(
            f"--procs {procs} has no effect beside --cluster {text}, which says how many devices there are",
            hint="Write the number into --cluster, or remove --procs.",
        )
    return parse_cluster(text, probe_host())


def _against(args: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.cli import print_document
    from paceline.errors import UsageError
    from paceline.plan.against import against
    from paceline.plan.against_text import describe_against

    if args.words or args.fixed:
        raise UsageError(
            "--against predicts the runs of a file and takes no job", key="--against", hint="Remove the other words."
        )
    if idle := _beside_against(args):
        raise UsageError(
            f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect beside --against: each run names its own "
            "cluster, and what it took is compared, not what it costs",
            key="--against",
            values={"options": idle},
            hint=f"Remove {' and '.join(idle)}, or --against.",
        )
    document = against(Path(args.against))
    if args.json:
        print_document("plan", document)
    else:
        print(describe_against(document))
    return 0


def _beside_against(args: argparse.Namespace) -> list[str]:
    """Options that were given and say something of a job's plan alone."""
    import argparse

    fresh = argparse.ArgumentParser()
    add_arguments(fresh)
    usual = vars(fresh.parse_args([]))
    return [
        f"--{name}" for name, value in usual.items() if name not in ("words", "against") and vars(args)[name] != value
    ]


def _fixed(args: argparse.Namespace, job: Job, cluster: Cluster) -> int:
    from paceline.cli import print_document
    from paceline.job.resolve import resolve_job
    from paceline.plan.figures import fixed_with_time
    from paceline.plan.fixed import describe

    resolved = resolve_job(job, cluster.devices, cluster.host, ranks_per_host=cluster.devices_per_node)
    document = fixed_with_time(resolved, cluster)
    pay_of(args)(document, cluster)
    if args.json:
        print_document("plan", document)
    else:
        print(describe(resolved, document))
        print(money_text(document))
    _draw(args, job, cluster, None)
    return 0 if resolved.fits else 1


def _search(args: argparse.Namespace, job: Job, clusters: list[Cluster], path: Path | None) -> int:
    from paceline.cli import print_document, say
    from paceline.plan.compare import searched
    from paceline.plan.text import describe_found
    from paceline.plan.write import write_layout

    document: dict[str, Any] = searched(job, clusters, list(args.words), pay_of(args), args.prefer)
    chosen = document["chosen"]
    if args.json:
        print_document("plan", document)
    else:
        print(describe_found(document))
        if chosen is not None:
            print(f"\n{money_text(document)}")
    drawn = chosen or document["nearest"]
    if drawn is not None:
        _draw(args, job, next(c for c in clusters if c.text == document["cluster"]), drawn["keys"])
    if args.write and chosen is not None and path is not None:
        say(f"{path}: {write_layout(path, chosen['keys'])}")
    return 0 if chosen is not None else 1


def _draw(args: argparse.Namespace, job: Job, cluster: Cluster, keys: dict[str, Any] | None) -> None:
    """The page of `--picture`, where one is asked for."""
    if args.picture is None:
        return
    from pathlib import Path

    from paceline.cli import say
    from paceline.plan.picture import write_job_picture

    say(f"picture: {write_job_picture(Path(args.picture), job, cluster, keys)}")
