"""The optimizer over named parameters: groups by decay, fused kernels, one scale applied while stepping."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.optim.config import OptimizerSection


def decays(parameter: Tensor) -> bool:
    """Whether weight decay applies: matrices and higher decay, norms and biases do not."""
    return parameter.ndim >= 2


def parameter_groups(named: Iterable[tuple[str, torch.nn.Parameter]], weight_decay: float) -> list[dict[str, object]]:
    """Groups with and without decay; each carries the names of its parameters in order (`names`)."""
    groups: dict[bool, dict[str, object]] = {}
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        decay = decays(parameter)
        group = groups.setdefault(decay, {"params": [], "names": [], "weight_decay": weight_decay if decay else 0.0})
        group["params"].append(parameter)  # type: ignore[attr-defined]
        group["names"].append(name)  # type: ignore[attr-defined]
    return [groups[decay] for decay in sorted(groups, reverse=True)]


def build_optimizer(
    optimizer: OptimizerSection, named: Iterable[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """AdamW or SGD with fused kernels. The learning rate is set at each step."""
    groups = parameter_groups(named, optimizer.weight_decay)
    if optimizer.name == "adamw":
        adamw = without_compiler(torch.optim.AdamW)
        return adamw(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, fused=True)
    return without_compiler(torch.optim.SGD)(groups, lr=optimizer.lr, momentum=optimizer.momentum, fused=True)


@functools.cache
def without_compiler(base: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """`base` without its guards for torch.compile.

    They load the compiler at the first optimizer of a process, compiled or not: two seconds of every start (torch 2.13,
    `torch/optim/optimizer.py`: `_disable_dynamo`, `_use_grad_for_differentiable`). Our optimizer step is never compiled.
    """
    plain_step = inspect.unwrap(base.step)

    class Plain(base):  # type: ignore[valid-type,misc]
        add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)

        @torch.no_grad()
        def step(self, closure: Callable[[], float] | None = None) -> Any:
            return plain_step(self, closure)

    Plain.__name__ = Plain.__qualname__ = base.__name__
    return Plain


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Make the moments that torch would make at the first step, all zero: what is loaded needs a place, under its name."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state:
                continue
            if "betas" in group:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for kind in moment_kinds(group):
                state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format)


def moment_kinds(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the tensors that an optimizer keeps for each parameter of a group."""
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group.get("momentum") else ()


def apply_step(optimizer: torch.optim.Optimizer, gradient_factor: Tensor, lr: float) -> None:
    """One update with gradients times `gradient_factor` (a scalar tensor) at learning rate `lr`.

    Fused kernels divide by `grad_scale` while they read the gradient, which saves a pass over all of them; other
    optimizers get their gradients multiplied first.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
    # The kernels read the scale as float32, which float64 arithmetic cannot afford.
    if getattr(optimizer, "_step_supports_amp_scaling", False) and gradient_factor.dtype == torch.float32:
        optimizer.grad_scale = gradient_factor.reciprocal()  # type: ignore[attr-defined]
        optimizer.found_inf = torch.zeros((), dtype=torch.float32, device=gradient_factor.device)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return
    for group in optimizer.param_groups:
        gradients = [p.grad for p in group["params"] if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, gradient_factor.to(gradients[0].dtype))
    optimizer.step()
