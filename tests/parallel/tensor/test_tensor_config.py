"""What tensor parallelism refuses, and that its parts are a partition. No rank is started."""

from __future__ import annotations

import msgspec
import pytest

from paceline.checkpoint.boxes import Placement, tiles
from paceline.cluster.probe import Host
from paceline.errors import JobError
from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job
from paceline.model.config import ModelSection
from paceline.model.sharding import SHARDING
from paceline.model.spec import ModelSpec, catalog_names, parameter_count, parameters, resolve
from paceline.parallel.memory import parameter_sizes
from paceline.parallel.tensor.config import copies_of, degrees_that_work, placements

HOST = Host("test", "cpu", 0, "cpu", 2**36, 4, 2**36, True, None)


def resolved(ranks: int, *words: str) -> Resolved:
    return resolve_job(load_job(None, ["batch.global_batch=24", *words]), ranks, HOST)


@pytest.mark.parametrize(
    ("ranks", "words", "key", "numbers", "hint"),
    [
        # BL-53: before any process starts, with the numbers and what would do.
        (3, ["parallel.tp=3"], "parallel.tp", "4 query heads cannot be split over 3 ranks", "1, 2, 4"),
        (6, ["parallel.tp=6", "model.num_heads=12", "model.num_kv_heads=4", "model.head_dim=8"], "parallel.tp",
         "4 key and value heads cannot be split over 6 ranks", "1, 2, 4, 12"),
        (4, ["parallel.tp=4", "model.ffn_dim=390"], "parallel.tp", "390 numbers of the feed-forward layer", "1, 2"),
        (4, ["parallel.tp=4", "model.vocab_size=3"], "parallel.tp", "3 rows of the vocabulary", "1, 2"),
        (4, ["parallel.tp=4", "data.sequence_length=126", "parallel.sequence_parallel=true"],
         "parallel.sequence_parallel", "126 positions do not divide over tp 4 ranks", "data.sequence_length=128"),
        (2, ["parallel.sequence_parallel=true"], "parallel.sequence_parallel", "no effect with tp = 1", "Remove it"),
    ],
)  # fmt: skip
def test_refusals_say_the_numbers_and_what_works(
    ranks: int, words: list[str], key: str, numbers: str, hint: str
) -> None:
    with pytest.raises(JobError) as raised:
        resolved(ranks, *words)
    assert raised.value.key == key
    assert numbers in str(raised.value) and hint in str(raised.value)


def test_positions_are_split_where_they_divide() -> None:
    assert resolved(4, "parallel.tp=4").tensor.sequence_parallel
    assert not resolved(4, "parallel.tp=4", "data.sequence_length=126").tensor.sequence_parallel
    assert not resolved(4, "parallel.tp=4", "parallel.sequence_parallel=false").tensor.sequence_parallel


@pytest.mark.parametrize("preset", catalog_names())
def test_the_parts_of_every_tensor_tile_it_and_copies_are_as_stated(preset: str) -> None:
    """No row is there only to fill up: a vocabulary that does not divide is dealt out unevenly. Blocks are alike: two do."""
    spec = msgspec.structs.replace(resolve(ModelSection(preset=preset)), num_layers=2)
    for degree in degrees_that_work(spec):
        held = [placements(spec, degree, rank) for rank in range(degree)]
        for p in parameters(spec):
            boxes = [rank[p.name].box for rank in held]
            assert {rank[p.name].shape for rank in held} == {p.shape}
            distinct = list(dict.fromkeys(boxes))
            assert tiles(distinct, p.shape), p.name
            assert len(boxes) == len(distinct) * copies_of(p, spec, degree), p.name


def test_every_role_of_the_sharding_table_is_placed() -> None:
    spec = resolve(ModelSection(preset="tiny", bias=True, norm="layernorm", qk_norm=True, positions="learned"))
    assert {p.role for p in parameters(spec)} <= set(SHARDING)
    halves = placements(spec, 2, 1)
    for p in parameters(spec):
        whole = halves[p.name] == Placement.whole(p.shape)
        assert whole == (SHARDING[p.role].dim is None), p.name


def test_a_rank_of_eight_holds_an_eighth_of_llama3_8b() -> None:
    spec = resolve(ModelSection(preset="llama3-8b"))
    held = sum(p.elements for p in parameter_sizes(spec, 4, 8))
    norms = (2 * spec.num_layers + 1) * spec.dim
    assert held == (parameter_count(spec) - norms) // 8 + norms


def test_planned_memory_falls_with_the_degree() -> None:
    words = ("batch.microbatch=8", "model.preset=small", "data.sequence_length=512", "parallel.precision=fp32")
    one, split = resolved(1, *words), resolved(4, *words, "parallel.tp=4")
    positions = resolved(4, *words, "parallel.tp=4", "parallel.sequence_parallel=false")
    for part in ("parameters_bytes", "gradients_bytes", "moments_bytes", "logits_bytes"):
        assert getattr(split.memory, part) < 0.27 * getattr(one.memory, part), part
    assert split.memory.activations_bytes < positions.memory.activations_bytes < one.memory.activations_bytes


def test_odd_vocabularies_are_whole_numbers_of_rows() -> None:
    spec: ModelSpec = resolve(ModelSection(preset="tiny", vocab_size=257))
    rows = [placements(spec, 4, rank)["embedding.weight"].box for rank in range(4)]
    assert [box.shape[0] for box in rows] == [64, 64, 64, 65]
    assert [box.offset[0] for box in rows] == [0, 64, 128, 192]
