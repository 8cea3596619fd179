"""`paceline train`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLE = """\
example:
  paceline train examples/tiny.toml run.steps=30 parallel.precision=fp32 --procs 2
  torchrun --nproc-per-node 2 -m paceline train examples/tiny.toml run.steps=5
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="JOB.toml | section.key=value", help="a job file and overrides")
    parser.add_argument("--procs", type=int, metavar="N", help="local worker processes; one per device unless given")
    parser.add_argument("--explain", action="store_true", help="print the resolved job and its origins; start nothing")


def run(args: argparse.Namespace) -> int:
    from paceline.cli.job_words import job_of
    from paceline.workers.environment import is_worker

    job = job_of(args)
    if args.explain:
        from paceline.cli.explain import explain

        return explain(job, args)
    if is_worker():
        from paceline.train.worker import run_worker

        return run_worker(job)
    from paceline.cli import print_document
    from paceline.train.run import supervise

    summary = supervise(job)
    if args.json:
        print_document("train", summary)
    return int(summary["exit"])
