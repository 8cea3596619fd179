"""`paceline bench loader`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

EXAMPLE = """\
example:
  paceline bench loader examples/tiny.toml
  paceline bench loader examples/tiny.toml data.workers=2 --procs 2 --json
  paceline bench loader examples/tiny.toml --workers 0,1,2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("words", nargs="*", metavar="JOB.toml | section.key=value", help="a job file and overrides")
    add("--procs", type=int, metavar="N", help="ranks, all reading at once; one per device unless given")
    add("--workers", metavar="A,B", help="numbers of loader processes to compare (the job's own)")
    add("--seconds", default="3s", metavar="TIME", help="time for each of them (3s)")


def run(args: argparse.Namespace) -> int:
    from paceline.bench.loader import describe, measure
    from paceline.cli import say
    from paceline.cli.bench import seconds, tell
    from paceline.cli.job_words import worker_words

    result = measure(
        worker_words(args), workers=_workers(args.workers), seconds=seconds(args.seconds, "--seconds"), say=say
    )
    return 0 if result is None else tell(args, result.document(), describe(result), result.remarks, result.error)


def _workers(text: str | None) -> Sequence[int]:
    from paceline.errors import UsageError

    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise UsageError(f"{text!r} is no list of numbers such as 0,1,2", key="--workers", values={"workers": text})
    return [int(part) for part in parts]
