"""What the workers of a host print, as one stream: its first rank plainly, the others' lines tagged, a line that several
ranks print once."""

from __future__ import annotations

import codecs
import collections
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, BinaryIO

TAIL_LINES = 60
_HOLD_SECONDS = 0.5
"""Other ranks' lines wait this long, so that the first one's copy of the same line comes first and untagged."""

_MAX_REMEMBERED = 10_000
# What differs in copies of one line: the rank's tag, a clock time, the numbers that native warnings start with.
_VARIES = re.compile(
    r"\[rank\d+\]:?|\[[WEIF]\d{4} [\d:.]+ (?:\d+ )?|\d\d:\d\d:\d\d[.,]?\d*|\b(?:pid|process)[ =:]*\d+", re.IGNORECASE
)


class Output:
    """Merges what the workers print into `out`."""

    def __init__(self, out: IO[str], ranks: Sequence[int], log_dir: Path | None = None) -> None:
        """`log_dir`: also keep each rank's whole output in `log_dir/rank-N.log`."""
        self._out = out
        self._first = ranks[0]
        self._tails = {rank: collections.deque[str](maxlen=TAIL_LINES) for rank in ranks}
        self._rest = dict.fromkeys(ranks, b"")
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._owner: dict[str, int] = {}
        self._held: collections.deque[tuple[float, int, str]] = collections.deque()
        self._logs = _open_logs(log_dir, ranks)
        self._muted = False
        self._at_line_start = True

    def feed(self, rank: int, data: bytes) -> None:
        """Take what `rank` has printed."""
        if self._logs:
            self._logs[rank].write(data)
        *lines, self._rest[rank] = (self._rest[rank] + data).split(b"\n")
        for line in lines:
            self._line(rank, line.decode(errors="replace"))
        if rank == self._first and not self._muted:
            self._write(self._decoder.decode(data))
        self.release()

    def release(self, everything: bool = False) -> None:
        """Show the lines of other ranks whose waiting time is over."""
        now = time.monotonic()
        while self._held and (everything or now - self._held[0][0] >= _HOLD_SECONDS):
            _, rank, line = self._held.popleft()
            if self._owner.setdefault(_key(line), rank) == rank:
                self._write(f"{'' if self._at_line_start else chr(10)}[rank {rank}] {line}\n")

    def mute(self) -> None:
        """Show nothing more: a rank has failed, and what the others print from here on are its echoes."""
        self.release(everything=True)
        self._muted = True

    def say(self, text: str) -> None:
        """A line of the supervisor's own."""
        self._write(f"{'' if self._at_line_start else chr(10)}{text}\n")

    def tail(self, rank: int, lines: int) -> list[str]:
        """The last lines that a rank has printed."""
        rest = self._rest[rank].decode(errors="replace")
        return [*self._tails[rank], *([rest] if rest else [])][-lines:]

    def close(self) -> None:
        for rank, rest in self._rest.items():
            if rest and rank != self._first:
                self._line(rank, rest.decode(errors="replace"))
        self.release(everything=True)
        if not self._at_line_start:
            self._write("\n")
        for log in self._logs.values():
            log.close()

    def _line(self, rank: int, line: str) -> None:
        # A progress bar rewrites its line: what counts is its last state.
        line = line.rstrip("\r").rpartition("\r")[2]
        self._tails[rank].append(line)
        if len(self._owner) > _MAX_REMEMBERED:
            self._owner.clear()
        if rank == self._first:
            self._owner[_key(line)] = rank
        elif line.strip() and not self._muted:
            self._held.append((time.monotonic(), rank, line))

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        self._at_line_start = text.endswith(("\n", "\r")) or (not text and self._at_line_start)


def _key(line: str) -> str:
    return _VARIES.sub("", line).strip()


def _open_logs(log_dir: Path | None, ranks: Sequence[int]) -> dict[int, BinaryIO]:
    if log_dir is None:
        return {}
    log_dir.mkdir(parents=True, exist_ok=True)
    return {rank: (log_dir / f"rank-{rank}.log").open("ab") for rank in ranks}
