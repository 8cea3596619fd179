"""`paceline bench storage`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLE = """\
example:
  paceline bench storage
  paceline bench storage examples/tiny.toml --procs 2 --size 1GiB
  paceline bench storage --dir /mnt/checkpoints --json --save cluster.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "words", nargs="*", metavar="JOB.toml | section.key=value", help="a job, whose checkpoint directory is measured"
    )
    add("--dir", metavar="FOLDER", help="this folder instead; a fresh folder in it is used and removed")
    add("--procs", type=int, metavar="N", help="ranks, all at work at once; one per device unless given")
    add("--size", default="256MiB", metavar="SIZE", help="of each rank's large file (256MiB)")
    add("--files", type=int, default=500, metavar="N", help="small files of each rank (500)")
    add("--save", metavar="FILE", help="write the rates into a measured cluster.toml, which plan reads")


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from paceline.bench.storage import describe, measure, save
    from paceline.cli import say
    from paceline.cli.bench import at_least, size, tell

    at_least(args, 1, "procs", "files")
    result = measure(_place(args), procs=args.procs, size_bytes=size(args.size, "--size"), files=args.files, say=say)
    if result is None:
        return 0
    if args.save and result.error is None:
        save(Path(args.save), result)
        say(f"measured cluster: {args.save}")
    return tell(args, result.document(), describe(result), result.remarks, result.error)


def _place(args: argparse.Namespace) -> str:
    """The folder given, else the checkpoint directory of the job."""
    if args.dir:
        return str(args.dir)
    from paceline.job.load import load_job, split_words

    job = load_job(*split_words(args.words))
    return job.checkpoint.place(job.run_path)
