"""`paceline save`."""

from __future__ import annotations

from paceline.cli.stop import add_waiting, limit_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLE = """\
example:
  paceline save runs/tiny
  paceline save runs/tiny --no-wait --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="the directory of a live run")
    add_waiting(parser)


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.cli import print_document, say
    from paceline.run.asking import request_save

    answer = request_save(Path(args.run), wait=not args.no_wait, limit_seconds=limit_of(args), say=say)
    if answer["saved"]:
        say(f"{args.run}: step {answer['step']} is saved in {answer['path']}")
    else:
        say(f"{args.run}: asked to save")
    if args.json:
        print_document("save", answer)
    return 0
