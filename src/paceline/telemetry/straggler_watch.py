"""Looks for stragglers while a run goes on: reads the ranks' windows as they are written. No torch.

It runs beside the run, in the supervisor, so that it costs no step anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from paceline.run.records import Straggler
from paceline.telemetry.stragglers import Finding, Work, find, work_of

LOOK_SECONDS = 0.5
QUIET_WINDOWS = 20


class StragglerWatch:
    """The stragglers of one attempt; a context that looks by itself while it lasts.

    Args:
        run_dir, attempt: whose windows are read.
        like: groups of ranks that do the same work.
        told: called once for each straggler, and again once it had been like its peers in between: after `QUIET_WINDOWS` or
            more, then twice as many, and so on, since a machine that is shared slows its ranks by turns.
    """

    def __init__(
        self, run_dir: Path, attempt: int, like: Sequence[Sequence[int]], told: Callable[[Straggler], None]
    ) -> None:
        self._folder = Path(run_dir) / "records"
        self._attempt = attempt
        self._like = like
        self._ranks = {rank for group in like for rank in group}
        self._told = told
        self._read: dict[Path, int] = {}
        self._open: dict[int, dict[int, Work]] = {}
        self._windows: list[Mapping[int, Work]] = []
        self._first: int | None = None
        self._known: set[tuple[int | None, str]] = set()
        self._quiet: dict[tuple[int | None, str], tuple[int, int]] = {}
        """By straggler: the window from which it may be told again, and for how many it is quiet after that."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stragglers", daemon=True)

    def __enter__(self) -> Self:
        if any(len(group) > 1 for group in self._like):
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Take in what was written since the last look."""
        for path in sorted(self._folder.glob(f"attempt-{self._attempt:04d}-rank*.jsonl")):
            for window in self._new_windows(path):
                self._take(window)

    def _run(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.look()
        self.look()

    def _new_windows(self, path: Path) -> list[dict[str, Any]]:
        """Whole lines that were added to a file."""
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
        except OSError:
            return []
        whole = data.rpartition(b"\n")[0]
        self._read[path] = self._read.get(path, 0) + len(whole) + (1 if whole else 0)
        found = []
        for line in whole.splitlines():
            if line.startswith(b'{"kind":"window"'):
                try:
                    found.append(msgspec.json.decode(line))
                except msgspec.DecodeError:
                    continue
        return found

    def _take(self, window: Mapping[str, Any]) -> None:
        """A window is judged once all ranks have written it; the attempt's first one warms up."""
        step = int(window["step"])
        self._first = int(window["first_step"]) if self._first is None else min(self._first, int(window["first_step"]))
        if not window["parts"]:
            return
        ranks = self._open.setdefault(step, {})
        ranks[int(window["rank"])] = work_of(window)
        if set(ranks) < self._ranks:
            return
        del self._open[step]
        if int(window["first_step"]) > self._first:
            self._windows.append(ranks)
            self._judge(step)

    def _judge(self, step: int) -> None:
        found, now = find(self._windows, self._like), len(self._windows)
        for one in found:
            key = (one.rank, one.cause)
            again, quiet = self._quiet.get(key, (0, QUIET_WINDOWS))
            if key not in self._known and now >= again:
                self._quiet[key] = (now + quiet, 2 * quiet)
                self._told(_record(one, step))
        self._known = {(one.rank, one.cause) for one in found}


def _record(found: Finding, step: int) -> Straggler:
    return Straggler(
        step=step, rank=found.rank, host=found.host, cause=found.cause, ratio=1.0 / max(found.score, 1e-9),
        evidence=found.evidence,
    )  # fmt: skip
