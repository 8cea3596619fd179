"""The job of a command's words, and the host and number of ranks that it runs on; shared by commands that weigh a job."""

from __future__ import annotations

import argparse

from paceline.errors import UsageError
from paceline.job.load import Job, load_job, split_words


def job_of(args: argparse.Namespace) -> Job:
    """The job that JOB.toml, `section.key=value` and `--procs` describe."""
    path, overrides = split_words(args.words)
    procs = getattr(args, "procs", None)
    if procs is not None:
        if procs < 1:
            raise UsageError(f"--procs {procs} starts nothing; give 1 or more", values={"procs": procs})
        overrides = [*overrides, f"launch.procs_per_node={procs}"]
    return load_job(path, overrides)
