"""Training speed of a split model against hand-written loops with the same engine APIs, each pair in the same processes.

    python -m benchmarks.split_throughput                 # tp = 2, pp = 2 under 1F1B, and both together on 4 processes
    python -m benchmarks.split_throughput --only pipeline

    tensor     parallelize_module with sequence and loss parallel: `tensor_side.py`
    pipeline   Schedule1F1B over PipelineStage, four micro-batches a step: `pipeline_side.py`
    both       the two together: two stages, each split over two ranks

The 10M decoder of `throughput.py`, fp32 and eager. Ratios are as there: paceline's tokens per second over the loop's.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, NamedTuple

from benchmarks.pairs import Budget
from benchmarks.program import finish, parser
from benchmarks.record import Figure, say
from benchmarks.throughput import QUICK_BUDGET, base_words, compare, ratio_figure, setting_words

PRECISION = "fp32"
BUDGET = Budget(max_seconds=120.0)


class Split(NamedTuple):
    """A way to split the model: the side it is compared with, the ranks and the job's words."""

    side: str
    shown: str
    procs: int
    words: tuple[str, ...]


STAGES = ("parallel.pp=2", "parallel.pp_schedule=1f1b", "batch.microbatch=2")
SPLITS = {
    "tensor": Split("tensor", "parallelize_module, tp = 2", 2, ("parallel.tp=2",)),
    "pipeline": Split("pipeline", "Schedule1F1B, pp = 2, 4 micro-batches", 2, STAGES),
    "both": Split(
        "pipeline",
        "Schedule1F1B over parallelize_module, pp = 2, tp = 2, 4 micro-batches",
        4,
        (*STAGES, "parallel.tp=2"),
    ),
}


def measure(split: Split, quick: bool) -> tuple[Figure, dict[str, Any]]:
    """One way to split, both sides in turn."""
    words = [*base_words(quick), *setting_words(PRECISION, False), *split.words]
    budget, steps = (QUICK_BUDGET, 1) if quick else (BUDGET, 2)
    found = compare(words, split.side, PRECISION, False, budget, steps, split.procs)
    return ratio_figure(f"against hand-written {split.shown}, {PRECISION} eager", found, PRECISION), found


def main() -> int:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--only", choices=SPLITS, help="one way to split alone")
    args = options.parse_args()
    figures, details = [], {}
    for name in [args.only] if args.only else SPLITS:
        say(f"{name}: paceline and the hand-written loop in turn")
        figure, details[name] = measure(SPLITS[name], args.quick)
        figures.append(figure)
        say(f"  {figure.measured}")
    return finish("split_throughput", figures, details, args, base_words(args.quick))


if __name__ == "__main__":
    sys.exit(main())
