"""Training speed against the hand-written loop, both in the same two processes and in turn.

    python -m benchmarks.throughput              # same setting on both sides: fp32, fp32 compiled, bf16 compiled
    python -m benchmarks.throughput --defaults   # paceline with all defaults against the eager fp32 loop, and its MFU

A ratio is paceline's tokens per second over the other side's: the median of the pairs, with a 95% bootstrap interval.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from typing import Any

from benchmarks.launch import PROCS, run_ranks
from benchmarks.pairs import Budget, Interval
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from benchmarks.text import one_document_words
from paceline.cluster.probe import find_compiler

SETTINGS = {"fp32 eager": ("fp32", False), "fp32 compile": ("fp32", True), "bf16 compile": ("bf16", True)}

LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}
"""Relative difference of the last losses. Both sides sum in another order (DDP's buckets, a mean of means), and AdamW
turns rounding noise into steps of its own size; bf16 has 8 bits of mantissa."""

MEDIAN_TARGET, LOW_TARGET = 0.99, 0.97
RATIO_TARGET = f"median >= {MEDIAN_TARGET}, bound >= {LOW_TARGET}"
DEFAULTS_TARGET, MFU_TARGET = 1.6, 0.5

QUICK_WORDS = ["model.num_layers=2", "data.sequence_length=128"]
QUICK_BUDGET = Budget(min_pairs=3, max_pairs=3)


def base_words(quick: bool) -> list[str]:
    """The 10M decoder, sequence 256, micro-batch 4, two ranks of one thread."""
    words = [str(ROOT / "examples" / "small.toml"), *one_document_words()]
    words += ["batch.global_batch=8", "batch.microbatch=4", "launch.threads=1"]
    # A short warm-up, so that a wrong optimizer step shows in the last loss.
    words += ["optimizer.warmup_steps=10"]
    return words + (QUICK_WORDS if quick else [])


def compare(
    words: list[str], other: str, precision: str, compiled: bool, budget: Budget, block_steps: int, procs: int = PROCS
) -> dict[str, Any]:
    """Measure paceline on the job of `words` against another side at a precision and compilation of its own."""
    options = {
        "other": other, "precision": precision, "compile": compiled, "block_steps": block_steps, "warmup_steps": 3,
        "budget": asdict(budget),
    }  # fmt: skip
    return run_ranks("benchmarks.side_by_side", words, options, procs)


def setting_words(precision: str, compiled: bool) -> list[str]:
    return [f"parallel.precision={precision}", f"parallel.compile={str(compiled).lower()}"]


def interval_of(found: dict[str, Any]) -> Interval:
    return Interval(**found["ratio"])


def ratio_figure(name: str, found: dict[str, Any], precision: str) -> Figure:
    """A comparison at one setting against the targets: both sides must end with the same loss."""
    ratio, tolerance = interval_of(found), LOSS_TOLERANCE[precision]
    reached = ratio.median >= MEDIAN_TARGET and ratio.low >= LOW_TARGET and found["loss_difference"] <= tolerance
    return Figure(name, RATIO_TARGET, shown(found, tolerance), reached)


def shown(found: dict[str, Any], tolerance: float) -> str:
    """Rates, ratio and losses of a comparison in one cell."""
    ours, theirs = found["tokens_per_second"]
    one, other = found["losses"]
    equal = "=" if found["loss_difference"] <= tolerance else "!="
    return (
        f"{interval_of(found)}, {found['pairs']} pairs; {ours:,.0f} / {theirs:,.0f} tokens/s; "
        f"loss {one:.4f} {equal} {other:.4f} (to {tolerance:g})"
    )


def same_settings(args: argparse.Namespace) -> int:
    """Both sides at each setting."""
    words, figures, details = base_words(args.quick), [], {}
    for name, (precision, compiled) in SETTINGS.items():
        if args.only and args.only != name:
            continue
        if compiled and find_compiler() is None:
            figures.append(Figure(f"against hand-written, {name}", RATIO_TARGET, "no C++ compiler on the path", False))
            continue
        say(f"{name}: paceline and the hand-written loop in turn")
        own = [*words, *setting_words(precision, compiled)]
        budget = QUICK_BUDGET if args.quick else Budget()
        found = details[name] = compare(own, "handwritten", precision, compiled, budget, 1 if args.quick else 2)
        threads = f"{found['threads_per_rank']} thread a rank"
        figures.append(ratio_figure(f"against hand-written, {name}, {threads}", found, precision))
    return finish("throughput", figures, details, args, words)


def defaults(args: argparse.Namespace) -> int:
    """examples/small.toml as it is against the eager fp32 loop; then with accumulation 4 for the MFU."""
    words = [str(ROOT / "examples" / "small.toml"), *(QUICK_WORDS if args.quick else [])]
    say("defaults of examples/small.toml, and the eager fp32 hand-written loop, in turn")
    budget = QUICK_BUDGET if args.quick else Budget(max_pairs=24)
    found = compare(words, "handwritten", "fp32", False, budget, 1)
    tolerance = LOSS_TOLERANCE[found["precision"]]
    reached = found["ratio"]["median"] >= DEFAULTS_TARGET and found["loss_difference"] <= tolerance
    setting = f"{found['precision']}{' compile' if found['compile'] else ' eager'}"
    figures = [
        Figure(
            f"defaults ({setting}) against hand-written fp32 eager",
            f">= {DEFAULTS_TARGET}",
            shown(found, tolerance),
            reached,
        )
    ]
    say("defaults with accumulation 4")
    batch = found["microbatch"] * 2 * 4
    steps = 4 if args.quick else 9
    alone = run_ranks(
        "benchmarks.one_side", [*words, f"batch.global_batch={batch}"], {"side": "paceline", "steps": steps}
    )
    mfus = [step["mfu"] for step in alone["steps"][2:] if step["mfu"] is not None]
    mfu = statistics.median(mfus) if mfus else float("nan")
    rate = statistics.median(step["tokens_per_second"] for step in alone["steps"][2:])
    peak = alone["peak_flop_per_second"] / 1e9
    measured = f"{mfu:.1%} of {peak:,.0f} GFLOP/s a rank; {rate:,.0f} tokens/s; accumulation {alone['accumulation']}"
    figures.append(
        Figure(f"MFU of the defaults ({setting}), accumulation 4", f"> {MFU_TARGET:.0%}", measured, mfu > MFU_TARGET)
    )
    return finish("defaults", figures, {"defaults": found, "mfu": alone}, args, words)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--defaults", action="store_true", help="paceline's defaults against the eager fp32 loop")
    options.add_argument("--only", choices=SETTINGS, help="one setting alone")
    args = options.parse_args()
    return defaults(args) if args.defaults else same_settings(args)


if __name__ == "__main__":
    sys.exit(main())
