"""What a block's backward computes anew. Imports no torch."""

from __future__ import annotations

from typing import Literal

Recompute = Literal["none", "selective", "full"]

MEANING = {
    "none": "every block keeps what its backward needs",
    "selective": "blocks keep their input and the outputs of matrix products and attention; the rest is made anew",
    "full": "blocks keep their input; all of them run again in the backward pass",
}
