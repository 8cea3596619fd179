"""`paceline generate`."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

EXAMPLE = """\
example:
  paceline generate runs/tiny --prompt "def main("
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the folder of a finished run")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="text to continue")
    parser.add_argument("--tokens", type=int, default=240, metavar="N", help="tokens to add (240)")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (0.8)")
    parser.add_argument("--top-k", type=int, default=40, metavar="K", help="sample among the K likeliest (40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (0)")


def run(args: argparse.Namespace) -> int:
    import importlib
    from pathlib import Path

    from paceline.cli import print_document

    # By name: this file is read by commands that need no torch.
    continued = importlib.import_module("paceline.train.continue_text").continue_text(
        Path(args.run_dir),
        args.prompt,
        tokens=args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    if args.json:
        print_document("generate", {"run_dir": args.run_dir, "prompt": args.prompt, "text": continued, "exit": 0})
    else:
        print(args.prompt + continued)
    return 0
