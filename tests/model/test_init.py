"""Initial weights are a function of seed and name, and of nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from paceline.errors import JobError
from paceline.model.init import initial_tensor, initialise, weights_hash
from paceline.model.spec import parameters
from paceline.model.transformer import Decoder
from tests.model.models import FAMILIES, small_spec


@pytest.mark.parametrize("family", FAMILIES)
def test_a_meta_model_and_a_direct_one_get_the_same_weights(family: str) -> None:
    spec = small_spec(family)
    meta, direct = Decoder(spec, device="meta"), Decoder(spec)
    torch.manual_seed(99)
    initialise(meta, spec, 7, "cpu")
    initialise(direct, spec, 7, "cpu")
    assert weights_hash(meta.named_parameters()) == weights_hash(direct.named_parameters())
    other = Decoder(spec, device="meta")
    initialise(other, spec, 8, "cpu")
    assert weights_hash(other.named_parameters()) != weights_hash(meta.named_parameters())


def test_order_and_neighbours_do_not_matter() -> None:
    spec = small_spec("qwen")
    forward = {p.name: initial_tensor(p, spec, 3) for p in parameters(spec)}
    backward = {p.name: initial_tensor(p, spec, 3) for p in reversed(parameters(spec))}
    assert all(torch.equal(forward[name], backward[name]) for name in forward)
    assert weights_hash(forward.items()) == weights_hash(backward.items())
    part = nn.ModuleDict({"blocks": nn.ModuleDict({"1": Decoder(spec, device="meta").blocks["1"]})})
    initialise(part, spec, 3, "cpu")
    assert all(torch.equal(p, forward[name]) for name, p in part.named_parameters())


def test_the_scheme() -> None:
    spec = small_spec("gpt2", dim=128, head_dim=32, ffn_dim=512, num_layers=8)
    for parameter in parameters(spec):
        tensor = initial_tensor(parameter, spec, 1)
        if parameter.name.endswith(".bias"):
            assert not tensor.any(), parameter.name
        elif parameter.role == "norm":
            assert bool((tensor == 1).all()), parameter.name
        else:
            residual = parameter.role in ("attention_output", "mlp_output")
            std = 0.02 / math.sqrt(16) if residual else 0.02
            assert tensor.std().item() == pytest.approx(std, rel=0.05), parameter.name
            assert abs(tensor.mean().item()) < std * 5 / math.sqrt(tensor.numel()), parameter.name


def test_types_and_frozen_parameters_stay() -> None:
    spec = small_spec("tiny")
    model = Decoder(spec, device="meta").to(torch.float64)
    model.embedding.weight.requires_grad_(False)
    initialise(model, spec, 1, "cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert not model.embedding.weight.requires_grad


def test_a_foreign_model_is_refused_by_name() -> None:
    with pytest.raises(JobError, match=r"lm_head\.weight of shape \(64, 32\)"):
        initialise(
            Decoder(small_spec("llama", tie_embeddings=False)), small_spec("llama", tie_embeddings=True), 1, "cpu"
        )


def test_the_hash_sees_name_shape_type_and_bytes() -> None:
    tensor = torch.arange(6.0)
    variants = [
        ("a", tensor), ("b", tensor), ("a", tensor.view(2, 3)), ("a", tensor.double()), ("a", tensor.flip(0)),
        ("a", tensor.bfloat16()),
    ]  # fmt: skip
    assert len({weights_hash([variant]) for variant in variants}) == len(variants)
    assert weights_hash([("a", torch.arange(6.0).view(3, 2).T)]) == weights_hash(
        [("a", torch.tensor([[0.0, 2, 4], [1, 3, 5]]))]
    )
