"""Growth of peak memory after the imports, against the hand-written loop: each side in processes of its own, in turn.

    python -m benchmarks.memory

Peak is the resident set's high-water mark of a rank (VmHWM), growth what it rose over the resident set with everything
imported; the largest rank counts. The ratio is paceline's growth over the hand-written loop's.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.launch import resolve, run_ranks
from benchmarks.pairs import Budget, bootstrap_median, first_goes_first
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from benchmarks.text import one_document_words
from benchmarks.throughput import setting_words
from paceline.cluster.probe import find_compiler
from paceline.model.spec import parameter_count
from paceline.units import format_bytes, format_count

SETTINGS = {"fp32 eager": ("fp32", False), "bf16 compile": ("bf16", True)}
TARGET = 1.05

LARGE = ["model.num_layers=12", "model.dim=512", "model.ffn_dim=2048", "model.num_heads=8"]
"""51M parameters: head width 64, 4 key and value heads."""

BUDGET = Budget(min_pairs=3, max_pairs=12, width=0.02, max_seconds=110.0)
"""Memory repeats to a percent, so three pairs may do; a pair takes about half a minute."""


def words_of(quick: bool) -> list[str]:
    words = [str(ROOT / "examples" / "small.toml"), *one_document_words()]
    words += ["batch.global_batch=4", "batch.microbatch=2", "launch.threads=1"]
    return words + (["model.num_layers=2", "data.sequence_length=128"] if quick else LARGE)


def growth_bytes(found: dict[str, Any]) -> int:
    return max(int(rank["growth_bytes"]) for rank in found["ranks"])


def measure(words: list[str], budget: Budget, steps: int) -> dict[str, Any]:
    """Pairs of whole runs until there are enough."""
    growths: list[tuple[int, int]] = []
    found: dict[str, dict[str, Any]] = {}
    started = time.monotonic()
    while not budget.enough([a / b for a, b in growths], time.monotonic() - started):
        sides = ("paceline", "handwritten")
        for side in sides if first_goes_first(len(growths)) else sides[::-1]:
            found[side] = run_ranks("benchmarks.one_side", words, {"side": side, "steps": steps})
        growths.append((growth_bytes(found["paceline"]), growth_bytes(found["handwritten"])))
        say(f"  pair {len(growths)}: {format_bytes(growths[-1][0])} against {format_bytes(growths[-1][1])}")
    return {"growth_bytes": growths, **found}


def figures_of(name: str, found: dict[str, Any], parameters: int) -> list[Figure]:
    growths = found["growth_bytes"]
    ratio = bootstrap_median([a / b for a, b in growths])
    ours, theirs = (bootstrap_median([pair[k] for pair in growths]).median for k in (0, 1))
    losses = f"loss {found['paceline']['loss']:.4f} / {found['handwritten']['loss']:.4f}"
    planned = found["paceline"]["planned_growth_bytes"]
    return [
        Figure(
            f"growth of peak memory, {name}, {format_count(parameters)} parameters",
            f"<= {TARGET} x hand-written",
            f"{ratio}, {len(growths)} pairs; {format_bytes(ours)} / {format_bytes(theirs)}; {losses}",
            ratio.median <= TARGET,
        ),
        Figure(
            f"planned growth over measured, {name}", "",
            f"{planned / ours:.2f}; {format_bytes(planned)} planned, {format_bytes(ours)} measured",
        ),
    ]  # fmt: skip


def main() -> int:
    args = parser(__doc__).parse_args()
    words, figures, details = words_of(args.quick), [], {}
    for name, (precision, compiled) in SETTINGS.items():
        if compiled and find_compiler() is None:
            figures.append(
                Figure(f"growth of peak memory, {name}", f"<= {TARGET}", "no C++ compiler on the path", False)
            )
            continue
        say(f"{name}: memory of paceline and of the hand-written loop in turn")
        own = [*words, *setting_words(precision, compiled)]
        budget = Budget(min_pairs=1, max_pairs=1) if args.quick else BUDGET
        details[name] = measure(own, budget, steps=3)
        figures += figures_of(name, details[name], parameter_count(resolve(own).spec))
    return finish("memory", figures, details, args, words)


if __name__ == "__main__":
    sys.exit(main())
