"""`paceline report`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLE = """\
example:
  paceline report runs/tiny
  paceline report runs/tiny runs/tiny-2 --html comparison.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="the folder of a run; several are compared")
    parser.add_argument("--html", metavar="PATH", help="where to write the page; RUN_DIR/report.html for one run")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.cli import print_document, say
    from paceline.report.page import write_page
    from paceline.report.summary import summarise
    from paceline.report.text import compare, describe

    folders = [Path(folder) for folder in args.run_dirs]
    documents = [summarise(folder) for folder in folders]
    page = write_page(folders, documents, Path(args.html) if args.html else None)
    text = describe(documents[0]) if len(documents) == 1 else compare(documents)
    if args.json:
        print_document("report", documents[0] if len(documents) == 1 else {"runs": documents})
    else:
        print(text)
    if page:
        say(f"report: {page}")
    return 0
