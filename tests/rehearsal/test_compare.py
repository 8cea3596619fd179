"""What a proof sees: made-up runs with one thing wrong in each."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.manifest import COMMIT_FILE
from paceline.errors import NoCheckpoint
from paceline.rehearsal.compare import compare_curves, compare_samples, relative
from paceline.rehearsal.tensors import compare_states, difference, same_bits
from tests.rehearsal.runs import (
    STATE,
    STEPS,
    curve,
    final_state,
    ids_of,
    loss_of,
    state_tensors,
    straight,
    write_attempt,
)


def test_a_killed_run_that_goes_on_is_compared_by_the_steps_that_count(tmp_path: Path) -> None:
    expected, resumed = straight(tmp_path / "straight"), tmp_path / "resumed"
    # Steps 6 and 7 were done and lost; their first losses count no more.
    write_attempt(resumed, 1, 0, curve(range(1, 8), {6: 99.0, 7: 98.0}), {s: ids_of(s) for s in range(1, 7)} | {7: [1]})
    assert compare_curves(expected, resumed, 7).first == 6
    write_attempt(resumed, 2, 5, curve(range(6, STEPS + 1)))
    curves, samples = compare_curves(expected, resumed, STEPS), compare_samples(expected, resumed, STEPS)
    assert curves.exact and curves.steps == STEPS and curves.largest == 0.0
    assert samples.equal and samples.steps == STEPS


def test_the_last_bit_of_one_loss_is_seen(tmp_path: Path) -> None:
    expected, other = straight(tmp_path / "a"), tmp_path / "b"
    write_attempt(other, 1, 0, curve(range(1, STEPS + 1), {8: math.nextafter(loss_of(8), math.inf)}))
    found = compare_curves(expected, other, STEPS)
    assert not found.exact and found.first == 8 and 0 < found.largest < 1e-15


def test_bl_26_a_step_too_few_and_a_number_that_is_none_are_seen(tmp_path: Path) -> None:
    expected = straight(tmp_path / "a")
    write_attempt(tmp_path / "b", 1, 0, curve(range(1, STEPS)))
    short = compare_curves(expected, tmp_path / "b", STEPS)
    assert not short.exact and short.missing == (STEPS,) and short.first is None
    write_attempt(tmp_path / "c", 1, 0, curve(range(1, STEPS + 1), {4: math.nan}))
    lost = compare_curves(expected, tmp_path / "c", STEPS)
    assert not lost.exact and lost.first == 4 and lost.largest == math.inf
    write_attempt(tmp_path / "d", 1, 0, curve(range(1, STEPS + 1), {4: math.nan}))
    assert compare_curves(tmp_path / "c", tmp_path / "d", STEPS).exact
    write_attempt(tmp_path / "e", 1, 0, curve(range(1, STEPS + 1), {4: math.inf}))
    assert not compare_curves(tmp_path / "c", tmp_path / "e", STEPS).exact


def test_bl_23_a_sample_that_is_read_again_is_seen(tmp_path: Path) -> None:
    expected = straight(tmp_path / "a")
    replayed = {s: ids_of(s if s < 6 else s - 1) for s in range(1, STEPS + 1)}
    write_attempt(tmp_path / "b", 1, 0, curve(range(1, STEPS + 1)), replayed)
    assert compare_samples(expected, tmp_path / "b", STEPS).first == 6
    write_attempt(tmp_path / "c", 1, 0, curve(range(1, STEPS + 1)), {1: ids_of(1)})
    none = compare_samples(expected, tmp_path / "c", STEPS)
    assert not none.equal and none.missing == tuple(range(2, STEPS + 1))


def test_relative_differences() -> None:
    assert relative(2.0, 1.0) == relative(1.0, 2.0) == 0.5 and relative(0.0, 0.0) == 0.0
    assert relative(None, None) == 0.0 and relative(1.0, None) == math.inf and relative(math.inf, 1.0) == math.inf


@pytest.mark.parametrize("ranks", [2, 3])
def test_equal_states_are_equal_on_any_layout(tmp_path: Path, ranks: int) -> None:
    places = [final_state(tmp_path / "a", state_tensors()), final_state(tmp_path / "b", state_tensors(), ranks)]
    found = compare_states(*places, STEPS)
    assert found.exact and found.tensors == found.equal == 3 and found.largest == 0.0
    assert found.random_equal is (True if ranks == 2 else None)


def test_bl_38_one_moment_that_differs_by_a_bit_is_named(tmp_path: Path) -> None:
    expected, changed = state_tensors(), state_tensors()
    moment = changed["optimizer/exp_avg/a"]
    moment[1, 2] = torch.nextafter(moment[1, 2], torch.tensor(9.0, dtype=torch.float64))
    found = compare_states(final_state(tmp_path / "a", expected), final_state(tmp_path / "b", changed), STEPS)
    assert not found.exact and found.equal == 2 and found.worst == "optimizer/exp_avg/a"
    assert 0 < found.largest < 1e-15
    changed["model/b"] *= 1.5
    found = compare_states(str(tmp_path / "a" / "checkpoints"), final_state(tmp_path / "c", changed), STEPS)
    assert found.worst == "model/b" and found.largest == pytest.approx(0.5) and found.equal == 1


def test_missing_tensors_shapes_types_and_counters_are_differences(tmp_path: Path) -> None:
    expected = final_state(tmp_path / "a", state_tensors())
    less = {name: tensor for name, tensor in state_tensors().items() if not name.startswith("optimizer")}
    assert compare_states(expected, final_state(tmp_path / "b", less), STEPS).missing == ("optimizer/exp_avg/a",)
    other = state_tensors() | {"model/b": state_tensors()["model/b"].float()}
    found = compare_states(expected, final_state(tmp_path / "c", other), STEPS)
    assert found.missing == ("model/b",) and not found.exact
    late = {**STATE, "optimizer": {"steps": {"a": STEPS - 1.0}, "groups": [{"lr": 1e-3}]}}
    found = compare_states(expected, final_state(tmp_path / "d", state_tensors(), state=late), STEPS)
    assert not found.counters_equal and not found.exact and found.equal == 3
    own = state_tensors() | {"buffer/0/seen": torch.ones(2)}
    found = compare_states(expected, final_state(tmp_path / "e", own, 3), STEPS)
    assert found.exact  # another number of ranks has other buffers of single ranks
    assert compare_states(expected, final_state(tmp_path / "f", own, 2), STEPS).missing == ("buffer/0/seen",)


def test_a_state_that_is_not_there_or_damaged_is_no_proof(tmp_path: Path) -> None:
    expected, other = final_state(tmp_path / "a", state_tensors()), final_state(tmp_path / "b", state_tensors())
    with pytest.raises(NoCheckpoint):
        compare_states(expected, other, STEPS + 1)
    folder = tmp_path / "b" / "checkpoints" / f"step-{STEPS:08d}"
    pieces = next(folder.glob("rank-*"))
    data = bytearray(pieces.read_bytes())
    data[-3] ^= 1
    pieces.write_bytes(data)
    with pytest.raises(NoCheckpoint, match=pieces.name):
        compare_states(expected, other, STEPS)
    (folder / COMMIT_FILE).unlink()
    with pytest.raises(NoCheckpoint, match="COMMIT"):
        compare_states(expected, other, STEPS)


def test_bits_and_norms_of_tensors() -> None:
    nan, zero = torch.tensor([math.nan, 1.0]), torch.zeros(2)
    assert same_bits(nan, nan.clone()) and not same_bits(zero, -zero) and difference(zero, -zero) == 0.0
    assert difference(zero, torch.ones(2)) == math.inf and difference(torch.ones(2), nan) == math.inf
    assert difference(torch.tensor([3, 4]), torch.tensor([3, 5])) == pytest.approx(0.2)
    assert same_bits(torch.tensor(1.0), torch.tensor(1.0))
