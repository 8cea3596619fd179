"""When output head and loss are taken in chunks of tokens, and what that keeps. Imports no torch."""

from __future__ import annotations

from paceline.units import MiB

WHOLE_LOGITS_BYTES = {"cpu": 256 * MiB, "cuda": 1024 * MiB}
"""float32 logits of one micro-batch up to which they may stand whole: beyond, they are taken in chunks."""

CHUNK_LOGITS_BYTES = {"cpu": 64 * MiB, "cuda": 512 * MiB}
"""float32 logits of one chunk: enough tokens for the matrix product to be as fast as a whole one."""

MIN_CHUNK_TOKENS = 16


def auto_chunk_tokens(tokens: int, vocab_size: int, device_kind: str) -> int:
    """Tokens per chunk of a micro-batch of `tokens`; 0 where its logits may stand whole."""
    if 4 * tokens * vocab_size <= WHOLE_LOGITS_BYTES[device_kind]:
        return 0
    return min(tokens, max(MIN_CHUNK_TOKENS, CHUNK_LOGITS_BYTES[device_kind] // (4 * vocab_size)))


def chunked_kept_bytes(vocab_size: int, dim: int, weight_bytes: int) -> int:
    """The gradient of the head's weight, which the chunked loss makes in its forward and keeps for the backward.

    The gradient of the head's input takes the input's place, which the whole loss would keep.
    """
    return vocab_size * dim * weight_bytes


def chunk_peak_bytes(chunk_tokens: int, vocab_size: int, dtype_bytes: int) -> int:
    """What one chunk holds while it is worked on: its logits as they are multiplied, and in float32 or wider."""
    wide = max(4, dtype_bytes)
    return chunk_tokens * vocab_size * (wide + (dtype_bytes if dtype_bytes < wide else 0))
