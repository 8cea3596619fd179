"""`paceline prove`."""

from __future__ import annotations

from paceline.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLE = """\
example:
  paceline prove examples/tiny.toml --procs 2
  paceline prove examples/tiny.toml parallel.dp_shard=2 --procs 2 --other 3 --steps 5,10 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="JOB.toml | section.key=value", help="a job file and overrides")
    parser.add_argument("--procs", type=int, metavar="N", help="local worker processes; one per device unless given")
    parser.add_argument(
        "--other", type=int, metavar="P", help="ranks of the resume elsewhere (1; 2 for a one-process job)"
    )
    parser.add_argument("--steps", default="5,5", metavar="N,M", help="steps before the kill, and after it (5,5)")


def run(args: argparse.Namespace) -> int:
    from paceline.cli import print_document, say
    from paceline.cli.job_words import job_of
    from paceline.cli.planned import planned_words
    from paceline.cluster.probe import probe_host
    from paceline.prove.run import prove

    before, after = _steps(args.steps)
    job = job_of(args)
    procs = int(job.launch.procs_per_node or probe_host().default_procs)
    other = _other(args.other, procs)
    # On both numbers of ranks the layout is the one that the first would get, or what is left of it.
    words = [*args.words, *planned_words(job, procs)]
    certificate = prove(words, procs=procs, other=other, before=before, after=after, say=say)
    if args.json:
        say(certificate.describe())
        print_document("prove", certificate.document())
    else:
        print(certificate.describe())
    say(f"certificate: {certificate.folder / 'certificate.json'}")
    return 0 if certificate.holds else 1


def _steps(text: str) -> tuple[int, int]:
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise UsageError(
            f"--steps {text} is not two numbers of steps, before the kill and after it",
            values={"steps": text},
            hint="Write, for example, --steps 5,5.",
        )
    return int(parts[0]), int(parts[1])


def _other(asked: int | None, procs: int) -> int:
    if asked is None:
        return 1 if procs > 1 else 2
    if asked < 1:
        raise UsageError(f"--other {asked} starts nothing; give 1 or more", values={"other": asked})
    if asked == procs:
        raise UsageError(
            f"--other {asked} is the number of ranks that the job runs on: nothing would be resumed elsewhere",
            values={"other": asked, "procs": procs},
            hint="Give another number, or leave it out.",
        )
    return asked
