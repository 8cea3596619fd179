"""Recomputation against the same model without: results to the bit, memory against its formula within 1 %.

Both run the same operators on the same numbers, so float64 and float32 results are equal and not only close.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from paceline.loss.cross_entropy import token_cross_entropy
from paceline.model.attention import Documents
from paceline.model.dropout import DropoutKey
from paceline.model.flop import activation_bytes, hardware_flop_per_token
from paceline.model.spec import ModelSpec
from paceline.model.transformer import Decoder
from paceline.optim.config import OptimizerSection
from paceline.optim.optimizer import build_optimizer
from paceline.parallel.compile.apply import compile_blocks
from paceline.parallel.ddp.apply import BucketReducer
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.recompute.apply import recompute_blocks
from paceline.parallel.recompute.config import Recompute
from paceline.parallel.recompute.cost import extra_flop_share, peak_bytes
from paceline.train.language import language_functions
from paceline.train.step import TrainStep
from tests.model.models import FAMILIES, small_decoder, small_spec, some_tokens
from tests.parallel.live_bytes import LiveBytes
from tests.pool.pool import Pool

MODES: list[Recompute] = ["selective", "full"]


def gradients(
    family: str, recompute: Recompute, dtype: torch.dtype, bf16: bool = False, compiled: bool = False, **keys: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    model = small_decoder(family, dtype, **keys)
    recompute_blocks(model.blocks.values(), recompute)
    if compiled:
        compile_blocks(model.blocks.values(), backend="aot_eager")
    documents = Documents(torch.tensor([0, 10, 24, 48], dtype=torch.int32), 24) if keys.get("documents") else None
    with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
        logits = model(some_tokens(2, 24), documents, None, DropoutKey(1, 2, torch.arange(2)))
        loss, _ = token_cross_entropy(logits, some_tokens(2, 24, seed=4))
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return loss.detach(), found


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_equal_to_the_bit(family: str, recompute: Recompute) -> None:
    wanted, wanted_grads = gradients(family, "none", torch.float64)
    loss, grads = gradients(family, recompute, torch.float64)
    assert torch.equal(loss, wanted)
    assert all(torch.equal(grads[n], g) for n, g in wanted_grads.items())


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize(
    ("bf16", "keys"),
    [
        (True, {}),  # at a head width of 8: attention by a function of our own, with an fp32 backward
        (True, {"head_dim": 64}),
        (False, {"dropout": 0.2}),
        (False, {"dropout": 0.2, "attention_dropout": 0.1}),
        (True, {"dropout": 0.2, "attention_dropout": 0.1}),
    ],
)
def test_dropout_and_bf16_are_equal_to_the_bit(recompute: Recompute, bf16: bool, keys: dict[str, Any]) -> None:
    dtype = torch.float32 if bf16 else torch.float64
    wanted, wanted_grads = gradients("llama", "none", dtype, bf16, **keys)
    loss, grads = gradients("llama", recompute, dtype, bf16, **keys)
    assert torch.equal(loss, wanted)
    assert all(torch.equal(grads[n], g) for n, g in wanted_grads.items())


@pytest.mark.parametrize("recompute", MODES)
def test_compiled_blocks_recompute_as_well(recompute: Recompute) -> None:
    torch._dynamo.reset()
    wanted, wanted_grads = gradients("llama", "none", torch.float64)
    loss, grads = gradients("llama", recompute, torch.float64, compiled=True)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-12)
    for name, gradient in wanted_grads.items():
        assert torch.linalg.vector_norm(grads[name] - gradient) <= 1e-12 * torch.linalg.vector_norm(gradient)


def weights_after(rank: int, world: int, recompute: Recompute) -> dict[str, Tensor]:
    model = small_decoder("llama", torch.float64, dropout=0.2)
    recompute_blocks(model.blocks.values(), recompute)
    forward, loss = language_functions(model.spec, 0)
    step = TrainStep(
        model, forward, loss, build_optimizer(OptimizerSection(), model.named_parameters()),
        BucketReducer(model.parameters(), dist.group.WORLD, DdpConfig(bucket_bytes=4096)), group=dist.group.WORLD,
        prescale=1 / 96, clip_norm=1.0, device=torch.device("cpu"),
    )  # fmt: skip
    for at in range(3):
        batches = [
            {"tokens": some_tokens(2, 24, seed=10 * at + rank + k), "labels": some_tokens(2, 24, seed=at + rank),
             "sample_ids": torch.tensor([4 * rank, 4 * rank + k]), "step": torch.tensor(at)}
            for k in range(2)
        ]  # fmt: skip
        step(batches, 1e-3)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", MODES)
def test_ranks_with_buckets_and_accumulation_walk_the_same_way(pool: Pool, recompute: Recompute) -> None:
    wanted = pool.run(weights_after, 2, "none")
    for found, reference in zip(pool.run(weights_after, 2, recompute), wanted, strict=True):
        assert all(torch.equal(found[n], w) for n, w in reference.items())


def test_names_and_evaluation_stay_as_they_were() -> None:
    plain, wrapped = small_decoder("llama"), small_decoder("llama")
    recompute_blocks(wrapped.blocks.values(), "full")
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    with torch.no_grad():
        assert torch.equal(wrapped.eval()(some_tokens(1, 8)), plain.eval()(some_tokens(1, 8)))


def kept_bytes(spec: ModelSpec, model: Decoder, bf16: bool, microbatch: int, length: int) -> int:
    """Bytes of tensors, parameters left out, that exist between a forward and its backward."""
    inputs, labels = some_tokens(microbatch, length, spec.vocab_size), some_tokens(microbatch, length, spec.vocab_size)
    key = DropoutKey(1, 1, torch.arange(microbatch))
    counter = LiveBytes(model.parameters())
    with counter, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        inputs, labels = inputs.clone(), labels.clone()
        loss, _ = token_cross_entropy(model(inputs, None, None, key), labels)
    kept = counter.count()
    del loss
    return kept


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("recompute", ["none", *MODES])
@pytest.mark.parametrize(
    ("family", "keys"),
    [("llama", {}), ("qwen", {}), ("gpt2", {}), ("llama", {"dropout": 0.1}), ("llama", {"attention_dropout": 0.1})],
)
def test_bytes_kept_are_those_of_the_formula(
    family: str, keys: dict[str, Any], recompute: Recompute, bf16: bool
) -> None:
    sizes = {"num_layers": 4, "dim": 64, "ffn_dim": 160, "max_sequence_length": 128}
    model = small_decoder(family, torch.float32, **{**sizes, **keys})
    recompute_blocks(model.blocks.values(), recompute)
    predicted = activation_bytes(model.spec, 3, 96, 2 if bf16 else 4, recompute=recompute)
    assert kept_bytes(model.spec, model, bf16, 3, 96) == pytest.approx(predicted.total, rel=0.01)


@pytest.mark.parametrize("recompute", MODES)
def test_products_done_again_are_those_of_the_formula(recompute: Recompute) -> None:
    spec = small_spec("llama", attention_dropout=0.1)  # attention written out: torch counts all its products
    model = small_decoder("llama", torch.float32, attention_dropout=0.1)
    recompute_blocks(model.blocks.values(), recompute)
    with FlopCounterMode(display=False) as counter:
        logits = model(some_tokens(2, 24), None, None, DropoutKey(1, 2, torch.arange(2)))
        token_cross_entropy(logits, some_tokens(2, 24, seed=4))[0].backward()
    # torch stops before a block's last product, whose output no backward reads; no convention counts that.
    spared = 2 * spec.dim * spec.ffn_dim * spec.num_layers if recompute == "full" else 0
    assert counter.get_total_flops() == (hardware_flop_per_token(spec, 24, recompute) - spared) * 48


def test_the_peak_is_at_the_loss_or_in_a_block() -> None:
    spec = small_spec("llama", max_sequence_length=128)
    activations = activation_bytes(spec, 3, 96, 4, recompute="full")
    kept = activations.total - activations.logits_and_loss
    assert peak_bytes(activations, "full", activations.recomputed_block + 1) == kept
    assert peak_bytes(activations, "full", 0) == kept + activations.recomputed_block
    assert extra_flop_share(spec, 96, "selective") == 0 < extra_flop_share(spec, 96, "full") < 1 / 3


def test_a_block_that_draws_random_numbers_draws_them_again() -> None:
    """nn.Dropout's masks come from the generator: without its state the backward would belong to another forward."""
    block = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)).double()
    x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def gradients() -> list[torch.Tensor]:
        block.zero_grad()
        torch.manual_seed(5)
        block(x).square().sum().backward()
        return [p.grad.clone() for p in block.parameters() if p.grad is not None]

    wanted = gradients()
    recompute_blocks([block], "full", preserve_random_state=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), wanted, strict=True))
