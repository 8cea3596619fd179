"""`paceline bench`: one file per measurement."""

from __future__ import annotations

from paceline.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

SUBCOMMANDS = {
    "collectives": ("paceline.cli.bench_collectives", "latency and bandwidth of each collective over its size"),
}
"""A measurement, the module that has its options and runs it, and what it measures."""

EXAMPLE = """\
example:
  paceline bench collectives --procs 2
  paceline bench collectives --procs 4 --save cluster.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For `paceline bench --help`; a measurement has options of its own."""
    rows = "; ".join(f"{name}: {summary}" for name, (_, summary) in SUBCOMMANDS.items())
    parser.add_argument("what", choices=tuple(SUBCOMMANDS), help=f"{rows}; paceline bench WHAT --help explains one")


def run(args: argparse.Namespace) -> int:
    raise UsageError(
        f"paceline bench {args.what} has options of its own", hint=f"See paceline bench {args.what} --help."
    )
