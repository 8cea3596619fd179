"""One rank that saves and then dies, or stays.

    python rank_script.py PLACE WHAT [WRITER WORDS...]

WHAT: "killed-after": killed by SIGKILL right after the save returned; "returns": ends with the save in flight.
"""

from __future__ import annotations

import os
import signal
import sys

from tests.checkpoint.savers import hooked, ranks


def main() -> None:
    place, what, *words = sys.argv[1:]
    with ranks(place, 2, command=hooked(*words)) as run:
        run.save(100)
        process = run.savers[0]._host._process
        print(process.process.pid if process else 0, flush=True)
        if what == "killed-after":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)


if __name__ == "__main__":
    main()
