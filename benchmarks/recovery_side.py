"""A bare worker for `benchmarks.recovery`: the hand-written loop, its state loaded from a file, one step, the time.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m benchmarks.recovery_side JOB.pickle STATE.pt OUT.json

Without STATE.pt it makes that first, so that there is something to load.
"""

from __future__ import annotations

import faulthandler
import json
import pickle
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.handwritten import HANG_SECONDS, Handwritten


def main(job: str, state: str, out: str) -> None:
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    dist.init_process_group("gloo")
    recipe, dataset = pickle.loads(Path(job).read_bytes())
    loop = Handwritten(recipe, dataset, dist.get_rank(), dist.get_world_size())
    if Path(state).exists():
        held = torch.load(state, weights_only=True)
        loop.model.load_state_dict(held["model"])
        loop.optimizer.load_state_dict(held["optimizer"])
        loop.done = held["done"]
    began = time.time()
    loop.step()
    ended = time.time()
    if dist.get_rank() == 0:
        if not Path(state).exists():
            held = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict(), "done": loop.done}
            torch.save(held, state)
        Path(out).write_text(json.dumps({"began": began, "ended": ended}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(*sys.argv[1:])
