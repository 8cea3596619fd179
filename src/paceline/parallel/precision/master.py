"""bf16 weights for forward and backward, updated through fp32 master copies.

A bf16 weight has 8 bits of mantissa: an update below 1/256 of it would be lost. So the optimizer works on fp32 masters,
which start from the weights' fp32 initial values, and each step ends with their rounding into the model. Gradients
accumulate and are summed over ranks in fp32 (`Tensor.grad_dtype`): a bf16 running sum of 256 and eight ones stays 256.
"""

from __future__ import annotations

import torch
from torch import nn


class MasterWeights:
    """fp32 masters of a model's trainable weights; `named` is what the optimizer is built over.

    Making one casts the model's floating-point parameters to bf16 in place. Buffers keep their type.
    """

    def __init__(self, model: nn.Module) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.named: list[tuple[str, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            master = nn.Parameter(parameter.detach().float()) if parameter.requires_grad else None
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)
            if master is None:
                continue
            parameter.grad_dtype = torch.float32
            self._pairs.append((parameter, master))
            self.named.append((name, master))

    def take_gradients(self) -> None:
        """Give the masters the model's gradients, without a copy."""
        for parameter, master in self._pairs:
            master.grad = parameter.grad

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model."""
        torch._foreach_copy_([p for p, _ in self._pairs], [m for _, m in self._pairs])
