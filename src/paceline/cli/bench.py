"""`paceline bench`: one file per measurement, and what they share."""

from __future__ import annotations

from paceline.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable
    from typing import Any

    from paceline.bench.remarks import Remark
    from paceline.errors import PacelineError

SUBCOMMANDS = {
    "collectives": ("paceline.cli.bench_collectives", "latency and bandwidth of each collective over its size"),
    "fabric": (
        "paceline.cli.bench_fabric",
        "links and uplinks between hosts: slow, uneven, faulty, shared by too many",
    ),
    "compute": ("paceline.cli.bench_compute", "rates of products, attention and memory, and what a launch costs"),
    "storage": ("paceline.cli.bench_storage", "what the checkpoint directory does under all ranks at once"),
    "loader": ("paceline.cli.bench_loader", "what a job's loader gives, against what its devices take"),
}
"""A measurement, the module that has its options and runs it, and what it measures."""

EXAMPLE = """\
example:
  paceline bench collectives --procs 2
  paceline bench collectives --procs 4 --save cluster.toml
  paceline bench compute --json
  paceline bench storage --json
  paceline bench loader examples/tiny.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For `paceline bench --help`; a measurement has options of its own."""
    rows = "; ".join(f"{name}: {summary}" for name, (_, summary) in SUBCOMMANDS.items())
    parser.add_argument("what", choices=tuple(SUBCOMMANDS), help=f"{rows}; paceline bench WHAT --help explains one")


def run(args: argparse.Namespace) -> int:
    raise UsageError(
        f"paceline bench {args.what} has options of its own", hint=f"See paceline bench {args.what} --help."
    )


def size(text: str, name: str) -> int:
    """Bytes of an option such as `--max 32MiB`; a bare number is bytes."""
    from paceline.units import parse_bytes

    return int(parsed(parse_bytes, f"{text}B" if text.isdigit() else text, name))


def seconds(text: str, name: str) -> float:
    """Seconds of an option such as `--seconds 500ms`.

    Raises:
        UsageError: it is no duration, or none at all.
    """
    from paceline.units import parse_seconds

    found = float(parsed(parse_seconds, text, name))
    if found <= 0:
        raise UsageError(f"{text} measures nothing; give more than 0s", key=name, values={name: text})
    return found


def parsed(parse: Callable[[str], Any], text: str, name: str) -> Any:
    """What `parse` makes of an option's text.

    Raises:
        UsageError: nothing.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(str(error), key=name, values={name: text}) from None


def at_least(args: argparse.Namespace, least: int, *names: str) -> None:
    """Refuse options below `least`."""
    for name in names:
        given = getattr(args, name)
        if given is not None and given < least:
            raise UsageError(f"{given} is too few; give {least} or more", key=f"--{name}", values={name: given})


def tell(
    args: argparse.Namespace,
    document: dict[str, Any],
    lines: Iterable[str],
    remarks: Iterable[Remark],
    error: PacelineError | None,
) -> int:
    """Print a result as text or JSON, what ended it early on stderr; returns the exit code.

    Args:
        document: with `exit`; what ended it early is added.
        lines: the same as text.
    """
    from paceline.cli import failure_fields, print_document, say

    if error is not None:
        document |= failure_fields(error)
    if args.json:
        for remark in remarks:
            say(remark.message)
        print_document("bench", document)
    else:
        for line in lines:
            print(line)
    if error is not None:
        say(f"paceline: {error}")
    return int(document["exit"])
