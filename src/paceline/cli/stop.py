"""`paceline stop`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLE = """\
example:
  paceline stop runs/tiny
  paceline stop runs/tiny --timeout 2m --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="the directory of a live run")
    add_waiting(parser)


def add_waiting(parser: argparse.ArgumentParser) -> None:
    """How long a request to a live run is waited for."""
    parser.add_argument("--no-wait", action="store_true", help="return once the run has been asked")
    parser.add_argument("--timeout", metavar="TIME", help="longest wait, such as 90s or 10m; no limit unless given")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.cli import print_document, say
    from paceline.run.asking import request_stop

    answer = request_stop(Path(args.run), wait=not args.no_wait, limit_seconds=limit_of(args), say=say)
    if answer["ended"]:
        say(f"{args.run}: {answer['reason']}")
    else:
        say(f"{args.run}: asked to stop")
    if args.json:
        print_document("stop", answer)
    return 0


def limit_of(args: argparse.Namespace) -> float | None:
    """`--timeout` in seconds.

    Raises:
        UsageError: it is no time.
    """
    from paceline.errors import UsageError
    from paceline.units import parse_seconds

    if args.timeout is None:
        return None
    try:
        return float(parse_seconds(args.timeout))
    except ValueError as error:
        raise UsageError(f"--timeout {args.timeout}: {error}", values={"timeout": args.timeout}) from None
