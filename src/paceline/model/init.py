"""Initial weights as a function of (seed, parameter name): equal for every layout, number of ranks and order of making.

Each tensor is made whole, in fp32 on the CPU, from a generator of its own; what splits tensors splits them afterwards.
(DTensor's own random initialisation on a CPU gives every rank's shard the same numbers.)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.model.spec import ModelSpec, Parameter, parameters

STD = 0.02
"""Standard deviation of the weights (Radford et al. 2019; Llama and Qwen configurations' `initializer_range`)."""

RESIDUAL_ROLES = ("attention_output", "mlp_output")
"""What adds to the residual stream: 1/sqrt(2 x layers) smaller, so that its variance does not grow with depth."""


def initial_tensor(parameter: Parameter, spec: ModelSpec, seed: int) -> Tensor:
    """A parameter's first value, whole, fp32, on the CPU: norms 1, biases 0, else normal with mean 0."""
    if parameter.role.endswith("_bias") or parameter.name.endswith(".bias"):
        return torch.zeros(parameter.shape)
    if parameter.role in ("norm", "head_norm"):
        return torch.ones(parameter.shape)
    std = STD / math.sqrt(2 * spec.num_layers) if parameter.role in RESIDUAL_ROLES else STD
    generator = torch.Generator().manual_seed(_tensor_seed(seed, parameter.name))
    return torch.empty(parameter.shape).normal_(0.0, std, generator=generator)


def initial_weights(model: nn.Module, spec: ModelSpec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Name and first value of each parameter of a decoder (or of a part that kept its names), made one at a time.

    Raises:
        JobError: the model has a parameter that the spec does not list, or of another shape.
    """
    known = {p.name: p for p in parameters(spec)}
    # The names are taken now: whoever reads the values may have split the model by then.
    names = [n for n, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if name not in known or shape != known[name].shape:
            raise JobError(
                f"parameter {name} of shape {shape} is not the model's of [model]",
                key="model",
                values={"name": name, "shape": shape},
            )
    return ((name, initial_tensor(known[name], spec, seed)) for name in names)


def initialise(model: nn.Module, spec: ModelSpec, seed: int, device: torch.device | str) -> None:
    """Gives a decoder its initial weights on a device, one tensor at a time; a meta one is materialised in place.

    Parameters keep their type (float32, float64, ...) and whether they need gradients. Works on a part of a decoder
    whose parameters kept their names.

    Raises:
        JobError: the model has a parameter that the spec does not list, or of another shape.
    """
    for name, value in initial_weights(model, spec, seed):
        prefix, _, local = name.rpartition(".")
        module, old = model.get_submodule(prefix), model.get_parameter(name)
        whole = value.to(device=device, dtype=old.dtype)
        module.register_parameter(local, nn.Parameter(whole, requires_grad=old.requires_grad))


def weights_hash(named: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over name, shape, type and bytes of every tensor, in the order of their names."""
    return hash_in_order(sorted(named, key=lambda pair: pair[0]))


def hash_in_order(named: Iterable[tuple[str, Tensor]]) -> str:
    """`weights_hash` of tensors that come one at a time, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in named:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{tuple(plain.shape)}\0{plain.dtype}\0".encode())
        digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensor_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "big") >> 1
