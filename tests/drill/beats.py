"""A worker that does nothing but say where it is: what a training loop looks like to a drill.

python -m tests.drill.beats STEPS EVERY
"""

from __future__ import annotations

import sys

from paceline.workers import heartbeat
from paceline.workers.verdict import reported


def main() -> int:
    steps, every = (int(word) for word in sys.argv[1:])
    for step in range(steps):
        heartbeat.beat(step, "waiting for data")
        heartbeat.beat(step, "training step")
        if (step + 1) % every == 0:
            heartbeat.beat(step + 1, "copying the state for a save", allow_seconds=60.0)
    print(f"{steps} steps done")
    return 0


if __name__ == "__main__":
    sys.exit(reported(main))
