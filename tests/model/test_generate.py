"""Generation: repeatable, inside the vocabulary and the model's length, and without side effects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import JobError
from paceline.model.generate import generate
from paceline.model.transformer import Decoder
from tests.model.models import small_decoder


@pytest.fixture(scope="module")
def model() -> Decoder:
    return small_decoder("tiny", torch.float32, max_sequence_length=16)


def test_equal_seeds_give_equal_text_beyond_the_model_length(model: Decoder) -> None:
    first = generate(model, [1, 2, 3], 40, vocabulary=60, seed=5)
    torch.manual_seed(0)
    assert first == generate(model, [1, 2, 3], 40, vocabulary=60, seed=5) and len(first) == 40
    assert first != generate(model, [1, 2, 3], 40, vocabulary=60, seed=6)


def test_padding_of_the_vocabulary_is_never_chosen(model: Decoder) -> None:
    with torch.no_grad():
        kept = model.embedding.weight.detach().clone()
        model.embedding.weight[40:] *= 50
        hot = generate(model, [1], 60, vocabulary=40, temperature=5.0)
        model.embedding.weight.copy_(kept)
    assert max(hot) < 40 and len(hot) == 60


def test_temperature_zero_and_top_one_take_the_most_likely(model: Decoder) -> None:
    greedy = generate(model, [7], 12, vocabulary=64, temperature=0)
    assert greedy == generate(model, [7], 12, vocabulary=64, top_k=1, seed=9)
    logits = model(torch.tensor([[7]]))[0, -1]
    assert greedy[0] == int(logits.argmax())


def test_the_stop_token_ends_the_text(model: Decoder) -> None:
    text = generate(model, [7], 12, vocabulary=64, temperature=0)
    stop = text[4]
    assert generate(model, [7], 12, vocabulary=64, temperature=0, stop_id=stop) == text[: text.index(stop)]


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_given_back(training: bool) -> None:
    model = small_decoder("tiny", torch.float32, dropout=0.5).train(training)
    generate(model, [1], 2, vocabulary=64)
    assert model.training is training and model.blocks["0"].training is training


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt_ids": []}, "no tokens"),
        ({"prompt_ids": [62]}, "token 62"),
        ({"vocabulary": 65}, "65 tokens, the model 64"),
        ({"temperature": -1.0}, "below 0"),
        ({"top_k": 0}, "below 1"),
    ],
)
def test_bad_arguments_are_refused(model: Decoder, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        generate(model, **{"prompt_ids": [1], "max_new_tokens": 1, "vocabulary": 60, **arguments})
