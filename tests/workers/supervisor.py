"""A command as thin as the product's own: starts `tests.workers.programs` on several ranks and tells how it ended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paceline.errors import PacelineError
from paceline.workers.start import start
from paceline.workers.watch import watch


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--procs", type=int, default=2)
    parser.add_argument("--module", default="tests.workers.programs")
    parser.add_argument("--port", type=int)
    parser.add_argument("--stall", type=float)
    parser.add_argument("--start", type=float, default=60.0)
    parser.add_argument("--stop", type=float, default=10.0)
    parser.add_argument("--logs", type=Path)
    parser.add_argument("words", nargs="+")
    args = parser.parse_args()
    try:
        group = start(args.words, procs=args.procs, run_id="test", module=args.module, port=args.port)
        pids = " ".join(str(worker.pid) for worker in group.workers)
        print(f"pids {pids}", flush=True)
        result = watch(
            group, stall_seconds=args.stall, start_seconds=args.start, stop_seconds=args.stop, log_dir=args.logs
        )
    except PacelineError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return error.exit_code
    if result.error is not None:
        print(f"paceline: {result.error}", file=sys.stderr)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
