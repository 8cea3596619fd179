"""What a drill tells the processes of one trial, and what they write down of what they did. Standard library only.

The order travels in the environment, so that restarted workers and the checkpoint writer have it too. What was done
stands in the truth file, one JSON object a line, written before it is done; a fault that is there is not done again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "PACELINE_DRILL"
ATTEMPT = "PACELINE_ATTEMPT"

EVERY_RANK = -1

MARK = "a fault of this drill"
"""Words in the message of every exception that a drill raises."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One fault of one trial.

    Attributes:
        kind: of `faults.FAULTS`; empty for none.
        rank: that it strikes; `EVERY_RANK` for all.
        step: optimizer step, counted from 1, in which it strikes first.
        truth: the truth file.
        seed: of what is random in it.
        seconds: how long it lasts, or within which it strikes.
        place: the folder or file that it works on.
        without: the protection that is switched off in this trial, for a control; empty for none.
    """

    kind: str
    rank: int
    step: int
    truth: str
    seed: int = 0
    seconds: float = 0.0
    place: str = ""
    without: str = ""

    def environment(self) -> dict[str, str]:
        """The variable that carries it."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    def note(self, **more: Any) -> None:
        """Write down that it is done, now, by this process."""
        entry = {
            "kind": self.kind, "rank": self.rank, "step": self.step, "attempt": int(os.environ.get(ATTEMPT, "1")),
            "time": time.time(), "pid": os.getpid(), **more,
        }  # fmt: skip
        # One write to the end of the file: what follows may be the end of this process.
        handle = os.open(self.truth, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(handle, json.dumps(entry).encode() + b"\n")
        finally:
            os.close(handle)

    def done(self) -> list[dict[str, Any]]:
        """What was done so far, in this attempt and those before."""
        return read_truth(Path(self.truth))


def from_environment(env: Mapping[str, str] | None = None) -> Order | None:
    """The order of this process; None outside of a drill."""
    text = (os.environ if env is None else env).get(VARIABLE)
    return Order(**json.loads(text)) if text else None


def read_truth(path: Path) -> list[dict[str, Any]]:
    """The entries of a truth file, as they were written; none where nothing was done."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.strip()]
