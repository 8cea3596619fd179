"""The command line that all programs share: `python -m benchmarks.NAME [--quick] [--output FILE]`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import Figure, save, say, table


def parser(description: str | None) -> argparse.ArgumentParser:
    """`--quick` and `--output`; programs add what they need."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--quick", action="store_true", help="small sizes and few pairs: shows that it runs, measures nothing"
    )
    made.add_argument("--output", type=Path, help="result file instead of benchmarks/results/<date>-<name>.json")
    return made


def finish(
    name: str, figures: Sequence[Figure], details: dict[str, Any], args: argparse.Namespace, job: Sequence[str]
) -> int:
    """Print the table, keep the result; the exit code is 0, whether or not the targets were reached."""
    path = save(name, figures, details, job=job, quick=args.quick, output=args.output)
    print(table(figures), flush=True)
    if args.quick:
        say("--quick: the sizes are small, so nothing here is a measurement")
    say(f"result: {path}")
    return 0
