"""transformers.Trainer: its whole `train()` runs in a second thread and is stopped between two steps.

Only one of the two threads runs at a time. The hand-over lies where a step begins, so that what Trainer does after a
step (logging, callbacks, the next batch) counts as its own.
"""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.in_order import InOrder, fresh_decoder, fused_adamw, schedule_factor
from benchmarks.ranks import Rank
from benchmarks.recipe import Recipe


class WithLoss(nn.Module):
    """The decoder as Trainer wants a model: it returns its loss."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.decoder = fresh_decoder(recipe)
        self.losses: deque[Tensor] = deque(maxlen=recipe.accumulation)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits_BLV = self.decoder(tokens)
        loss = F.cross_entropy(logits_BLV.float().flatten(0, 1), labels.flatten())
        self.losses.append(loss.detach())
        return {"loss": loss}


class InOrderTrainer(Trainer):
    """Trainer that reads its data set from front to back."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Turns(TrainerCallback):
    """Lets Trainer take as many steps as it was given, then waits."""

    def __init__(self) -> None:
        self.left = 0
        self.ended = False
        self.go = threading.Semaphore(0)
        self.rested = threading.Semaphore(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.left == 0:
            self.rested.release()
            self.go.acquire()
        if self.ended:
            raise Ended
        self.left -= 1


class Ended(Exception):
    """Leaves `Trainer.train`, which has no other way out before a step."""


class TrainerSide:
    """`Trainer.train()` on demand, on the process group that is there."""

    name = "transformers.Trainer"

    def __init__(self, rank: Rank, recipe: Recipe) -> None:
        self.turns = Turns()
        self.failure: BaseException | None = None
        self.model = WithLoss(recipe)
        self.folder = tempfile.TemporaryDirectory(prefix="paceline-bench-")
        optimizer = fused_adamw(recipe, self.model)
        self.trainer = InOrderTrainer(
            model=self.model,
            args=self._arguments(recipe),
            train_dataset=InOrder(recipe, rank.data.train),
            callbacks=[self.turns],
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: schedule_factor(recipe, step))),
        )
        if self.trainer.args.world_size != rank.world.world_size:
            raise RuntimeError(f"Trainer trains {self.trainer.args.world_size} process(es)")
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()
        self._rest()

    def run(self, steps: int) -> None:
        self.turns.left = steps
        self.turns.go.release()
        self._rest()

    def last_loss(self) -> float:
        total = torch.stack(list(self.model.losses)).mean()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def close(self) -> None:
        self.turns.ended = True
        self.turns.go.release()
        self.thread.join(30.0)
        self.folder.cleanup()

    def _rest(self) -> None:
        self.turns.rested.acquire()
        if self.failure is not None:
            raise self.failure

    def _train(self) -> None:
        try:
            self.trainer.train()
        except Ended:
            return
        except BaseException as failure:
            self.failure = failure
        self.turns.rested.release()

    def _arguments(self, recipe: Recipe) -> TrainingArguments:
        return TrainingArguments(
            output_dir=self.folder.name,
            per_device_train_batch_size=recipe.microbatch,
            gradient_accumulation_steps=recipe.accumulation,
            max_steps=recipe.steps,
            max_grad_norm=recipe.clip_norm,
            bf16=recipe.precision == "bf16",
            use_cpu=True,
            ddp_find_unused_parameters=False,
            remove_unused_columns=False,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
        )
