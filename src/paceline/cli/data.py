"""`paceline data`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

EXAMPLE = """\
example:
  paceline data prepare examples/small.toml
  paceline data inspect data.source=notes.txt data.tokenizer=bpe:4096 --verify
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("prepare", "inspect"), help="build the token shards, or say what they hold")
    parser.add_argument("words", nargs="*", metavar="JOB.toml | section.key=value", help="a job file and overrides")
    parser.add_argument("--verify", action="store_true", help="inspect: read every byte and compare its checksum")


def run(args: argparse.Namespace) -> int:
    from paceline.cli import print_document
    from paceline.data.inspect import inspect
    from paceline.data.prepare import prepare
    from paceline.errors import UsageError
    from paceline.job.load import load_job, split_words

    if args.verify and args.action == "prepare":
        raise UsageError("--verify belongs to inspect; prepare writes checksums as it goes")
    job = load_job(*split_words(args.words))
    if args.action == "prepare":
        prepare(job.data)
    steps = int(job.run.steps) if job.run.steps else None
    found = inspect(job.data, verify=args.verify, steps=steps, global_batch=int(job.batch.global_batch))
    if args.json:
        print_document("data", {**found, "exit": 0})
    else:
        print(_text(found))
    return 1 if found["damage"] else 0


def _text(found: dict[str, Any], indent: str = "") -> str:
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", _text(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {value}")
    return "\n".join(lines)
