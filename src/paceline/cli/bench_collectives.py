"""`paceline bench collectives`."""

from __future__ import annotations

from paceline.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from paceline.bench.collectives import Measured
    from paceline.bench.sweep import Options

EXAMPLE = """\
example:
  paceline bench collectives --procs 2
  paceline bench collectives --procs 4 --save cluster.toml
  paceline bench collectives --collectives all_reduce,all_gather --min 64KiB --max 16MiB --json
  paceline bench collectives --store monday.json
  paceline bench collectives --baseline monday.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--procs", type=int, metavar="N", help="local ranks; one per device unless given")
    add(
        "--collectives",
        metavar="A,B",
        help="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send_recv (all)",
    )
    add("--min", metavar="SIZE", help="smallest size (1KiB)")
    add("--max", metavar="SIZE", help="largest size (32MiB; 1GiB on GPUs)")
    add("--factor", type=int, default=2, metavar="F", help="each size is F times the one before (2)")
    add("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), default="fp32", help="type of the elements (fp32)")
    add("--iterations", type=int, default=20, metavar="I", help="calls of a round, one after the other (20)")
    add("--warmup", type=int, default=5, metavar="W", help="calls before them (5)")
    add("--seconds", default="1s", metavar="TIME", help="longest time for the timed calls of one size (1s)")
    add("--tier", choices=("in_node", "across_nodes"), help="this tier alone (both, where there are both)")
    add("--pairs", action="store_true", help="also each pair of ranks alone, as a matrix")
    add("--device", choices=("cpu",), help="measure the CPUs where there are devices")
    add("--markdown", action="store_true", help="one Markdown table")
    add("--csv", action="store_true", help="comma-separated rows")
    add("--save", metavar="FILE", help="write what was fitted into a measured cluster.toml, which plan reads")
    add("--store", metavar="FILE", help="keep the whole result, to compare with later")
    add("--baseline", metavar="FILE", help="compare with a result that --store kept")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.bench.collectives import load_baseline, measure
    from paceline.cli import say

    forms = [name for name in ("json", "markdown", "csv") if getattr(args, name)]
    if len(forms) > 1:
        raise UsageError(f"--{' and --'.join(forms)} exclude each other", hint="Choose one form of output.")
    options = _options(args)
    baseline = load_baseline(Path(args.baseline)) if args.baseline else None
    measured = measure(options, procs=args.procs, device=args.device, baseline=baseline, say=say)
    return 0 if measured is None else _tell(args, measured)


def _options(args: argparse.Namespace) -> Options:
    from paceline.bench.sweep import COLLECTIVES, Options
    from paceline.cli.bench import at_least, seconds, size

    asked = tuple(word.strip() for word in args.collectives.split(",")) if args.collectives else COLLECTIVES
    unknown = [name for name in asked if name not in COLLECTIVES]
    if unknown:
        raise UsageError(
            f"there is no collective {unknown[0]!r}",
            key="--collectives",
            values={"collective": unknown[0]},
            hint=f"Known: {', '.join(COLLECTIVES)}.",
        )
    at_least(args, 1, "iterations", "warmup")
    return Options(
        collectives=asked,
        min_bytes=size(args.min, "--min") if args.min else Options().min_bytes,
        max_bytes=size(args.max, "--max") if args.max else 0,
        factor=args.factor,
        dtype=args.dtype,
        iterations=args.iterations,
        warmup=args.warmup,
        seconds=seconds(args.seconds, "--seconds"),
        pairs=args.pairs,
        tiers=(args.tier,) if args.tier else (),
    )


def _tell(args: argparse.Namespace, measured: Measured) -> int:
    from paceline.bench.describe import describe
    from paceline.bench.render import csv_table, markdown_table
    from paceline.cli.bench import tell

    document = {"measurement": "collectives", **measured.document()}
    _keep(args, measured, document)
    lines = describe(measured)
    if args.csv:
        lines = iter(csv_table(measured.rows).splitlines())
    elif args.markdown:
        lines = iter(markdown_table(measured.rows))
    return tell(args, document, lines, measured.remarks, measured.error)


def _keep(args: argparse.Namespace, measured: Measured, document: dict[str, Any]) -> None:
    """Into the files that were asked for; an incomplete sweep is kept too, as what it is, but is no cluster's."""
    import json
    from pathlib import Path

    from paceline.bench.collectives import save
    from paceline.cli import say
    from paceline.run.files import write_atomic
    from paceline.run.records import json_safe

    if args.store:
        write_atomic(
            Path(args.store), json.dumps(json_safe({"schema": "paceline.bench/1", **document}), indent=1) + "\n"
        )
        say(f"stored: {args.store}")
    if args.save and measured.error is not None:
        say(f"{args.save} was not written: the sweep is incomplete")
    elif args.save:
        save(Path(args.save), measured)
        say(f"measured cluster: {args.save}")
