"""Small text on disk for the tests, and sections that read it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from paceline.data.config import DataSection

WORDS = ["the", "rank", "and", "loss", "of", "a", "step", "in", "data", "is", "gradient", "to", "sum"]


def write_texts(folder: Path, files: int = 40, words: int = 200, seed: int = 0) -> Path:
    """`files` text files of random words."""
    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        text = " ".join(generator.choice(WORDS) for _ in range(words))
        (folder / f"{number:03d}.txt").write_text(text + "\n")
    return folder


def section(folder: Path, cache: Path, **settings: Any) -> DataSection:
    """Sequences of 16 tokens, a tenth of the files held out."""
    settings = {"sequence_length": 16, "eval_fraction": 0.1, **settings}
    return DataSection(source=str(folder), cache_dir=str(cache), **settings)


def silent(*_: object) -> None:
    """A progress function that shows nothing."""
