"""Which pieces of a source are held out for evaluation: a pure function of their place. Imports no numpy, no torch."""

from __future__ import annotations

import hashlib
import math


def is_held_out(index: int, fraction: float) -> bool:
    """Whether piece `index` of a source belongs to the eval set.

    One piece of every 1 / `fraction` is held out, at a hashed place in the first half of its block: the share is exact
    even for a few pieces, no rhythm of the data can meet it, and more text at the end changes nothing before it.
    """
    if fraction <= 0:
        return False
    block = math.floor(index * fraction)
    while math.ceil(block / fraction) > index:
        block -= 1
    while math.ceil((block + 1) / fraction) <= index:
        block += 1
    first, following = math.ceil(block / fraction), math.ceil((block + 1) / fraction)
    digest = hashlib.blake2b(f"held out {block}".encode(), digest_size=8).digest()
    return index == first + int.from_bytes(digest, "little") % max(1, (following - first) // 2)
