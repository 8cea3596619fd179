"""How long a plan takes: whole commands, interpreter's start included, and one prediction.

python -m benchmarks.plan_speed
"""

from __future__ import annotations

import statistics
import sys
import time

from benchmarks.command_start import BARE, wall_seconds
from benchmarks.program import finish, parser
from benchmarks.record import Figure, say
from benchmarks.startup import script
from paceline.cluster.probe import probe_host
from paceline.cluster.spec import parse_cluster
from paceline.job.load import load_job
from paceline.plan.search import Search

SEARCHES = {
    "405B on 16,384 devices": (
        2.0, ["model.preset=llama3-405b", "batch.global_batch=2048", "data.sequence_length=8192", "run.tokens=15e12"],
        "2048x8xh100-sxm:ndr400",
    ),
    "8B on 64 devices": (
        0.5, ["model.preset=llama3-8b", "batch.global_batch=256", "data.sequence_length=8192", "run.tokens=1e12"],
        "8x8xh100-sxm:ndr400",
    ),
}  # fmt: skip
PREDICTION_SECONDS = 1e-3
ROUNDS = 11
PREDICTIONS = 2000


def search_figure(name: str, rounds: int) -> tuple[Figure, list[float]]:
    """A whole command, in turn with bare Python so that a busy machine shows."""
    limit, words, cluster = SEARCHES[name]
    command = [*script("paceline"), "plan", *words, "--cluster", cluster, "--json"]
    wall_seconds(command)
    found, bare = [], []
    for _ in range(rounds):
        bare.append(wall_seconds(BARE))
        found.append(wall_seconds(command))
    median = statistics.median(found)
    told = f"{median:.2f} s, {min(found):.2f} to {max(found):.2f} (bare Python {statistics.median(bare) * 1000:.0f} ms)"
    return Figure(f"plan, {name}, whole command", f"< {limit:g} s", told, median < limit), found


def prediction_seconds(count: int) -> list[float]:
    """Seconds of single predictions of choices drawn evenly from all that may fit."""
    _, words, cluster = SEARCHES["405B on 16,384 devices"]
    looking = Search(load_job(None, words), parse_cluster(cluster, probe_host()))
    pool = looking.pool(looking.allowed())
    order = looking.in_order(pool)
    found = []
    for index in order[:: max(1, len(order) // count)]:
        setting = looking.scale.setting_of(pool.choice(int(index)))
        began = time.perf_counter()
        looking.scale.step(setting)
        found.append(time.perf_counter() - began)
    return found


def main() -> int:
    args = parser(__doc__).parse_args()
    rounds = 2 if args.quick else ROUNDS
    figures, details = [], {}
    for name in SEARCHES:
        say(name)
        figure, details[name] = search_figure(name, rounds)
        figures.append(figure)
    say("predictions")
    each = prediction_seconds(50 if args.quick else PREDICTIONS)
    details["prediction"] = each
    median, high = statistics.median(each), sorted(each)[int(0.9 * len(each))]
    told = f"{median * 1000:.2f} ms, 90% within {high * 1000:.2f} ms"
    figures.append(Figure("one prediction", f"< {PREDICTION_SECONDS * 1000:g} ms", told, median < PREDICTION_SECONDS))
    return finish("plan_speed", figures, details, args, [word for _, words, _ in SEARCHES.values() for word in words])


if __name__ == "__main__":
    sys.exit(main())
