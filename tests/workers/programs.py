"""What workers do in the tests: `python -m tests.workers.programs NAME ARGS`, started by our launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings

from paceline.errors import JobError, Preempted
from paceline.workers.heartbeat import beat
from paceline.workers.verdict import reported


def steps(rank_that_fails: int = -1, how: str = "", count: int = 5, timeout: float = 40.0) -> int:
    """A few all-reduces; one rank may fail at step 3."""
    import torch
    import torch.distributed as dist

    from paceline.workers.rendezvous import join, leave

    world = join(timeout)
    try:
        for step in range(count):
            beat(step, "forward")
            if world.rank == rank_that_fails and step == 3:
                fail(how)
            beat(step, "reducing gradients")
            dist.all_reduce(torch.ones(300, device=world.device))
        if world.rank == 0:
            print(f"{world.world_size} ranks done")
    finally:
        leave(world)
    return 0


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("bad sample 17")
    if how == "refuse":
        raise JobError("sample 17 is longer than 128", key="data.sequence_length", hint="Raise it.")
    if how == "exit":
        print("a library gives up")
        os._exit(5)
    if how == "sleep":
        time.sleep(600)
    if how == "memory":
        raise MemoryError("can't allocate memory: you tried to allocate 1 TB")
    os.kill(os.getpid(), getattr(signal, how))


def show_environment() -> int:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OMP_NUM_THREADS"]
    shown = {name: os.environ[name] for name in names} | {"mask": sorted(os.sched_getaffinity(0)), "args": sys.argv}
    print(json.dumps(shown))
    return 0


def talk() -> int:
    rank = int(os.environ["RANK"])
    print("the same on all")
    print(f"[rank{rank}]:[W1129 15:04:06.430{rank} {1000 + rank} x.cpp:1] a native warning", file=sys.stderr)
    if rank == 3:
        warnings.warn("only here", stacklevel=1)
    if rank == 0:
        sys.stdout.write("\rstep 1\rstep 2")
        time.sleep(0.2)
        sys.stdout.write("\rstep 3\n")
    return 0


def wait_for_ever(how: str) -> int:
    """`deaf` ignores SIGTERM, `saves` ends by it with its state saved, `plain` has no handler, `stopped` is stopped."""
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how == "saves":
        signal.signal(signal.SIGTERM, _save)
    beat(0, "joined")
    print("waiting", flush=True)
    if how == "stopped" and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
    return 0


def _save(number: int, frame: object) -> None:
    raise Preempted("interrupted at step 0; saved", values={"step": 0})


def leave_a_child() -> int:
    """A child that keeps the pipe open and would outlive this rank."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3)"])
    return 0


def silent() -> int:
    """Joined, and then no sign of life."""
    beat(0, "joined")
    beat(7 + (os.environ["RANK"] != "1"), "training step")
    time.sleep(600)
    return 0


def never_joins() -> int:
    if os.environ["RANK"] == "1":
        time.sleep(600)
    beat(0, "joined")
    time.sleep(600)
    return 0


def refuse_without_torch() -> int:
    if os.environ["RANK"] == "1":
        fail("refuse")
    time.sleep(600)
    return 0


def bound_mask() -> int:
    from paceline.workers.rendezvous import join, leave

    leave(join(30.0))
    return 0


def main() -> int:
    name, *args = sys.argv[1:]
    if name == "raise_outside":
        raise ValueError("not handled by anyone")
    if name == "steps":
        rank, how, *rest = args or ["-1", ""]
        return reported(lambda: steps(int(rank), how, timeout=float(rest[0]) if rest else 40.0))
    return reported(lambda: int(globals()[name](*args)))


if __name__ == "__main__":
    sys.exit(main())
