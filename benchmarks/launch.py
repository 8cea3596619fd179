"""Starts a benchmark's ranks as `paceline train` starts its own: same affinity, threads, supervision. Imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, say
from paceline.job.load import load_job, split_words
from paceline.job.resolve import Resolved, resolve_here
from paceline.train.shared_run import open_run, worker_environment
from paceline.workers import affinity
from paceline.workers.start import plan_here, start
from paceline.workers.watch import watch

PROCS = 2


def run_ranks(
    module: str,
    words: Sequence[str],
    options: dict[str, Any],
    procs: int = PROCS,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run `python -m MODULE` on the ranks of a job, in a run directory that is removed afterwards.

    Args:
        module: a program that calls `ranks.join_ranks` and `ranks.tell`.
        words: job file and overrides.
        options: what the program is told beside the job.
        procs: number of ranks.
        variables: of their environment, beside this process's.

    Returns:
        What rank 0 told.

    Raises:
        PacelineError: what the ranks came to.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        all_words = [*words, f"run.dir={json.dumps(folder)}", f"launch.procs_per_node={procs}"]
        resolved = resolve(all_words)
        told = Path(folder) / "told.json"
        given = Path(folder) / "options.json"
        given.write_text(json.dumps(options), encoding="utf-8")
        _run(resolved, module, [str(given), str(told), *all_words], variables or {})
        document: dict[str, Any] = json.loads(told.read_text(encoding="utf-8"))
        return document


def run_alone(
    module: str, words: Sequence[str], ranks: int, threads: int = 1, limit_seconds: float = 600.0
) -> list[Any]:
    """Run `python -m MODULE WORDS --folder FOLDER --rank N` for each rank: a program without a job or a run directory.

    Args:
        module: a program that leaves what it found as `FOLDER/<rank>.json`, and may meet at a file in the folder.
        words: its options.
        ranks: how many processes.
        threads: of each.
        limit_seconds: after which they are ended.

    Returns:
        What each rank found.

    Raises:
        RuntimeError: a rank failed, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        command = [sys.executable, "-m", module, *words, "--folder", folder]
        env = environment() | {"OMP_NUM_THREADS": str(threads)}
        processes = [subprocess.Popen([*command, "--rank", str(rank)], cwd=ROOT, env=env) for rank in range(ranks)]
        until = time.monotonic() + limit_seconds
        try:
            codes = [process.wait(max(0.0, until - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{module} on {ranks} ranks did not end within {limit_seconds:.0f} s") from None
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(codes):
            raise RuntimeError(f"{module} on {ranks} ranks: exit codes {codes}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def resolve(words: Sequence[str]) -> Resolved:
    """A job's words as numbers on this host."""
    return resolve_here(load_job(*split_words(words)))


def environment() -> dict[str, str]:
    """This process's environment, with the benchmarks importable from anywhere."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def _run(resolved: Resolved, module: str, argv: list[str], variables: Mapping[str, str]) -> None:
    launch = resolved.job.launch
    procs = resolved.layout.world_size
    cpus = plan_here(procs, launch.threads, launch.affinity == "auto")
    say(f"  {affinity.describe(cpus, affinity.cpu_quota(), os.environ)}")
    with open_run(resolved) as directory:
        env = {**environment(), **variables, **worker_environment(directory, time.time())}
        with start(argv, procs=procs, module=module, run_id=directory.run_id, cpus=cpus, env=env) as group:
            result = watch(group)
    if result.error is not None:
        raise result.error
