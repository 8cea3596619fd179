"""Every eval sample once, and the bigram model against a slow one in plain Python."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data.bigram import bigram_loss
from paceline.data.evaluation import eval_batch_count, eval_batches
from paceline.data.order import eval_indices
from paceline.data.prepare import prepare
from tests.data.corpus import section, silent, write_texts
from tests.data.datasets import Numbers


@pytest.mark.parametrize("microbatch", [1, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_mean_over_21_samples_is_ten_for_any_number_of_ranks(ranks: int, microbatch: int) -> None:  # BL-33
    total = weight = 0.0
    shape = {"microbatch": microbatch, "dp_degree": ranks}
    counts = []
    for rank in range(ranks):
        batches = list(eval_batches(Numbers(size=21), **shape, dp_rank=rank))
        counts.append(len(batches))
        total += sum(float(b["i"].sum()) for b in batches)
        weight += sum(len(b["i"]) for b in batches)
    assert weight == 21 and total / weight == 10.0
    assert max(counts) == eval_batch_count(21, **shape)


def test_a_rank_may_get_no_batch() -> None:
    batches = [list(eval_batches(Numbers(size=2), microbatch=4, dp_rank=r, dp_degree=3)) for r in range(3)]
    assert sorted(len(b) for b in batches) == [0, 1, 1]
    assert eval_batch_count(0, microbatch=4, dp_degree=3) == 0


def test_the_limit_spreads_over_the_set() -> None:
    batches = list(eval_batches(Numbers(size=40), microbatch=3, dp_rank=0, dp_degree=1, limit=4))
    assert [i for b in batches for i in b["i"].tolist()] == [0, 10, 20, 30]


def slow_bigram(train: list[int], pairs: list[tuple[int, int]], vocabulary: int) -> float:
    """Witten-Bell, one pair at a time."""
    single, double = Counter(train), Counter(itertools.pairwise(train))
    before = Counter(train[:-1])
    kinds = Counter(a for a, _ in double)
    loss = 0.0
    for a, b in pairs:
        unigram = (single[b] + 1) / (len(train) + vocabulary)
        seen = before[a] + kinds[a]
        loss -= math.log((double[a, b] + kinds[a] * unigram) / seen if seen else unigram)
    return loss / len(pairs)


def test_bigram_loss_is_that_of_the_formula(tmp_path: Path) -> None:
    data = prepare(section(write_texts(tmp_path / "text"), tmp_path / "cache"), progress=silent)
    held = data.evals["eval"]
    pairs = []
    for i in eval_indices(len(held), 50).tolist():
        sample = held[i]
        pairs += list(zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True))
    expected = slow_bigram(data.train.streams[0].tokens().tolist(), pairs, 257)
    assert bigram_loss(data.train, held, 50) == pytest.approx(expected, rel=1e-12)
    assert expected < math.log(257) / 2


def test_bigram_probabilities_sum_to_one(tmp_path: Path) -> None:
    data = prepare(section(write_texts(tmp_path / "text"), tmp_path / "cache"), progress=silent)
    tokens = data.train.streams[0].tokens()

    for before in (int(tokens[5]), 256, 255):  # seen often, the separator, never seen
        losses = [bigram_loss(data.train, OnePair(before, after), None) for after in range(257)]  # type: ignore[arg-type]
        assert sum(math.exp(-loss) for loss in losses if loss is not None) == pytest.approx(1.0, abs=1e-9)


class OnePair:
    """An eval set of one label."""

    def __init__(self, before: int, after: int) -> None:
        self.pair = before, after

    def __len__(self) -> int:
        return 1

    def batch(self, _: Any) -> dict[str, Any]:
        return {"tokens": np.array([[self.pair[0]]]), "labels": np.array([[self.pair[1]]])}


def test_no_bigram_model_for_large_vocabularies(tmp_path: Path) -> None:
    data = prepare(section(write_texts(tmp_path / "text"), tmp_path / "cache"), progress=silent)
    data.train.vocabulary = 1 << 17
    assert bigram_loss(data.train, data.evals["eval"], 10) is None


def test_what_thinks_imports_no_torch() -> None:
    modules = (
        "config order sources tokenizer shards build prepare dataset collate shared prefetch worker bigram inspect"
    )
    imports = "; ".join(f"import paceline.data.{m}" for m in modules.split())
    code = f"import sys; {imports}; assert 'torch' not in sys.modules; assert 'tokenizers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
    code = "import sys; import paceline.data.config; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
