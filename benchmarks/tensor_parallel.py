"""Training speed under `parallel.tp=2` against the hand-written loop on torch's own tensor parallelism, in turn.

    python -m benchmarks.tensor_parallel [--quick]

Both in the same two processes; ratios as in `benchmarks.throughput`.
"""

from __future__ import annotations

import sys

from benchmarks.pairs import Budget
from benchmarks.program import finish, parser
from benchmarks.record import Figure, say
from benchmarks.throughput import (
    LOSS_TOLERANCE,
    LOW_TARGET,
    MEDIAN_TARGET,
    QUICK_BUDGET,
    base_words,
    compare,
    interval_of,
    setting_words,
    shown,
)


def main() -> int:
    args = parser(__doc__).parse_args()
    words = [*base_words(args.quick), *setting_words("fp32", False), "parallel.tp=2"]
    say("tp = 2: paceline and the hand-written loop in turn")
    budget = QUICK_BUDGET if args.quick else Budget()
    found = compare(words, "tensor", "fp32", False, budget, 1 if args.quick else 2)
    ratio, tolerance = interval_of(found), LOSS_TOLERANCE["fp32"]
    reached = ratio.median >= MEDIAN_TARGET and ratio.low >= LOW_TARGET and found["loss_difference"] <= tolerance
    figure = Figure(
        "against hand-written parallelize_module, tp = 2, fp32 eager",
        f"median >= {MEDIAN_TARGET}, bound >= {LOW_TARGET}",
        shown(found, tolerance),
        reached,
    )
    return finish("tensor_parallel", [figure], found, args, words)


if __name__ == "__main__":
    sys.exit(main())
