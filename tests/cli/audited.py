"""`paceline` with every start of a process, and the import of torch, told on stderr: what a refusal must come before."""

from __future__ import annotations

import sys
from typing import Any

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
STARTED, TORCH = "audited: a process was started", "audited: torch was imported"


def tell(event: str, args: tuple[Any, ...]) -> None:
    if event in STARTS:
        print(STARTED, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.addaudithook(tell)
    from paceline.cli import main

    code = main(sys.argv[1:])
    if "torch" in sys.modules:
        print(TORCH, file=sys.stderr, flush=True)
    sys.exit(code)
