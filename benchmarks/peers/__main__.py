"""Training speed against other systems on the same work: accelerate and transformers.Trainer.

    python -m benchmarks.peers

Each is in the same two processes as paceline and trains in turn with it: same decoder, initial weights, batches,
micro-batch, optimizer and schedule. A ratio is paceline's tokens per second over the peer's.
"""

from __future__ import annotations

import importlib.util
import sys

from benchmarks.pairs import Budget
from benchmarks.program import finish, parser
from benchmarks.record import Figure, say, versions
from benchmarks.throughput import LOSS_TOLERANCE, QUICK_BUDGET, base_words, compare, interval_of, setting_words, shown

PEERS = ("accelerate", "transformers")
SAME_TARGET, DEFAULTS_TARGET = 1.0, 1.1
BUDGET = Budget(max_seconds=50.0)


def same_setting(peer: str, precision: str, quick: bool) -> tuple[Figure, dict[str, object]]:
    """Eager on both sides."""
    words = [*base_words(quick), *setting_words(precision, False)]
    say(f"{peer}, {precision} eager: paceline and {peer} in turn")
    found = compare(words, peer, precision, False, QUICK_BUDGET if quick else BUDGET, 1 if quick else 2)
    reached = interval_of(found).median >= SAME_TARGET and found["loss_difference"] <= LOSS_TOLERANCE[precision]
    name = f"against {peer} {versions()[peer]}, {precision} eager"
    return Figure(name, f"median >= {SAME_TARGET:g}", shown(found, LOSS_TOLERANCE[precision]), reached), found


def with_defaults(peer: str, quick: bool) -> tuple[Figure, dict[str, object]]:
    """paceline's own choice of precision and compilation against the peer's bf16."""
    words = base_words(quick)
    say(f"{peer} in bf16: paceline with its defaults and {peer} in turn")
    found = compare(words, peer, "bf16", False, QUICK_BUDGET if quick else BUDGET, 1 if quick else 2)
    setting = f"{found['precision']} {'compile' if found['compile'] else 'eager'}"
    name = f"defaults ({setting}) against {peer} {versions()[peer]}, bf16 eager"
    reached = interval_of(found).median >= DEFAULTS_TARGET
    return Figure(name, f"median >= {DEFAULTS_TARGET:g}", shown(found, LOSS_TOLERANCE["bf16"]), reached), found


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", choices=PEERS, help="one peer alone")
    args = options.parse_args()
    figures, details = [], {}
    for peer in PEERS:
        if args.only and args.only != peer:
            continue
        if importlib.util.find_spec(peer) is None:
            figures.append(Figure(f"against {peer}", "", "not installed: make bench installs it", None))
            continue
        for precision in ("fp32", "bf16"):
            figure, details[f"{peer} {precision}"] = same_setting(peer, precision, args.quick)
            figures.append(figure)
    if importlib.util.find_spec("accelerate") is not None and args.only in (None, "accelerate"):
        figure, details["defaults"] = with_defaults("accelerate", args.quick)
        figures.append(figure)
    return finish("peers", figures, details, args, base_words(args.quick))


if __name__ == "__main__":
    sys.exit(main())
