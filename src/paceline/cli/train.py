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
    from paceline.cli import print_document, say
    from paceline.cli.job_words import job_of, worker_words
    from paceline.workers.environment import is_worker

    job = job_of(args)
    if is_worker() and not args.explain:
        # By name: the supervisor must not pay for the import of torch.
        import importlib

        return int(importlib.import_module("paceline.train.worker").run_worker(job))
    from paceline.plan.fixed import fixed_plan
    from paceline.train.run import resolve_here, supervise

    resolved = resolve_here(job)
    if args.explain:
        from paceline.cli.explain import explain

        return explain(resolved, as_json=args.json)
    summary = supervise(job, worker_words(args), fixed_plan(resolved, "here"))
    say(f"report: {_write_report(summary['run_dir'])}")
    if args.json:
        print_document("train", summary)
    return int(summary["exit"])


def _write_report(run_dir: str) -> str:
    from pathlib import Path

    from paceline.report.page import write_page
    from paceline.report.summary import summarise

    path = Path(run_dir)
    return str(write_page([path], [summarise(path)], None))
