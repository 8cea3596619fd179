"""Text to token ids and back: bytes, any tokenizer.json, or a byte-level BPE trained on the data. Imports no torch.

Legend: ids are numpy arrays of whole numbers, one per text, without any special token; the separator is put in by
whoever joins documents.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.config import nearest
from paceline.errors import DataError

Ids = npt.NDArray[Any]

PARALLELISM = "TOKENIZERS_PARALLELISM"
_SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|eot_id|>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """What turns text into token ids.

    Attributes:
        vocabulary: number of ids, the separator's included.
        separator: the id that every document begins with.
        fingerprint: equal for tokenizers that give the same ids.
    """

    @property
    def vocabulary(self) -> int: ...
    @property
    def separator(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def encode_batch(self, texts: list[str]) -> list[Ids]: ...
    def decode(self, ids: Sequence[int] | Ids) -> str: ...


class BytesTokenizer:
    """The UTF-8 bytes of the text, and one id more for the separator."""

    vocabulary = 257
    separator = 256
    fingerprint = "bytes-256+1"

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Ids 0..255 of each text."""
        return [np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text; separators are left out, broken characters shown as U+FFFD."""
        numbers = np.asarray(ids)
        return numbers[numbers < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")


class FileTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library when it is first needed.

    The separator is the file's end-of-text token; where it has none, an id above its vocabulary.
    """

    def __init__(self, path: Path, sizes: tuple[int, int] | None = None) -> None:
        """`sizes`, vocabulary and separator, saves reading the whole file where they are known."""
        self.path = path
        self._text = _read(path)
        self.fingerprint = "tokenizer.json-" + hashlib.sha256(self._text).hexdigest()[:16]
        self._loaded: Any = None
        self._numbers = sizes

    @property
    def vocabulary(self) -> int:
        """Number of ids, the separator's included."""
        return self._sizes()[0]

    @property
    def separator(self) -> int:
        """The id that every document begins with."""
        return self._sizes()[1]

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Ids of each text, without special tokens."""
        return [
            np.asarray(e.ids, dtype=np.uint32) for e in self._load().encode_batch_fast(texts, add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text, without special tokens."""
        known = self._load().get_vocab_size(with_added_tokens=True)
        return str(self._load().decode([int(i) for i in ids if int(i) < known], skip_special_tokens=True))

    def to_json(self) -> bytes:
        """The file as it was read."""
        return self._text

    def _sizes(self) -> tuple[int, int]:
        if self._numbers is None:
            ids: dict[str, int] = self._load().get_vocab(with_added_tokens=True)
            top = max(ids.values(), default=-1) + 1
            found = next((ids[name] for name in _SEPARATORS if name in ids), None)
            self._numbers = (top, found) if found is not None else (top + 1, top)
        return self._numbers

    def _load(self) -> Any:
        if self._loaded is None:
            from tokenizers import Tokenizer as Library

            try:
                self._loaded = Library.from_str(self._text.decode())
            except Exception as error:  # the library raises nothing narrower
                raise DataError(
                    f"{self.path} is no tokenizer file: {error}",
                    key="data.tokenizer",
                    values={"path": str(self.path)},
                    hint="Give the path of a tokenizer.json as the tokenizers library saves it.",
                ) from None
            self._loaded.no_truncation()
            self._loaded.no_padding()
        return self._loaded


def open_tokenizer(path: Path) -> FileTokenizer:
    """The tokenizer in a `tokenizer.json`.

    Raises:
        DataError: there is no such file, or it is not one.
    """
    if path.is_dir():
        path = path / "tokenizer.json"
    return FileTokenizer(path)


def train_bpe(texts: Iterable[str], vocabulary: int, path: Path) -> FileTokenizer:
    """Train a byte-level BPE of `vocabulary` ids (256 bytes, the separator, merges) and keep it at `path`.

    Raises:
        DataError: the text is too short for that many ids.
    """
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_SEPARATORS[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    reached = library.get_vocab_size()
    if reached < vocabulary:
        raise DataError(
            f"the text yields only {reached} of the {vocabulary} ids asked for",
            key="data.tokenizer",
            values={"vocabulary": vocabulary, "reached": reached},
            hint=f"Set data.tokenizer = bpe:{reached} or less, or give more text.",
        )
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(library.to_str(), encoding="utf-8")
    part.replace(path)
    return FileTokenizer(path)


class ParallelTokenizing:
    """Let the `tokenizers` library use its threads for a while, and switch them off afterwards.

    Its threads do not survive a fork, and it warns about every one unless the environment says what is wanted. A value
    that the user has set is left alone (`set_by_user`).
    """

    def __init__(self) -> None:
        self.set_by_user = PARALLELISM in os.environ

    def __enter__(self) -> ParallelTokenizing:
        if not self.set_by_user:
            os.environ[PARALLELISM] = "true"
        return self

    def __exit__(self, *_: object) -> None:
        if not self.set_by_user:
            os.environ[PARALLELISM] = "false"


def _read(path: Path) -> bytes:
    try:
        text = path.read_bytes()
        json.loads(text)
    except FileNotFoundError:
        folder = path.parent
        near = nearest(path.name, (p.name for p in folder.glob("*.json"))) if folder.is_dir() else None
        word = nearest(str(path), ("bytes", "bpe"))
        instead = f"Did you mean {folder / near}?" if near else f"Did you mean {word}?" if word else None
        raise DataError(
            f"no tokenizer file at {path}",
            key="data.tokenizer",
            values={"path": str(path)},
            hint=instead or "Write bytes, bpe:<vocabulary>, or the path of a tokenizer.json.",
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read the tokenizer file {path}: {error}", key="data.tokenizer", values={"path": str(path)}
        ) from None
    return text
