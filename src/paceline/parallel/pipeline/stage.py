"""One stage for torch's schedules: what it receives is a pass of the model's own forward, and its buffers live briefly.

torch's stage keeps a buffer for each micro-batch's input and for its gradient from the first step on. This one makes a
buffer when it is about to be filled and lets go of it after the backward, so that a rank keeps what its schedule promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from paceline.model.transformer import Passage

Mark = Callable[[str], None]
Run = Callable[[int, Tensor | None], Tensor]
"""A stage's pass: number of the micro-batch and what enters (None on the first stage), to what leaves."""


class Staged(Protocol):
    """A model that can run in stages: the stage rule. While `passage` is set, its forward runs that alone.

    Attributes:
        blocks: its repeated parts by their number, those that this rank holds.
    """

    passage: Passage | None

    @property
    def blocks(self) -> nn.ModuleDict: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def residual_shape(self, tokens: Tensor, /) -> tuple[int, ...]:
        """Shape of what leaves a stage for these tokens."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class StageModule(nn.Module):
    """What torch calls for a stage. Inputs and labels are not handed on: their micro-batch's number is.

    Args:
        run: the pass.
        parameters_of: the stage's parameters as they are at the time of the call, since sharding swaps them.
    """

    def __init__(self, run: Run, parameters_of: Callable[[], Iterator[nn.Parameter]]) -> None:
        super().__init__()
        self._run, self._parameters_of = run, parameters_of

    def forward(self, *entering: Tensor, microbatch: Tensor) -> Tensor:
        return self._run(int(microbatch), entering[0] if entering else None)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self._parameters_of()


class Stage(PipelineStage):
    """torch's stage between residual streams of one shape, given at once, so that nothing is run to find it out.

    Args:
        hidden: the residual stream of a micro-batch, on the meta device.
        done: told each pass that has ended, and each that begins, by its part of the step.
    """

    def __init__(
        self, module: StageModule, index: int, count: int, hidden: Tensor, group: dist.ProcessGroup, device: torch.device,
        mark: Mark,
    ) -> None:  # fmt: skip
        last = index == count - 1
        super().__init__(
            module, index, count, device, input_args=() if index == 0 else hidden,
            output_args=torch.empty((), device="meta", requires_grad=True) if last else hidden, group=group,
        )  # fmt: skip
        self._mark = mark

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_buffers(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._mark("bubble")
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._mark("forward")
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._mark("bubble")
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None
        self._mark("backward")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._mark("bubble")
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._mark("backward")

    def _post_metadata_inference_cleanup(self) -> None:
        super()._post_metadata_inference_cleanup()
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            for info in infos:
                info.buffer = None

    def _make_buffers(self, infos: Any) -> None:
        for info in infos:
            if info.buffer is None and info.tensor_meta is not None and not info.is_root_arg:
                info.buffer = info.tensor_meta.to_tensor(self.device).detach()
