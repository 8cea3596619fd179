"""Length of a step of each pipeline schedule, with stages that sleep: the bubble itself, without a core for each rank.

    python -m benchmarks.pipeline_bubble [--microbatches 8 16]

A stage sleeps 50 ms in the forward of a micro-batch, 50 ms for the gradient of its input and 50 ms for those of its weights,
each part in an autograd function of its own; a rank with two stages sleeps twice as long. Four ranks run
`parallel.pipeline.apply.Pipeline`, which is what `paceline train` runs. The step is held to within 3% of the player's
prediction and of the formula of docs/math/pipeline.md, and the micro-batches alive at once to the schedule's promise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.launch import run_alone
from benchmarks.program import finish, parser
from benchmarks.record import Figure, say
from paceline.parallel.pipeline.config import PipelineConfig
from paceline.parallel.pipeline.cost import ideal_seconds, peak_alive
from paceline.parallel.pipeline.player import StageSeconds, play

RANKS = 4
SECONDS = 0.05
WITHIN = 0.03
WARM_STEPS, STEPS = 1, 3

CONFIGS = [
    PipelineConfig("gpipe", RANKS, 1, (1,) * RANKS),
    PipelineConfig("1f1b", RANKS, 1, (1,) * RANKS),
    PipelineConfig("interleaved-1f1b", RANKS, 2, (1,) * 2 * RANKS),
    PipelineConfig("zero-bubble", RANKS, 1, (1,) * RANKS),
    PipelineConfig("zbv", RANKS, 2, (1,) * 2 * RANKS),
]


def measure(microbatches: list[int], seconds: float, steps: int) -> list[dict[str, Any]]:
    """What each rank found: seconds per step and micro-batches alive, by schedule and micro-batches."""
    words = ["--seconds", str(seconds), "--steps", str(steps), "--microbatches", *map(str, microbatches)]
    return run_alone("benchmarks.pipeline_bubble", words, RANKS)


def be_rank(args: argparse.Namespace) -> None:
    """One rank: every schedule in turn."""
    import torch
    import torch.distributed as dist

    from benchmarks.sleeping import SleepingStages, alive
    from paceline.parallel.layout import Layout
    from paceline.parallel.mesh import build_mesh
    from paceline.parallel.pipeline.apply import Pipeline
    from paceline.workers.gloo import run_one_at_a_time

    run_one_at_a_time()
    store = torch._C._distributed_c10d.FileStore(f"{args.folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=RANKS)
    device = torch.device("cpu")
    mesh = build_mesh(Layout(pp=RANKS), device)
    found = {}
    for config in CONFIGS:
        stages = SleepingStages(config, args.rank, args.seconds)
        pipeline = Pipeline(stages, config, mesh, device)
        for microbatches in args.microbatches:
            batches = [{"tokens": torch.zeros(1, 1, dtype=torch.long)} for _ in range(microbatches)]
            took: list[tuple[float, float]] = []
            for _ in range(WARM_STEPS + args.steps):
                alive.most = 0
                dist.barrier()
                started = time.perf_counter()
                pipeline.run(batches, stages.forward, stages.loss, lambda part: None)
                # One clock for all processes of a host.
                took.append((started, time.perf_counter()))
            found[_key(config, microbatches)] = {"steps": took[WARM_STEPS:], "alive": alive.most}
    Path(args.folder, f"{args.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _key(config: PipelineConfig, microbatches: int) -> str:
    return f"{config.schedule}, {microbatches} micro-batches"


def _step_seconds(ranks: Sequence[tuple[float, float]]) -> float:
    """From the first rank's start to the last one's end."""
    return max(end for _, end in ranks) - min(start for start, _ in ranks)


def figures_of(config: PipelineConfig, microbatches: int, ranks: list[dict[str, Any]], seconds: float) -> list[Figure]:
    key = _key(config, microbatches)
    stage = StageSeconds(seconds, seconds, seconds)
    of_rank = seconds * config.stages_per_rank
    per_rank = StageSeconds(of_rank, of_rank, of_rank)
    played = play(config, microbatches, [stage] * config.num_stages)
    ideal = ideal_seconds(config, microbatches, per_rank)
    took = statistics.median(_step_seconds(step) for step in zip(*(rank[key]["steps"] for rank in ranks), strict=True))
    alive = [rank[key]["alive"] for rank in ranks]
    promised = [peak_alive(config, microbatches, rank) for rank in range(RANKS)]
    near = abs(took / played.step_seconds - 1) <= WITHIN and abs(took / ideal - 1) <= WITHIN
    return [
        Figure(
            f"step of {RANKS} sleeping ranks, {key}",
            f"within {WITHIN:.0%} of {ideal:.3f} s (formula) and {played.step_seconds:.3f} s (player)",
            f"{took:.3f} s, {took / ideal - 1:+.1%}; bubble {1 - microbatches * per_rank.total / took:.1%}",
            near,
        ),
        Figure(f"micro-batches alive, {key}", f"{promised}", f"{alive}", alive == promised),
    ]


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    made.add_argument("--seconds", type=float, default=SECONDS, help=argparse.SUPPRESS)
    made.add_argument("--steps", type=int, default=STEPS, help=argparse.SUPPRESS)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--folder", help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.rank is not None:
        be_rank(args)
        return 0
    seconds, steps = (0.005, 1) if args.quick else (args.seconds, args.steps)
    say(f"{len(CONFIGS)} schedules on {RANKS} ranks, {args.microbatches} micro-batches, {seconds * 1e3:.0f} ms a part")
    ranks = measure(args.microbatches, seconds, steps)
    figures = [f for c in CONFIGS for m in args.microbatches for f in figures_of(c, m, ranks, seconds)]
    return finish("pipeline_bubble", figures, {"ranks": ranks, "seconds": seconds}, args, [])


if __name__ == "__main__":
    sys.exit(main())
