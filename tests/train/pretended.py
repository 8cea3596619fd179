"""`paceline train` with workers that only pretend: the launcher's own path with its records, in a tenth of a second each.

    python -m tests.train.pretended PLAN section.key=value ...     the launcher; PLAN is what each attempt does
    python -m tests.train.pretended train ...                      a worker, as the launcher starts it

A plan is JSON: by number of the attempt, `WHAT@STEP`, or `WHAT` for before the first step; attempts that it does not name
go to the end. A checkpoint is pretended after every fifth step.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from paceline.errors import JobError, PacelineError
from paceline.job.load import load_job
from paceline.run.files import write_atomic
from paceline.run.records import Checkpoint, RecordWriter, RunFinished, RunStarted, Step
from paceline.train import local_attempt, run, shared_run
from paceline.workers.heartbeat import beat
from paceline.workers.start import start
from paceline.workers.verdict import reported

STEPS, EVERY, STEP_SECONDS = 20, 5, 0.005
PLAN = "PRETENDED_PLAN"


def main() -> int:
    first, *words = sys.argv[1:]
    return reported(worker) if first == "train" else launcher(first, words)


def launcher(plan: str, words: list[str]) -> int:
    os.environ[PLAN] = plan
    local_attempt.start = functools.partial(start, module="tests.train.pretended")  # type: ignore[attr-defined]
    nothing = SimpleNamespace(prepare=lambda data: None)
    local_attempt.importlib = SimpleNamespace(import_module=lambda name: nothing)  # type: ignore[attr-defined, assignment]
    try:
        print(json.dumps(run.supervise(load_job(None, words), words, lambda resolved: {}, lambda run_dir: "none")))
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def worker() -> int:
    attempt, folder = int(os.environ[shared_run.ATTEMPT]), Path(os.environ[shared_run.RUN_PATH])
    rank = int(os.environ["RANK"])
    what, _, at = json.loads(os.environ[PLAN]).get(str(attempt), "").partition("@")
    if what and not at:
        fail(what, rank)
    mark = folder / "checkpoints" / "reached"
    begin = int(mark.read_text()) if mark.exists() else 0
    with RecordWriter(folder, attempt, name=f"rank{rank}") as writer:
        if rank == 0:
            writer.write(RunStarted(
                step=begin, run_id="x", job_digest="x", world_size=int(os.environ["WORLD_SIZE"]), layout={}, device="cpu",
                precision="fp32", compile=False, microbatch=1, accumulation=1, global_batch=1, sequence_length=1,
                parameters=1, flop_per_token=1.0, flop_convention="palm",
            ))  # fmt: skip
        for step in range(begin, STEPS):
            beat(step, "training step")
            if at and step == int(at):
                fail(what, rank)
            time.sleep(STEP_SECONDS)
            if rank == 0:
                writer.write(Step(step=step + 1, loss=1.0, grad_norm=1.0, lr=1.0, tokens=1, seconds=STEP_SECONDS,
                                  tokens_per_second=1.0, mfu=None, samples=step + 1))  # fmt: skip
                if (step + 1) % EVERY == 0:
                    write_atomic(mark, str(step + 1))
                    writer.write(Checkpoint(step=step + 1, state="durable", path=str(mark)))
        if rank == 0:
            writer.write(RunFinished(step=STEPS, exit=0, reason="done", steps=STEPS, samples=STEPS))
    return 0


def fail(what: str, rank: int) -> None:
    """What a rank does; the others wait for it until they are ended."""
    if what == "policy":
        raise PacelineError("5 steps in a row were not finite")
    meeting = Path(os.environ[shared_run.RUN_PATH]) / "checkpoints" / f"rank-0-waits-{os.environ[shared_run.ATTEMPT]}"
    if rank == 0:
        meeting.touch()
        time.sleep(60)
    while not meeting.exists():
        time.sleep(0.001)
    match what:
        case "raise":
            raise ValueError(f"bad sample {time.monotonic_ns()}")
        case "other":
            raise KeyError("another one")
        case "refuse":
            raise JobError("sample 17 is longer than 128", key="data.sequence_length")
        case "exit":
            os._exit(5)
        case "wait":
            print("waiting", flush=True)
            time.sleep(60)
    os.kill(os.getpid(), getattr(signal, what))


if __name__ == "__main__":
    sys.exit(main())
