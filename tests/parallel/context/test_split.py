"""How a sequence is split, and which sequences and heads are refused, with numbers."""

from __future__ import annotations

import pytest
import torch

from paceline.cluster.probe import Host
from paceline.data.evaluation import Filler
from paceline.errors import JobError
from paceline.job.load import load_job
from paceline.job.resolve import resolve_job
from paceline.parallel.context.config import chunks_of, natural_order
from paceline.parallel.context.split import own_positions, split_batch

HOST = Host("test", "cpu", 0, "cpu", 2**34, 4, 2**34, True, None)
MODEL = ["model.num_layers=2", "model.dim=48", "model.num_heads=6", "model.num_kv_heads=2", "model.ffn_dim=48",
         "model.vocab_size=64", "batch.global_batch=4", "parallel.dp_replicate=1"]  # fmt: skip


def refused(*words: str, ranks: int) -> JobError:
    with pytest.raises(JobError) as caught:
        resolve_job(load_job(None, [*MODEL, *words]), ranks, HOST)
    return caught.value


def test_labels_are_shifted_and_positions_set_before_the_split() -> None:  # BL-56
    tokens = torch.arange(8).unsqueeze(0)
    batch = {"tokens": tokens, "labels": torch.tensor([[1, 2, 3, 4, 5, 6, 7, -100]]), "sample_ids": torch.tensor([4])}
    first, second = (split_batch(batch, rank, 2) for rank in (0, 1))
    assert first["tokens"].tolist() == first["positions"].tolist() == [[0, 1, 6, 7]]
    assert second["tokens"].tolist() == second["positions"].tolist() == [[2, 3, 4, 5]]
    assert first["labels"].tolist() == [[1, 2, 7, -100]]
    assert second["labels"].tolist() == [[3, 4, 5, 6]]
    assert first["sample_ids"] is batch["sample_ids"]
    assert first["whole_length"] == 8


def test_a_batch_that_does_not_count_still_does_not_once_it_is_split() -> None:
    assert isinstance(split_batch(Filler(tokens=torch.zeros(1, 8), labels=torch.zeros(1, 8)), 0, 2), Filler)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8])
def test_every_position_is_held_once_and_all_ranks_see_as_many_keys(degree: int) -> None:
    length = 48
    held = [own_positions(rank, degree, length) for rank in range(degree)]
    assert torch.cat(held).sort().values.tolist() == list(range(length))
    assert len({int((positions + 1).sum()) for positions in held}) == 1
    places = [chunk for rank in range(degree) for chunk in chunks_of(rank, degree)]
    assert [places[place] for place in natural_order(degree)] == list(range(2 * degree))


def test_a_length_that_does_not_divide_is_refused_before_anything_starts() -> None:  # BL-57
    error = refused("parallel.cp=4", "data.sequence_length=10", ranks=4)
    assert error.values == {"sequence_length": 10, "cp": 4, "multiple": 8}
    assert "data.sequence_length=8 or 16" in str(error.hint)
    assert "parallel.cp=1 or 5" in str(error.hint)
    with pytest.raises(JobError):
        split_batch({"tokens": torch.zeros(1, 10)}, 0, 4)


def test_heads_that_cannot_be_handed_out_are_refused() -> None:
    words = ("data.sequence_length=48", "parallel.cp_method=alltoall")
    error = refused("parallel.cp=4", *words, ranks=4)
    assert error.values == {"num_heads": 6, "num_kv_heads": 2, "tp": 1, "cp": 4}
    assert "parallel.cp=1 or 2 or 6" in str(error.hint)
    resolve_job(load_job(None, [*MODEL, "parallel.cp=6", *words]), 6, HOST)
    resolve_job(load_job(None, [*MODEL, "parallel.cp=4", "data.sequence_length=48"]), 4, HOST)
    error = refused("parallel.cp=2", "parallel.tp=2", *words, ranks=4)
    assert "parallel.cp=1 or 3" in str(error.hint)


def test_a_method_without_a_split_has_no_effect_and_is_refused() -> None:
    assert refused("parallel.cp_method=gather", ranks=1).key == "parallel.cp_method"
