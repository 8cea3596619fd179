"""What is wrong with a checkpoint. No torch."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing that is not as it was written.

    Attributes:
        file: in the checkpoint's folder.
        what: the thing that was looked at.
        expected, actual: what it should be and what it is.
        tensor, offset: of the piece concerned, where it is one.
    """

    file: str
    what: str
    expected: str
    actual: str
    tensor: str | None = None
    offset: tuple[int, ...] | None = None

    def describe(self) -> str:
        """The finding as a sentence."""
        piece = "" if self.tensor is None else f" of {self.tensor}"
        piece += "" if self.offset is None else f" at {list(self.offset)}"
        return f"{self.file}: {self.what}{piece}: expected {self.expected}, found {self.actual}"
