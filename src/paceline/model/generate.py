"""Text, one token at a time, from a trained decoder.

Shapes: L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.errors import JobError
from paceline.model.transformer import Decoder

LogitsAt = Callable[[Tensor, int], Tensor]
"""Logits_V of one position of tokens_1L."""


@torch.no_grad()
def generate(
    model: Decoder,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    stop_id: int | None = None,
    logits_at: LogitsAt | None = None,
) -> list[int]:
    """New token ids that follow a prompt; equal arguments give equal ids on one kind of device.

    Args:
        vocabulary: the tokenizer's size; ids above it pad the model's table and are never returned.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample among so many most likely tokens.
        stop_id: ends the text and is not returned.
        logits_at: runs the model, equally on all its ranks, where calling it is not enough: it is cut into stages.

    The model sees the last `max_sequence_length` tokens. Its training or evaluation mode is given back. Where it is split,
    all its ranks call this alike.

    Raises:
        JobError: an empty prompt, a token outside the vocabulary, or a temperature or top_k out of range.
    """
    _check(model, prompt_ids, vocabulary, temperature, top_k)
    device = next(model.parameters()).device
    logits_at = logits_at or (lambda tokens_1L, at: model(tokens_1L)[0, at])
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt_ids)
    was_training = model.training
    multiple = model.share.length_multiple
    longest = model.spec.max_sequence_length // multiple * multiple
    model.eval()
    try:
        for _ in range(max_new_tokens):
            window = ids[-longest:]
            # What follows a token does not change its logits.
            filler = [0] * (-len(window) % multiple)
            window_1L = torch.tensor([window + filler], device=device)
            logits_V = logits_at(window_1L, len(window) - 1)[:vocabulary].float().cpu()
            token = _choose(logits_V, temperature, top_k, generator)
            if token == stop_id:
                break
            ids.append(token)
    finally:
        model.train(was_training)
    return ids[len(prompt_ids) :]


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    candidates = torch.arange(len(logits_V))
    if top_k is not None and top_k < len(logits_V):
        logits_V, candidates = logits_V.topk(top_k)
    weights = (logits_V / temperature).softmax(dim=-1)
    return int(candidates[torch.multinomial(weights, 1, generator=generator)])


def _check(model: Decoder, ids: Sequence[int], vocabulary: int, temperature: float, top_k: int | None) -> None:
    if not ids:
        raise JobError("the prompt has no tokens", key="prompt", hint="Give at least one character.")
    if not 1 <= vocabulary <= model.spec.vocab_size:
        raise JobError(
            f"the tokenizer has {vocabulary} tokens, the model {model.spec.vocab_size}",
            key="model.vocab_size",
            values={"vocabulary": vocabulary, "vocab_size": model.spec.vocab_size},
            hint="Use the tokenizer that the model was trained with.",
        )
    outside = [token for token in ids if not 0 <= token < vocabulary]
    if outside:
        raise JobError(
            f"token {outside[0]} of the prompt is not among the tokenizer's {vocabulary}",
            key="prompt",
            values={"token": outside[0], "vocabulary": vocabulary},
            hint="Use the tokenizer that the model was trained with.",
        )
    if temperature < 0:
        raise JobError(f"{temperature} is below 0", key="temperature", hint="Use 0 for the most likely token, or more.")
    if top_k is not None and top_k < 1:
        raise JobError(f"{top_k} is below 1", key="top_k", hint="Use 1 or more, or leave it out.")
