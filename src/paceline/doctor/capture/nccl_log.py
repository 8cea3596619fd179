"""What NCCL's own log says of the network that it uses: the answer to which settings took effect."""

from __future__ import annotations

import re
from pathlib import Path

NEWEST_FILES = 16
LONGEST_BYTES = 2**20


def transports(pattern: str) -> tuple[str, ...] | None:
    """Networks in the newest files of `NCCL_DEBUG_FILE`, by name; None where it is not set or nothing was written there."""
    if not pattern or pattern.startswith("/dev/"):
        return None
    paths = Path(pattern).parent.glob(re.sub(r"%[hp]", "*", Path(pattern).name))
    newest = sorted(paths, key=lambda path: path.stat().st_mtime)[-NEWEST_FILES:]
    found: set[str] = set()
    for path in newest:
        with path.open(encoding="utf-8", errors="replace") as file:
            found |= networks(file.read(LONGEST_BYTES))
    return tuple(sorted(found)) if newest else None


def networks(text: str) -> set[str]:
    """Names of networks in a log: `NCCL INFO Using network IB`, `... via NET/IBext_v8/0/GDRDMA`."""
    return {name for pair in re.findall(r"Using network (\S+)|via NET/([^/\s]+)", text) for name in pair if name}
