"""What a study of a fabric says, against a fabric that is arithmetic: faults of drawn size and place, and sound ones."""

from __future__ import annotations

import random
import secrets

import pytest
from tests.bench.fabric_model import Model
from tests.netlab.cases import KINDS, Case, Kind, draw_case, wrong

from paceline.bench.fabric_findings import doubted, findings_of, placement_of, uplinks
from paceline.bench.fabric_study import Study, fill
from paceline.bench.pairs import MANY_HOSTS, Flow, each_alone, tournament

DRAWS = 20
FABRICS = [(2, 2), (4,), (4, 4), (3, 5), (8,), (4, 4, 4), (8, 8)]
RACKED = [racks for racks in FABRICS if len(racks) > 1]


def studied(model: Model) -> Study:
    study = Study(model.hosts)
    fill(study, model.measure, doubted)
    return study


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_drawn_faults_are_named_with_their_place_and_size(kind: Kind) -> None:
    first = secrets.randbelow(10**6)
    print(f"seeds {first} to {first + DRAWS - 1}")
    problems = []
    for seed in range(first, first + DRAWS):
        racks = random.Random(seed).choice(RACKED if kind == "oversubscribed" else FABRICS)
        case = draw_case(seed, kind, racks)
        order = random.Random(seed).sample(range(sum(racks)), sum(racks))
        problems.append(wrong(case, *_found(Model(case, seed, order))))
    assert problems == [None] * DRAWS


def _found(model: Model) -> tuple[list[str], list[object]]:
    return model.hosts, findings_of(studied(model))  # type: ignore[return-value]
