"""The job that a command's words describe; shared by the commands that run or weigh one."""

from __future__ import annotations

from paceline.errors import UsageError
from paceline.job.load import Job, load_job, split_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse


def job_of(args: argparse.Namespace) -> Job:
    """The job of JOB.toml, `section.key=value` and `--procs`."""
    path, overrides = split_words(worker_words(args))
    return load_job(path, overrides)


def worker_words(args: argparse.Namespace) -> list[str]:
    """The same words with `--procs` written as the key that it sets."""
    if args.procs is None:
        return list(args.words)
    from paceline.units import parse_procs

    try:
        parse_procs(args.procs)
    except ValueError as error:
        raise UsageError(
            f"--procs {error}", values={"procs": args.procs}, hint="Write --procs 4 or --procs 2:4."
        ) from None
    return [*args.words, f"launch.procs_per_node={args.procs}"]
