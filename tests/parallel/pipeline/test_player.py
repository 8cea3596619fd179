"""The player against formulas done by hand, and against a second way of counting."""

from __future__ import annotations

import pytest

from paceline.parallel.pipeline.config import PipelineConfig
from paceline.parallel.pipeline.cost import ideal_seconds, peak_alive
from paceline.parallel.pipeline.player import StageSeconds, play

PER_RANK = StageSeconds(0.05, 0.05, 0.05)
CASES = [
    PipelineConfig("gpipe", 4, 1), PipelineConfig("1f1b", 4, 1), PipelineConfig("interleaved-1f1b", 4, 2),
    PipelineConfig("interleaved-1f1b", 2, 3), PipelineConfig("zero-bubble", 4, 1), PipelineConfig("zero-bubble", 4, 2),
    PipelineConfig("zero-bubble", 3, 1), PipelineConfig("zbv", 4, 2), PipelineConfig("zbv", 2, 2),
]  # fmt: skip


def equal_stages(config: PipelineConfig, seconds: StageSeconds = PER_RANK) -> list[StageSeconds]:
    parts = config.stages_per_rank
    stage = StageSeconds(seconds.forward / parts, seconds.input_gradient / parts, seconds.weight_gradient / parts)
    return [stage] * config.num_stages


@pytest.mark.parametrize("config", CASES, ids=lambda c: f"{c.schedule} {c.ranks}x{c.stages_per_rank}")
@pytest.mark.parametrize("rounds", [2, 4])
def test_a_step_of_equal_stages_takes_what_the_formula_says(config: PipelineConfig, rounds: int) -> None:
    microbatches = rounds * config.ranks
    played = play(config, microbatches, equal_stages(config))
    assert played.step_seconds == pytest.approx(ideal_seconds(config, microbatches, PER_RANK), rel=1e-12)
    assert played.busy_seconds == pytest.approx([microbatches * 0.15] * config.ranks)
    assert list(played.alive) == [peak_alive(config, microbatches, rank) for rank in range(config.ranks)]


@pytest.mark.parametrize(("forward", "inputs", "weights"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.5, 2.0)])
def test_zero_bubble_hides_the_weights_where_they_are_no_dearer_than_what_they_wait_for(
    forward: float, inputs: float, weights: float
) -> None:
    seconds = StageSeconds(forward, inputs, weights)
    config = PipelineConfig("zero-bubble", 4, 1)
    played = play(config, 16, equal_stages(config, seconds))
    assert played.step_seconds == pytest.approx(ideal_seconds(config, 16, seconds))
    assert played.step_seconds < play(PipelineConfig("1f1b", 4, 1), 16, [seconds] * 4).step_seconds


def test_the_bubble_of_4_stages_and_8_micro_batches_is_3_of_11() -> None:
    """Narayanan et al. 2021, section 2.2: idle over ideal time is (p - 1) / m."""
    played = play(PipelineConfig("1f1b", 4, 1), 8, [PER_RANK] * 4)
    assert played.bubble == pytest.approx(3 / 11)
    idle = played.step_seconds - 8 * PER_RANK.total
    assert idle / (8 * PER_RANK.total) == pytest.approx(3 / 8)


def test_the_dearest_stage_sets_the_pace() -> None:
    slow = StageSeconds(0.1, 0.1, 0.1)
    played = play(PipelineConfig("1f1b", 4, 1), 64, [PER_RANK, PER_RANK, PER_RANK, slow])
    assert played.step_seconds == pytest.approx(64 * slow.total + 3 * PER_RANK.total)


def test_transfers_are_on_the_way_of_the_first_and_the_last_micro_batch() -> None:
    """Six hops in all, three there and three back, for a gpipe step of one micro-batch."""
    with_links = play(PipelineConfig("gpipe", 4, 1), 1, [PER_RANK] * 4, transfer_seconds=0.01)
    assert with_links.step_seconds == pytest.approx(4 * PER_RANK.total + 6 * 0.01)


def test_neighbours_on_one_rank_send_nothing() -> None:
    config = PipelineConfig("zbv", 2, 2)
    one = [StageSeconds(1, 1, 1)] * 4
    assert play(config, 1, one, 10.0).step_seconds == pytest.approx(play(config, 1, one).step_seconds + 4 * 10.0)


def test_the_first_stage_does_all_of_its_backward_at_once() -> None:
    config = PipelineConfig("zero-bubble", 2, 1)
    first = [p for p in play(config, 2, [StageSeconds(1, 2, 4)] * 2).ranks[0] if p.action.kind in "IW"]
    assert [round(p.end - p.begin, 9) for p in first] == [0, 6, 0, 6]
