"""A finished run's model continues a text."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from paceline.checkpoint.places import find_one
from paceline.checkpoint.reader import read_whole
from paceline.data.tokenizer import BytesTokenizer, Tokenizer, open_tokenizer
from paceline.model.generate import generate
from paceline.model.spec import ModelSpec
from paceline.model.transformer import Decoder

MODEL = "model"
"""First part of the names of weights in a checkpoint."""
TOKENIZER_FILE = "tokenizer.json"


def continue_text(run_dir: Path, prompt: str, *, tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """New text after `prompt`; equal arguments give equal text.

    Raises:
        NoCheckpoint: the run saved nothing, or what it saved is damaged.
        JobError: an argument is out of range.
    """
    found = find_one(str(run_dir))
    manifest = found.manifest()
    with torch.device("meta"):
        model = Decoder(msgspec.convert(manifest.about["model"], ModelSpec))
    names = [name for name in manifest.tensors if name.startswith(f"{MODEL}/")]
    weights = read_whole(found.storage, manifest, names, folder=found.folder)
    model.load_state_dict({name.removeprefix(f"{MODEL}/"): tensor for name, tensor in weights}, assign=True)
    tokenizer = run_tokenizer(run_dir, manifest.about["data"]["tokenizer"])
    ids = [int(i) for i in tokenizer.encode_batch([prompt])[0]]
    new = generate(
        model, [tokenizer.separator, *ids], tokens, vocabulary=tokenizer.vocabulary, temperature=temperature,
        top_k=top_k, seed=seed, stop_id=tokenizer.separator,
    )  # fmt: skip
    return tokenizer.decode(new)


def run_tokenizer(run_dir: Path, name: str) -> Tokenizer:
    """The tokenizer that a run was trained with."""
    return BytesTokenizer() if name == "bytes" else open_tokenizer(run_dir / TOKENIZER_FILE)
