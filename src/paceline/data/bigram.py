"""A bigram model of the same tokens: what a model must beat to have learnt more than which token follows which.

P(b | a) = (c(a,b) + T(a) P(b)) / (c(a) + T(a)), T(a) being the number of different tokens seen after a, and
P(b) = (c(b) + 1) / (N + V): Witten and Bell, "The Zero-Frequency Problem", 1991, method C, in its interpolated form.

Imports no torch. Legend: V token ids, N training pairs, M pairs scored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.dataset import TokenDataset
from paceline.data.order import eval_indices

Int64 = npt.NDArray[np.int64]

TRAIN_TOKENS = 16_000_000
"""Tokens that the counts are taken from at most, from the start of the training stream."""
LARGEST_VOCABULARY = 1 << 16


def bigram_loss(train: TokenDataset, evaluation: TokenDataset, limit: int | None = None) -> float | None:
    """Nats per token of a bigram model fitted on `train`, over exactly the labels that an evaluation with `limit`
    scores.

    None where the vocabulary is above 65,536 ids.
    """
    vocabulary = train.vocabulary
    if vocabulary > LARGEST_VOCABULARY:
        return None
    before_M, after_M = _pairs(evaluation, limit)
    tokens = np.concatenate([s.tokens(TRAIN_TOKENS // len(train.streams)) for s in train.streams])
    follows_V = np.bincount(tokens[:-1], minlength=vocabulary)
    unigram_V = (np.bincount(tokens, minlength=vocabulary) + 1) / (tokens.size + vocabulary)
    pairs_M, kinds_M = _count(tokens, before_M, after_M, vocabulary)
    seen_M = follows_V[before_M]
    known_M = (pairs_M + kinds_M * unigram_V[after_M]) / np.maximum(seen_M + kinds_M, 1)
    probability_M = np.where(seen_M > 0, known_M, unigram_V[after_M])
    return float(-np.log(probability_M).mean())


def _pairs(evaluation: TokenDataset, limit: int | None) -> tuple[Int64, Int64]:
    """Each scored label and the token before it."""
    batch = evaluation.batch(eval_indices(len(evaluation), limit))
    labels_M = batch["labels"].ravel()
    scored = labels_M >= 0
    return batch["tokens"].ravel()[scored], labels_M[scored]


def _count(tokens: npt.NDArray[Any], before_M: Int64, after_M: Int64, vocabulary: int) -> tuple[Int64, Int64]:
    """c(a,b) and T(a) for each pair scored, through the sorted list of the pairs that occur."""
    codes, counts = np.unique(tokens[:-1].astype(np.int64) * vocabulary + tokens[1:], return_counts=True)
    kinds_V = np.bincount(codes // vocabulary, minlength=vocabulary)
    wanted_M = before_M * vocabulary + after_M
    place_M = np.minimum(np.searchsorted(codes, wanted_M), codes.size - 1)
    return np.where(codes[place_M] == wanted_M, counts[place_M], 0), kinds_V[before_M]
