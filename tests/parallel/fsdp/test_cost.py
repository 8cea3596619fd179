"""The sharded strategy's statement against figures done by hand."""

from __future__ import annotations

import pytest

from paceline.model.config import ModelSection
from paceline.model.spec import parameter_count, resolve
from paceline.optim.config import OptimizerSection
from paceline.parallel.fsdp.config import FsdpConfig, ZeroStage
from paceline.parallel.fsdp.cost import cost
from paceline.parallel.layout import Layout
from paceline.parallel.memory import parameter_sizes
from paceline.parallel.strategy import Cost, ParameterSize

ADAMW = OptimizerSection()
THREE_UNITS = [
    ParameterSize("embedding", 5 * 4, 4, rows=5),
    ParameterSize("blocks.0", 4 * 4, 4, rows=4, unit=0),
    ParameterSize("blocks.1", 4 * 4, 4, rows=4, unit=1),
]


def calls(stated: Cost) -> dict[str, int]:
    """All-gathers and reduce-scatters."""
    counts: dict[str, int] = {}
    for c in stated.collectives:
        counts[c.kind] = counts.get(c.kind, 0) + c.count
    return {kind: counts.get(kind, 0) for kind in ("all_gather", "reduce_scatter")}


@pytest.mark.parametrize(
    ("stage", "every", "gathers", "scatters"),
    [(3, False, 20, 3), (2, False, 12, 3), (1, False, 3, 3), (3, True, 20, 12), (2, True, 12, 12), (1, True, 3, 12)],
)
def test_calls_of_three_units_in_four_micro_batches(stage: ZeroStage, every: bool, gathers: int, scatters: int) -> None:
    stated = cost(THREE_UNITS, ADAMW, Layout(dp_shard=2), FsdpConfig(stage, reduce_every_microbatch=every), 4)
    assert calls(stated) == {"all_gather": gathers, "reduce_scatter": scatters}


def test_what_travels_and_what_is_stored_is_padded() -> None:
    stated = cost(THREE_UNITS, ADAMW, Layout(dp_shard=2), FsdpConfig(2), 1)
    gathered = sum(c.size_bytes for c in stated.collectives if c.kind == "all_gather")
    assert gathered == (6 * 4 + 4 * 4 + 4 * 4) * 4  # the embedding's 5 rows travel as 6
    assert stated.at_rest is not None
    assert stated.at_rest.parameters == (3 * 4 + 2 * 4 + 2 * 4) * 4 and stated.at_rest.buffers == 0
    last = cost(THREE_UNITS, ADAMW, Layout(dp_shard=2), FsdpConfig(2), 1, shard_rank=1).at_rest
    assert last is not None and last.parameters == (2 * 4 + 2 * 4 + 2 * 4) * 4
    assert last.buffers == 2 * 4 * 4  # one row of padding, of the weight and of its gradient


def test_a_rank_may_have_nothing_of_a_tiny_tensor() -> None:
    tiny = [ParameterSize("w", 3, 8, rows=3)]
    parts = [cost(tiny, ADAMW, Layout(dp_shard=4), FsdpConfig(), 1, rank).at_rest for rank in range(4)]
    assert [p.parameters for p in parts if p] == [8, 8, 8, 0]
    assert [p.moments for p in parts if p] == [20, 20, 20, 4]  # the count of steps is there all the same


def test_frozen_tensors_are_gathered_and_never_reduced() -> None:
    frozen = [ParameterSize("a", 8, 4, rows=8, unit=0, trainable=False), ParameterSize("b", 8, 4, rows=8)]
    stated = cost(frozen, ADAMW, Layout(dp_shard=2), FsdpConfig(), 1)
    assert calls(stated) == {"all_gather": 3, "reduce_scatter": 1}
    assert stated.at_rest is not None and (stated.at_rest.parameters, stated.at_rest.gradients) == (32, 16)


def test_tensors_without_dims_or_of_another_type_are_kept_whole() -> None:
    mixed = [ParameterSize("a", 8, 8, rows=8), ParameterSize("b", 8, 4, rows=8), ParameterSize("c", 1, 8, rows=0)]
    stated = cost(mixed, OptimizerSection(name="sgd"), Layout(dp_shard=2), FsdpConfig(), 1)
    assert stated.at_rest is not None and stated.at_rest.parameters == 4 * 8 + 8 * 4 + 8
    whole = [c for c in stated.collectives if c.purpose == "whole gradients"]
    assert [(c.kind, c.size_bytes) for c in whole] == [("all_reduce", 8 * 4 + 8)]


def test_replicas_meet_once_a_step_unless_parts_are_bf16() -> None:
    layout = Layout(dp_replicate=2, dp_shard=2)
    for config, times in ((FsdpConfig(3), 1), (FsdpConfig(3, reduce_bf16=True), 4)):
        stated = cost(THREE_UNITS, ADAMW, layout, config, 4)
        assert sum(c.count for c in stated.collectives if c.axis == "dp_replicate") == 3 * times


def test_llama3_8b_on_eight_ranks_keeps_an_eighth_of_16_bytes_per_parameter() -> None:
    spec = resolve(ModelSection(preset="llama3-8b"))
    count = parameter_count(spec)
    for stage in (1, 2, 3):
        stated = cost(parameter_sizes(spec, 4), ADAMW, Layout(dp_shard=8), FsdpConfig(stage, gather_dtype="bf16"), 1)
        assert stated.at_rest is not None
        assert stated.at_rest.total == pytest.approx(16 * count / 8, rel=1e-6)
        in_use = 2 * (32 * 218_112_000) if stage < 3 else 0  # blocks in bf16; their own part is counted apart
        assert stated.state.gathered > in_use


def test_axes_are_inside_a_node_or_across_nodes() -> None:
    layout = Layout(dp_replicate=2, dp_shard=8)
    assert layout.place("dp_shard", 8) == "inside a node"
    assert layout.place("dp_replicate", 8) == "across nodes"
    assert layout.place("dp_shard", 4) == "both"
    assert layout.place("dp_replicate", 16) == "inside a node"
