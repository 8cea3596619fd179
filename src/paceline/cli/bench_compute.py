"""`paceline bench compute`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLE = """\
example:
  paceline bench compute
  paceline bench compute --dtypes bf16 --json
  paceline bench compute --save cluster.toml
"""
DTYPES = ("fp32", "bf16", "fp16", "fp64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--procs", type=int, metavar="N", help="ranks, all at work at once; one per device unless given")
    add("--dtypes", metavar="A,B", help="fp32, bf16, fp16, fp64 (fp32 and bf16; fp16 too on GPUs)")
    add("--iterations", type=int, default=20, metavar="I", help="calls of a round, one after the other (20)")
    add("--seconds", default="500ms", metavar="TIME", help="longest time for one row (500ms)")
    add("--device", choices=("cpu",), help="measure the CPUs where there are devices")
    add("--save", metavar="FILE", help="write the rates into a measured cluster.toml, which plan reads")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.bench.compute import describe, measure, save
    from paceline.cli import say
    from paceline.cli.bench import at_least, seconds, tell
    from paceline.errors import UsageError

    at_least(args, 1, "procs", "iterations")
    dtypes = [word.strip() for word in args.dtypes.split(",")] if args.dtypes else []
    for name in dtypes:
        if name not in DTYPES:
            raise UsageError(f"there is no type {name!r}", key="--dtypes", hint=f"Known: {', '.join(DTYPES)}.")
    result = measure(
        procs=args.procs, dtypes=dtypes, iterations=args.iterations, seconds=seconds(args.seconds, "--seconds"),
        device=args.device, say=say,
    )  # fmt: skip
    if result is None:
        return 0
    if args.save and result.error is None:
        save(Path(args.save), result)
        say(f"measured cluster: {args.save}")
    return tell(args, result.document(), describe(result), result.remarks, result.error)
