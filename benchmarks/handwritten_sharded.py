"""The hand-written loop on `fully_shard` (FSDP2): what `dp_shard` is measured against.

As someone who knows FSDP2 well writes it: a unit per block and one for the rest, bf16 by its mixed-precision policy with
an fp32 reduction and no autocast, fused AdamW over the DTensors, torch's own clipping. The three stages are

    3   blocks reshard after forward; reduced every micro-batch
    2   blocks stay gathered until their backward; reduced every micro-batch
    1   everything stays gathered, and gradients whole, until the step's last backward

unless the job says otherwise how often gradients are reduced. Model, weights, data and schedule are `handwritten.py`'s.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.handwritten import Handwritten
from benchmarks.recipe import Recipe
from paceline.data.dataset import TokenDataset
from paceline.model.transformer import Decoder


class HandwrittenSharded(Handwritten):
    """The loop over one sharded decoder; `step()` is one optimizer step."""

    def __init__(
        self, recipe: Recipe, dataset: TokenDataset, rank: int, world_size: int, stage: int, every_microbatch: bool
    ) -> None:
        self.stage = stage
        self.every_microbatch = every_microbatch
        self.world_size = world_size
        super().__init__(recipe, dataset, rank, world_size)

    def wrap(self, decoder: Decoder) -> torch.nn.Module:
        mesh = init_device_mesh("cpu", (self.world_size,))
        policy = MixedPrecisionPolicy()
        if self.recipe.precision == "bf16":
            # The rotary tables among a block's inputs stay fp32.
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for block in decoder.blocks.values():
            fully_shard(block, mesh=mesh, reshard_after_forward=self.stage == 3, mp_policy=policy)
        fully_shard(decoder, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
        for module in decoder.modules():
            if isinstance(module, FSDPModule):
                # Gloo has no average.
                module.set_force_sum_reduction_for_comms(True)
        return decoder

    def synchronised(self, last: bool) -> AbstractContextManager[Any]:
        """Around a micro-batch: the switches of its stage."""
        model = self.model
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(last or self.every_microbatch)
        model.set_reshard_after_backward(last or self.stage > 1)
        model.set_is_last_backward(last)
        return nullcontext()

    def arithmetic(self) -> AbstractContextManager[Any]:
        """Nothing: weights are gathered in the type that the products take."""
        return nullcontext()
