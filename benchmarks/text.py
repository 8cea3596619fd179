"""The benchmarks' text: the standard library's source as one document, so that no border falls inside a sample."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.record import SCRATCH
from paceline.data.config import Source
from paceline.data.sources import open_source

CHARACTERS = 6_000_000


def one_document() -> Path:
    """The text file; written once, so that the shards made of it are found again."""
    path = SCRATCH / "stdlib.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        pieces, size = [], 0
        for piece in open_source(Source(source="stdlib"), "data.source", None).pieces():
            pieces.append(piece.text)
            size += len(piece.text)
            if size >= CHARACTERS:
                break
        path.write_text("".join(pieces), encoding="utf-8", errors="replace")
    return path


def one_document_words() -> list[str]:
    """The `[data]` of a job that reads it: nothing is held out, since that would cut the document."""
    return [f"data.source={json.dumps(str(one_document()))}", "data.eval_fraction=0"]
