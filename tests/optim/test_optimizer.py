"""Our optimizers against torch's, and what they must not load."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from paceline.optim.config import OptimizerSection
from paceline.optim.cost import moments_bytes
from paceline.optim.optimizer import apply_step, build_optimizer, parameter_groups


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "section", [OptimizerSection(), OptimizerSection(name="sgd", momentum=0.9), OptimizerSection(name="sgd")]
)
def test_steps_are_bitwise_those_of_torch(section: OptimizerSection) -> None:
    ours, theirs = model(), model()
    optimizer = build_optimizer(section, ours.named_parameters())
    groups = parameter_groups(theirs.named_parameters(), section.weight_decay)
    reference: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, betas=section.betas, eps=section.eps, fused=True)
        if section.name == "adamw"
        else torch.optim.SGD(groups, momentum=section.momentum, fused=True)
    )
    for step in range(4):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        for m in (ours, theirs):
            m.zero_grad()
            m(x).square().sum().backward()
        apply_step(optimizer, torch.ones(()), 0.01)
        for group in reference.param_groups:
            group["lr"] = 0.01
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.01


def test_norms_and_biases_do_not_decay() -> None:
    decaying, others = parameter_groups(model().named_parameters(), 0.1)
    assert decaying["names"] == ["0.weight", "2.weight"] and decaying["weight_decay"] == 0.1
    assert others["names"] == ["0.bias", "1.weight", "1.bias", "2.bias"] and others["weight_decay"] == 0.0


@pytest.mark.parametrize("section", [OptimizerSection(), OptimizerSection(name="sgd", momentum=0.9)])
def test_moments_take_the_bytes_that_cost_says(section: OptimizerSection) -> None:
    module = model()
    optimizer = build_optimizer(section, module.named_parameters())
    module(torch.ones(2, 6)).sum().backward()
    apply_step(optimizer, torch.ones(()), 0.1)
    held = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if t is not None)
    elements, tensors = sum(p.numel() for p in module.parameters()), len(list(module.parameters()))
    assert held == moments_bytes(section, elements, tensors, 4)


def test_an_optimizer_step_does_not_load_the_compiler() -> None:
    program = (
        "import sys, torch; from paceline.optim.config import OptimizerSection as S;"
        "from paceline.optim.optimizer import apply_step, build_optimizer;"
        "m = torch.nn.Linear(2, 2); o = build_optimizer(S(), m.named_parameters());"
        "m(torch.ones(1, 2)).sum().backward(); apply_step(o, torch.ones(()), 0.1);"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
