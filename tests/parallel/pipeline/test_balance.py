"""Stages by cost against every way of cutting, and against figures done by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from paceline.model.config import ModelSection
from paceline.model.flop import forward_flop_per_token
from paceline.model.spec import resolve
from paceline.parallel.pipeline.balance import balanced_layers, layer_costs, stage_costs


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_has_a_cheaper_dearest_stage(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.choice([1.0, 1.0, 2.0, 7.5]) for _ in range(draw.randint(4, 9))]
    stages = draw.randint(1, len(costs))
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [[b - a for a, b in itertools.pairwise((0, *cut, len(costs)))] for cut in cuts]
    best = min((max(stage_costs(costs, lengths)), sum(c**2 for c in stage_costs(costs, lengths))) for lengths in every)
    found = stage_costs(costs, balanced_layers(costs, stages))
    assert (max(found), sum(c**2 for c in found)) == pytest.approx(best)


def test_equal_blocks_are_dealt_out_evenly() -> None:
    assert balanced_layers([1.0] * 12, 4) == (3, 3, 3, 3)
    assert sorted(balanced_layers([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_a_large_head_takes_blocks_from_the_last_stage() -> None:
    spec = resolve(ModelSection(preset="gpt2"))
    costs = layer_costs(spec, 1024)
    layers = balanced_layers(costs, 4)
    assert sum(layers) == spec.num_layers == 12
    assert layers[-1] < layers[0]
    assert max(stage_costs(costs, layers)) < max(stage_costs(costs, (3, 3, 3, 3)))


def test_costs_add_up_to_the_models_own_products() -> None:
    spec = resolve(ModelSection(preset="llama3-8b"))
    assert sum(layer_costs(spec, 4096)) == pytest.approx(forward_flop_per_token(spec, 4096, "causal"), rel=1e-3)


def test_more_stages_than_blocks_do_not_exist() -> None:
    with pytest.raises(ValueError, match="3 blocks"):
        balanced_layers([1.0, 1.0, 1.0], 4)
