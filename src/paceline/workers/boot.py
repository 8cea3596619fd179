"""The first code of a worker: tie it to its supervisor, then run a module as `python -m MODULE ARGS` would.

    python -m paceline.workers.boot MODULE ARGS...

An exception that the module does not handle becomes the worker's verdict; the supervisor prints it, once and last.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys

from paceline.workers import environment, heartbeat, pulse, stacks, verdict
from paceline.workers.lifeline import die_with_parent


def main() -> None:
    module, *arguments = sys.argv[1:]
    _attach()
    # The module sees the command line that it would have seen without this one.
    sys.argv[:] = [module, *arguments]
    try:
        _prepare()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leave:
        verdict.write_verdict(_code(leave))
        raise
    except (Exception, KeyboardInterrupt) as error:
        code = verdict.exit_code_of(error)
        verdict.write_verdict(code, error)
        verdict.leave_now(code)
    verdict.write_verdict(0)


def _attach() -> None:
    folder = environment.folder()
    if folder is None:
        raise SystemExit("paceline.workers.boot runs under paceline's launcher only")
    die_with_parent(int(os.environ[environment.PARENT]))
    rank = environment.ranks().rank
    # The supervisor alone hears the terminal; a worker that could be stopped by a stray SIGINT would look like a fault.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks.listen(stacks.stacks_path(folder, rank))
    heartbeat.open_file(folder / f"rank-{rank}.beat")
    heartbeat.beat(-1, "importing")
    pulse.start(pulse.answer_path(folder, rank))


def _prepare() -> None:
    """Whatever the one who started the launcher wants in its workers, before their own first import."""
    if before := os.environ.get(environment.BEFORE):
        importlib.import_module(before).arm()


def _code(leave: SystemExit) -> int:
    if leave.code is None:
        return 0
    return leave.code if isinstance(leave.code, int) else 1


if __name__ == "__main__":
    main()
