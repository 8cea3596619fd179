"""Synthetic runs whose ledger can be added up by hand."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from tests.run.samples import started, step

from paceline.run.directory import RunDirectory
from paceline.run.records import (
    PARTS,
    Change,
    Checkpoint,
    Derivation,
    Eval,
    Fault,
    Record,
    RecordWriter,
    Restart,
    RunFinished,
    RunStarted,
    Step,
    Straggler,
    Summary,
    Window,
)

UNSTAGED = tuple(part for part in PARTS if part != "bubble")
"""The parts of a step without a pipeline."""

T0 = 1_790_000_000.0
GiB = 2**30


class Clock:
    """Seconds since the epoch that the test moves."""

    def __init__(self, now: float = T0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def simple_run(path: Path, *, finished: bool = True) -> None:
    """2 ranks, 3 s of start-up, 10 steps of 0.1 s, 1 s of evaluation, 0.5 s of a blocking save, 0.5 s of nothing."""
    make_job(path)
    clock = Clock()
    with RecordWriter(path, 1, clock) as writer:
        clock.now += 2.0
        writer.write(started(launched=T0))
        clock.now += 1.0
        for number in range(1, 11):
            clock.now += 0.1
            writer.write(step(number))
        if not finished:
            return
        clock.now += 1.0
        writer.write(Eval(step=10, name="eval", loss=2.0, weight=512.0, seconds=1.0))
        clock.now += 0.5
        for state in ("requested", "staged", "durable"):
            blocked = 0.25 if state != "requested" else 0.0
            writer.write(
                Checkpoint(
                    step=10, state=state, path="checkpoints/step-00000010", bytes=1000,
                    seconds=0.5, blocked_seconds=blocked,
                )
            )  # fmt: skip
        clock.now += 0.5
        writer.write(
            RunFinished(
                step=10, exit=0, reason="all 10 steps done", steps=10, samples=240, loss=4.9, eval_loss=2.0,
                bigram_eval_loss=2.49, tokens=30720, seconds=1.0, tokens_per_second=30720.0, mfu=0.4,
                peak_memory_bytes=[300_000_000, 310_000_000], recompiles=0,
            )
        )  # fmt: skip


def resumed_run(path: Path) -> None:
    """Attempt 1 (2 ranks) dies after step 12; 4 s later attempt 2 (4 ranks) begins at step 10 and ends at 20."""
    make_job(path)
    clock = Clock()
    with RecordWriter(path, 1, clock) as writer:
        writer.write(started(launched=T0 - 1))
        for number in range(1, 13):
            clock.now += 0.1
            writer.write(step(number))
    died = clock.now
    clock.now += 3.0
    with RecordWriter(path, 1, clock, name="supervisor") as writer:
        writer.write(
            Fault(step=12, rank=1, host="box", kind_of_fault="killed", evidence="signal 9", message="rank 1 was killed")
        )
        writer.write(Restart(step=12, reason="rank 1 was killed", next_attempt=2, seconds=3.0))
    clock.now = died + 4.0
    with RecordWriter(path, 2, clock) as writer:
        writer.write(started(at=10, world_size=4, layout={"dp_replicate": 4}, launched=clock.now))
        writer.write(Change(step=10, key="parallel.dp_replicate", old=2, new=4))
        clock.now += 2.0
        for number in range(11, 21):
            clock.now += 0.1
            writer.write(step(number))
        writer.write(RunFinished(step=20, exit=0, reason="all 20 steps done", steps=20, samples=480))


def lifelike_run(path: Path, steps: int = 700) -> None:
    """What `make train` leaves, with a crash on the way, for looking at."""
    make_job(path)
    clock, rng = Clock(), random.Random(1)
    (path / "plan.json").write_text(json.dumps({"chosen": {"step_seconds": 0.13, "mfu": 0.47}}))
    first = max(2, steps * 3 // 5)
    saved = first - max(1, steps // 30)
    with RecordWriter(path, 1, clock) as writer:
        _attempt(writer, clock, rng, 0, first, steps)
    clock.now += 1.5
    with RecordWriter(path, 1, clock, name="supervisor") as writer:
        writer.write(
            Fault(step=first, rank=1, host="box", kind_of_fault="killed", evidence="exit status -9",
                  message="rank 1 was killed")
        )  # fmt: skip
    clock.now += 2.5
    with RecordWriter(path, 2, clock) as writer:
        _attempt(writer, clock, rng, saved, steps, steps)
        clock.now += 0.9
        writer.write(Eval(step=steps, name="eval", loss=1.8134, weight=51200, seconds=0.9))
        _save(writer, clock, steps)
        clock.now += 0.4
        writer.write(
            RunFinished(
                step=steps, exit=0, reason=f"all {steps} steps done", steps=steps, samples=steps * 24, loss=1.7421,
                eval_loss=1.8134, bigram_eval_loss=2.4904, peak_memory_bytes=[412_000_000, 398_000_000], recompiles=0,
            )
        )  # fmt: skip


def make_job(path: Path) -> None:
    values = {"run.steps": 700, "optimizer.lr": 3e-3, "data.source": "stdlib", "model.preset": "tiny"}
    text = "[run]\nsteps = 700  # examples/tiny.toml\n\n[optimizer]\nlr = 3e-3  # examples/tiny.toml\n"
    RunDirectory.open(path, text, values, lambda key: True).release()


def _attempt(writer: RecordWriter, clock: Clock, rng: random.Random, first: int, last: int, total: int) -> None:
    clock.now += 4.2
    writer.write(_started(first, clock.now - 4.2))
    sums: list[dict[str, list[float]]] = [{part: [] for part in UNSTAGED} for _ in range(2)]
    for number in range(first + 1, last + 1):
        parts = _parts(rng, slow=number == first + 1)
        seconds = sum(parts.values())
        clock.now += seconds
        loss = 1.72 + 3.9 * math.exp(-number / 70) + 0.35 * math.exp(-number / 400) + rng.gauss(0, 0.035)
        writer.write(_step(number, total, loss, seconds, parts, rng))
        for rank, lists in enumerate(sums):
            for part, spent in parts.items():
                lists[part].append(spent * (1 + 0.1 * rank * (part == "data_wait")))
        if number % 10 == 0 or number == last:
            for rank, lists in enumerate(sums):
                writer.write(_window(number, rank, lists))
            sums = [{part: [] for part in UNSTAGED} for _ in range(2)]
        if number % 100 == 0:
            clock.now += 0.8
            writer.write(Eval(step=number, name="eval", loss=loss + 0.08, weight=51200, seconds=0.8))
            _save(writer, clock, number)
    writer.write(
        Straggler(step=last, rank=1, host="box", cause="compute", ratio=1.31, evidence="own work 141 ms against 108 ms")
    )


def _started(first: int, launched: float) -> RunStarted:
    return started(
        first, launched=launched, threads_per_rank=1, weights_hash="9f2c61d0aa41", compile=True,
        versions={"paceline": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.2"},
        planned_memory={"parameters_bytes": 3_571_712, "gradients_bytes": 3_571_712, "moments_bytes": 7_143_424,
                        "activations_bytes": 201_326_592, "logits_bytes": 24_000_000, "context_bytes": 160_000_000},
        derivations=[Derivation("batch.microbatch", 12, "largest divisor of 24 / 2 that fits in 4.00 GiB"),
                     Derivation("batch.accumulation", 1, "global_batch 24 / (microbatch 12 x data ranks 2)"),
                     Derivation("parallel.precision", "bf16", "the device multiplies bf16 1.9x as fast as fp32")],
    )  # fmt: skip


def _step(n: int, total: int, loss: float, seconds: float, parts: dict[str, float], rng: random.Random) -> Record:
    return Step(
        step=n, loss=loss, grad_norm=0.6 + 3 * math.exp(-n / 40) + abs(rng.gauss(0, 0.1)),
        lr=3e-3 * min(1, n / 50) * (1 - 0.9 * n / total), tokens=3072, seconds=seconds,
        tokens_per_second=3072 / seconds, mfu=0.062 / seconds, samples=24 * n, parts=parts,
    )  # fmt: skip


def _parts(rng: random.Random, *, slow: bool) -> dict[str, float]:
    means = (0.0004, 0.042, 0.071, 0.011, 0.0085, 0.0005, 0.0016)
    parts = {part: max(1e-5, rng.gauss(mean, mean * 0.07)) for part, mean in zip(UNSTAGED, means, strict=True)}
    if slow:
        parts["forward"] += 3.0
    return parts


def _window(last: int, rank: int, lists: dict[str, list[float]]) -> Window:
    first = last - len(lists["forward"]) + 1
    parts = {
        part: Summary(len(v), sum(v), min(v), max(v), first + max(range(len(v)), key=v.__getitem__))
        for part, v in lists.items()
    }
    return Window(step=last, first_step=first, rank=rank, host="box", parts=parts)


def _save(writer: RecordWriter, clock: Clock, number: int) -> None:
    path = f"checkpoints/step-{number:08d}"
    writer.write(Checkpoint(step=number, state="requested", path=path))
    clock.now += 0.03
    writer.write(
        Checkpoint(step=number, state="staged", path=path, bytes=10_715_136, seconds=0.03, blocked_seconds=0.03)
    )
    writer.write(
        Checkpoint(step=number, state="durable", path=path, bytes=10_715_136, seconds=0.21, blocked_seconds=0.0)
    )
