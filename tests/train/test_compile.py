"""Compiled blocks: the same result, no graph per step, and ranks that compile at different times."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.model.config import ModelSection
from paceline.model.init import initialise
from paceline.model.spec import resolve
from paceline.model.transformer import Decoder
from paceline.optim.config import OptimizerSection
from paceline.optim.optimizer import build_optimizer
from paceline.parallel.apply import make_reducer
from paceline.parallel.compile.apply import compile_blocks, recompiles
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.recompute.apply import recompute_blocks
from paceline.train.language import language_functions
from paceline.train.step import TrainStep
from paceline.workers import heartbeat
from tests.pool.pool import Pool

LENGTHS = (16, 32, 48)
SPEC = resolve(ModelSection(num_layers=3, dim=32, num_heads=2, ffn_dim=32, vocab_size=64, max_sequence_length=64))
CPU = torch.device("cpu")


def train(rank: int, world: int, steps: int, compiled: bool, delay: float) -> tuple[list[float], list[int]]:
    """Losses, and the graphs compiled beyond the first after each step. Lengths differ by step and rank."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Decoder(SPEC).double()
    initialise(model, SPEC, 0, CPU)
    if compiled:
        compile_blocks(model.blocks.values(), backend="aot_eager")
    forward, loss = language_functions(SPEC, 0)
    group = dist.group.WORLD if world > 1 else None
    step = TrainStep(
        model, forward, loss, build_optimizer(OptimizerSection(name="sgd"), model.named_parameters()),
        make_reducer(model, group, DdpConfig()), group=group, prescale=1 / 64, clip_norm=1.0, device=CPU,
    )  # fmt: skip
    losses, counts = [], []
    for at in range(steps):
        if at == 0 and rank == 1:
            time.sleep(delay)
        losses.append(step([_batch(at, rank)], 0.1).loss)
        counts.append(recompiles())
    return losses, counts


def _batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    length = LENGTHS[(step + rank) % 3]
    tokens = torch.randint(0, 64, (2, length + 1), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def _last(counts: Sequence[int]) -> int:
    return counts[-1]


@pytest.mark.limit(120)
def test_lengths_that_differ_by_rank_compile_a_bounded_number_of_graphs(pool: Pool) -> None:  # BL-85
    eager = pool.run(train, 2, 20, False, 0.0, timeout=60)
    compiled = pool.run(train, 2, 20, True, 3.0, timeout=90)
    for (losses, _), (wanted, _) in zip(compiled, eager, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-6)
    for _, counts in compiled:
        # a graph per length serves all three layers: two beyond the first, all of them in the first three steps
        assert counts[2] == counts[-1] == len(LENGTHS) - 1


def test_blocks_of_the_engines_own_classes_are_compiled_one_graph_for_each_kind() -> None:
    """The engine's tracer passes over frames of torch.nn, so that `Module.compile` leaves these as they are."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
        graphs.append(len(inputs))
        return graph.forward

    def stages(kinds: int) -> list[torch.nn.Module]:
        torch.manual_seed(0)
        return [torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(1 + n % kinds))) for n in range(2 * kinds)]

    def outputs(blocks: list[torch.nn.Module]) -> list[torch.Tensor]:
        return [block(torch.ones(2, 4)) for block in blocks]

    compiled, plain = stages(10), stages(10)
    compile_blocks(compiled, backend=backend)
    try:
        assert all(map(torch.equal, outputs(compiled), outputs(plain)))
        # More kinds than the engine would compile of one function; each is a graph, its twin the same one.
        assert len(graphs) == 10
        copied = copy.deepcopy(compiled[0])
        for parameter in copied.parameters():
            parameter.data.zero_()
        assert not torch.equal(copied(torch.ones(2, 4)), compiled[0](torch.ones(2, 4)))
    finally:
        torch._dynamo.reset()


def test_such_a_block_that_is_computed_anew_is_compiled_with_that() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    block = torch.nn.Sequential(torch.nn.Linear(4, 4))
    plain = block(torch.ones(2, 4))
    recompute_blocks([block], "full")
    compile_blocks([block], backend=backend)
    try:
        assert torch.equal(block(torch.ones(2, 4)), plain)
    finally:
        torch._dynamo.reset()
    assert len(graphs) == 1 and "checkpoint" in graphs[0].code


def test_a_compiler_in_the_midst_of_training_is_a_section_of_its_own(tmp_path: Path) -> None:
    page, seen = tmp_path / "rank-0.beat", []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., object]:
        seen.append(heartbeat.read(page))
        return graph.forward

    layer = torch.nn.Linear(4, 4)
    heartbeat.open_file(page)
    try:
        compile_blocks([layer], backend=backend)
        for step in range(heartbeat.FIRST_STEPS + 2):
            heartbeat.beat(step, "training step")
            layer(torch.ones(2 if step <= heartbeat.FIRST_STEPS else 3, 4))
        compiling, after = seen[-1], heartbeat.read_page(page)
    finally:
        heartbeat._pages.clear()
        heartbeat.beat(-1, "starting")
        torch._dynamo.reset()
    assert len(seen) == 2 and compiling is not None and after is not None and after.beat is not None
    assert (compiling.step, compiling.phase, compiling.section) == (heartbeat.FIRST_STEPS + 1, "compiling", "compile")
    assert (after.beat.phase, after.beat.section) == ("training step", "step")
    # Two compilations, and the rest of the first steps on either side of the first one.
    assert after.durations["compile"].number == heartbeat.FIRST_STEPS + 3


def test_eager_blocks_compile_nothing() -> None:
    assert _last(train(0, 1, 2, False, 0.0)[1]) == 0
