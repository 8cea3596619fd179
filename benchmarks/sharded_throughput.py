"""Training speed of each sharding stage against a hand-written `fully_shard` loop, both in the same two processes.

    python -m benchmarks.sharded_throughput                       # stages 3, 2 and 1 in fp32 and bf16, eager
    python -m benchmarks.sharded_throughput --stage 3 --precision bf16

The 10M decoder of `throughput.py`, two micro-batches a step, since stages 1 and 2 differ from the second one on. A ratio is
paceline's tokens per second over the loop's: the median of the pairs, with a 95% bootstrap interval. Beside them, what
paceline's replicas (`dp_replicate`) reach on the same batch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from benchmarks.launch import run_ranks
from benchmarks.pairs import Budget
from benchmarks.program import finish, parser
from benchmarks.record import Figure, say
from benchmarks.throughput import QUICK_BUDGET, base_words, compare, ratio_figure, setting_words

STAGES = (3, 2, 1)
PRECISIONS = ("fp32", "bf16")
BUDGET = Budget(max_seconds=30.0)
"""Of one stage at one precision; a pair takes two to three seconds."""

REPLICA_STEPS = 8


def words_of(microbatch: int, quick: bool) -> list[str]:
    return [*base_words(quick), f"batch.microbatch={microbatch}"]


def stage_figure(words: list[str], stage: int, precision: str, quick: bool) -> tuple[Figure, dict[str, Any]]:
    """One stage at one precision, both sides in turn."""
    own = [*words, *setting_words(precision, False), "parallel.dp_shard=-1", f"parallel.zero_stage={stage}"]
    budget = QUICK_BUDGET if quick else BUDGET
    found = compare(own, "fully_shard", precision, False, budget, 1)
    name = f"stage {stage}, {precision}, {found['microbatch']} x {found['accumulation']}"
    return ratio_figure(f"against hand-written fully_shard, {name}", found, precision), found


def replica_figure(words: list[str], precision: str) -> tuple[Figure, dict[str, Any]]:
    """Replicas alone, for comparison; the first two steps do not count."""
    own = [*words, *setting_words(precision, False)]
    alone = run_ranks("benchmarks.one_side", own, {"side": "paceline", "steps": REPLICA_STEPS})
    rate = statistics.median(step["tokens_per_second"] for step in alone["steps"][2:])
    return Figure(f"paceline's replicas on the same batch, {precision}", "", f"{rate:,.0f} tokens/s"), alone


def measure(args: argparse.Namespace) -> int:
    words, figures, details = words_of(args.microbatch, args.quick), [], {}
    for precision in [args.precision] if args.precision else PRECISIONS:
        for stage in [args.stage] if args.stage else STAGES:
            say(f"stage {stage}, {precision}: paceline and hand-written fully_shard in turn")
            figure, details[f"stage {stage} {precision}"] = stage_figure(words, stage, precision, args.quick)
            figures.append(figure)
            say(f"  {figure.measured}")
        say(f"replicas, {precision}")
        figure, details[f"replicas {precision}"] = replica_figure(words, precision)
        figures.append(figure)
    return finish("sharded_throughput", figures, details, args, words)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--stage", type=int, choices=STAGES, help="one stage alone")
    options.add_argument("--precision", choices=PRECISIONS, help="one precision alone")
    options.add_argument(
        "--microbatch", type=int, default=2, help="of the 4 sequences of a rank (default: %(default)s)"
    )
    return measure(options.parse_args())


if __name__ == "__main__":
    sys.exit(main())
