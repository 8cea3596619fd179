"""The sides that are measured, each as an object that trains further on demand."""

from __future__ import annotations

from typing import Protocol

from benchmarks.handwritten import Handwritten
from benchmarks.ranks import Rank
from benchmarks.recipe import Recipe
from paceline.train.loop import Policy, step_timers, train
from paceline.train.observe import RunObserver
from paceline.train.startup import build_session


class Side(Protocol):
    """One of the things compared. Every rank has one of each and drives them alike."""

    name: str

    def run(self, steps: int) -> None:
        """Train for `steps` more optimizer steps."""

    def last_loss(self) -> float:
        """The last step's loss over all ranks; every rank calls it."""

    def close(self) -> None:
        """End what it started."""


class PacelineSide:
    """`paceline train`'s own loop over windows of steps: loader processes, records, live line and heartbeats included."""

    name = "paceline"

    def __init__(self, rank: Rank) -> None:
        job = rank.resolved.job
        self.session = build_session(rank.resolved, rank.data, rank.world)
        self.session.evals = {}
        self.policy = Policy(log_every=job.run.log_every)
        self.observer = RunObserver(
            rank.directory,
            rank.world.rank,
            steps=self.session.steps,
            log_every=job.run.log_every,
            telemetry=job.telemetry,
        )
        self.timers = step_timers(self.session)
        self.done = 0
        self.loss = float("nan")

    def run(self, steps: int) -> None:
        self.session.start.step, self.session.steps = self.done, self.done + steps
        outcome = train(self.session, self.policy, self.observer, self.timers)
        self.done += steps
        self.loss = outcome.loss if outcome.loss is not None else float("nan")

    def last_loss(self) -> float:
        return self.loss

    def close(self) -> None:
        self.session.batches.close()
        self.observer.close()


class HandwrittenSide:
    """The hand-written loop."""

    name = "handwritten"

    def __init__(self, rank: Rank, recipe: Recipe) -> None:
        self.loop = Handwritten(recipe, rank.data.train, rank.world.rank, rank.world.world_size)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.loop.step()

    def last_loss(self) -> float:
        return self.loop.mean_loss()

    def close(self) -> None:
        """Nothing to end."""


class HandwrittenShardedSide(HandwrittenSide):
    """The hand-written loop on `fully_shard`, at the job's stage."""

    def __init__(self, rank: Rank, recipe: Recipe) -> None:
        # torch's sharding takes a second to load and has its own memory, which the other programs do without.
        from benchmarks.handwritten_sharded import HandwrittenSharded

        fsdp = rank.resolved.fsdp
        self.loop = HandwrittenSharded(
            recipe,
            rank.data.train,
            rank.world.rank,
            rank.world.world_size,
            fsdp.zero_stage,
            fsdp.reduce_every_microbatch,
        )
