"""`paceline bench fabric`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLE = """\
example:
  paceline bench fabric
  paceline bench fabric --seconds 1s --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--procs",
        type=int,
        metavar="N",
        help="ranks on this host alone, where no launcher has started one on each of several hosts (2)",
    )
    add("--seconds", default="250ms", metavar="TIME", help="how long each flow runs (250ms)")
    add("--start-timeout", default="5m", metavar="TIME", help="until when the ranks of all hosts must have come (5m)")


def run(args: argparse.Namespace) -> int:
    from paceline.bench.fabric import describe, measure
    from paceline.cli import say
    from paceline.cli.bench import seconds, tell

    measured = measure(
        seconds(args.seconds, "--seconds"),
        procs=args.procs,
        start_seconds=seconds(args.start_timeout, "--start-timeout"),
        say=say,
    )
    return 0 if measured is None else tell(args, measured.document(), describe(measured), (), measured.error)
