"""`paceline drill`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLE = """\
example:
  paceline drill examples/tiny.toml --procs 2
  paceline drill examples/tiny.toml --procs 2 --kinds kill,stop --json
  paceline drill examples/tiny.toml --procs 2 --controls --cluster 64x8xh100-sxm:ndr400
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="JOB.toml | section.key=value", help="a job file and overrides")
    parser.add_argument("--procs", type=int, metavar="N", help="local worker processes; one per device unless given")
    parser.add_argument("--kinds", metavar="A,B", help="these faults alone")
    parser.add_argument(
        "--controls", action="store_true", help="try each protection's fault without it: it must not be survived then"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of ranks, steps and moments (0)")
    parser.add_argument(
        "--cluster", default="here", metavar="SPEC", help="the cluster whose failures the verdict reckons with (here)"
    )


def run(args: argparse.Namespace) -> int:
    from paceline.cli import print_document, say
    from paceline.cli.job_words import job_of
    from paceline.cli.plan import cluster_of
    from paceline.cli.planned import planned_words
    from paceline.cluster.probe import probe_host
    from paceline.drill.run import chosen, drill
    from paceline.plan.recovery import expected

    job = job_of(args)
    procs = int(job.launch.procs_per_node or probe_host().default_procs)
    kinds = [kind.strip() for kind in args.kinds.split(",") if kind.strip()] if args.kinds else []
    chosen(kinds)
    cluster = cluster_of(job, procs if args.cluster == "here" else None, args.cluster)
    found = drill(
        [*args.words, *planned_words(job, procs)],
        procs=procs,
        kinds=kinds,
        controls=args.controls,
        seed=args.seed,
        say=say,
    )
    outlook = expected(cluster, found.checkpoint_bytes, found.recover_seconds)
    text = f"{found.describe()}\n{outlook.describe()}"
    if args.json:
        say(text)
        print_document("drill", {**found.document(), "expected": outlook.to_record()})
    else:
        print(text)
    return 0 if found.holds else 1
