"""What is in prepared data, in numbers and a sample of text. Imports no torch."""

from __future__ import annotations

from typing import Any

from paceline.data import shards
from paceline.data.config import DataSection
from paceline.data.dataset import TokenDataset
from paceline.data.prepare import PreparedData, open_prepared

SAMPLE_TOKENS = 200


def inspect(
    section: DataSection, *, verify: bool = False, steps: int | None = None, global_batch: int | None = None
) -> dict[str, Any]:
    """Figures of the prepared data of a section, as plain data for `paceline data inspect`.

    Args:
        section: the job's `[data]`.
        verify: read every byte and compare all checksums, not only those of small files.
        steps, global_batch: with both, how many epochs that many optimizer steps make.

    Returns:
        `folder`, `fingerprint`, `tokenizer`, `sources`, `sets` (per set: `documents`, `tokens`, `sequences`),
        `text_bytes`, `bytes_per_token`, `shards`, `verified` (whether all bytes were read), `damage` (a list, empty
        where the checksums are right), `sample` (text from the training set), and `epochs` where asked for.

    Raises:
        DataError: the data is not prepared, or damaged beyond opening.
    """
    data = open_prepared(section)
    manifest = data.manifest
    text_bytes = sum(shard.text_bytes for shard in manifest.shards)
    tokens = sum(part.token_count for shard in manifest.shards for part in shard.parts.values())
    found: dict[str, Any] = {
        "folder": str(data.folder),
        "fingerprint": manifest.fingerprint,
        "tokenizer": {
            "name": manifest.tokenizer.name,
            "fingerprint": manifest.tokenizer.fingerprint,
            "vocabulary": manifest.tokenizer.vocabulary,
            "separator": manifest.tokenizer.separator,
        },
        "sources": [{"source": s.source, "sets": s.splits} for s in manifest.streams],
        "sequence_length": section.sequence_length,
        "sets": {"train": _figures(data.train)} | {name: _figures(held) for name, held in data.evals.items()},
        "text_bytes": text_bytes,
        "bytes_per_token": text_bytes / tokens,
        "shards": len(manifest.shards),
        "shard_bytes": sum(file.size_bytes for file in manifest.files()),
        "verified": verify,
        "damage": shards.check_files(data.folder, manifest, verify=verify),
        "sample": _sample(data),
    }
    if steps is not None and global_batch is not None:
        found["epochs"] = steps * global_batch / len(data.train)
    return found


def _figures(dataset: TokenDataset) -> dict[str, int]:
    return {"documents": dataset.documents, "tokens": dataset.token_count, "sequences": len(dataset)}


def _sample(data: PreparedData) -> str:
    return data.tokenizer.decode(data.train.streams[0].tokens(SAMPLE_TOKENS))
