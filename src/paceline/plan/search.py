"""The search: every choice is bounded, few are weighed, and nothing that is left out could have been the answer.

Choices are taken in the order of their bound in seconds. A layout's best choice is kept; once as many layouts are known
as are shown, choices whose bound is above the last of them end the walk. What is kept has been resolved as the job that
would run, so that it fits because its own memory says so. A second walk completes the front of time and head-room.
Imports no torch.
"""

from __future__ import annotations

import math
from heapq import heappop, heappush
from typing import Any

import msgspec

from paceline.cluster.spec import Cluster
from paceline.job.load import Job
from paceline.optim.cost import moments_bytes
from paceline.parallel.layout import Layout
from paceline.plan.bound_memory import MemoryBound
from paceline.plan.bound_time import TimeBound
from paceline.plan.bounds import Bounds, Group
from paceline.plan.refusals import nothing_runs
from paceline.plan.rejections import Rejections
from paceline.plan.setting import StepTime
from paceline.plan.space import Choice, Held, Limits, fault, held_by, layouts
from paceline.plan.verdict import OWN_SIGMA, USABLE
from paceline.plan.weigh import Scale, Weighed

SHOWN = 8
"""Layouts that are shown: the chosen one and its alternatives."""

FRONT_STEP = 0.05
"""Share of a device's memory by which a slower choice must leave more free to stand on the front."""

FRONT_LIMIT = 12
"""Choices weighed for the front beyond those that the first walk met."""

OOM_CHANCE = 0.05
Z95 = 1.6448536269514722
"""A layout whose chance to run out of memory is larger is not chosen where there is another one; and the quantile."""

NEAR = 0.01
"""Choices within this share of the fastest are as fast: the simplest of them is chosen."""


class Found(msgspec.Struct, frozen=True):
    """What a search came to. `ranked` are the best choices of different layouts, the chosen one first; empty where
    nothing fits, and then `nearest` is what misses the memory by least."""

    ranked: tuple[Weighed, ...]
    front: tuple[Weighed, ...]
    rejections: Rejections
    nearest: Weighed | None
    held: Held
    layouts: int
    choices: int
    weighed: int


class Pool:
    """All choices with their bounds, as one long line."""

    def __init__(self, groups: list[Group]) -> None:
        import numpy as np

        self.groups = groups
        ends = np.cumsum([0, *(group.seconds.size for group in groups)])
        self._ends = ends
        self.seconds = np.concatenate([group.seconds.ravel() for group in groups])
        self.memory = np.concatenate([group.memory_bytes.ravel() for group in groups])
        self.runs = np.concatenate([group.runs.ravel() for group in groups])

    def choice(self, index: int) -> Choice:
        import numpy as np

        number = int(np.searchsorted(self._ends, index, side="right")) - 1
        group = self.groups[number]
        at = np.unravel_index(index - int(self._ends[number]), group.seconds.shape)
        layout, style, size, again = (int(place) for place in at)
        return Choice(group.layouts[layout], group.styles[style], group.microbatches[size], group.recompute[again])


def search(job: Job, cluster: Cluster, shown: int = SHOWN, name_nearest: bool = True) -> Found:
    """The best layouts of a job on a cluster: of those that hardly run out of memory, where there are any, else of those
    that fit by their figure.

    Args:
        name_nearest: where nothing fits, whether to look for what misses the memory by least.

    Raises:
        JobError: the job is wrong under every layout.
        UsageError: the catalogue lacks the device or the fabric.
    """
    looking = Search(job, cluster)
    found = looking.run(shown)
    if not found.ranked and looking.may_fit:
        looking = Search(job, cluster, careful=False)
        found = looking.run(shown)
    if found.ranked or not name_nearest:
        return found
    return msgspec.structs.replace(found, nearest=looking.nearest())


class Search:
    """One search. `walk` and `complete_front` do the work; what they need of a choice is asked of `scale`."""

    def __init__(self, job: Job, cluster: Cluster, careful: bool = True) -> None:
        self.scale = Scale(job, cluster)
        self.world, self.job = cluster.devices, job
        self.limits = Limits.of(self.scale.base.spec, job)
        self.held = held_by(job)
        self.available = self._available(cluster)
        self.limit = careful_limit(self.available, cluster.host.device_kind) if careful else self.available
        self.rejections = Rejections()
        self.met: dict[Choice, Weighed | str | None] = {}
        self.steps: dict[Choice, StepTime] = {}
        self.layouts = 0
        self._pool: Pool | None = None

    def _available(self, cluster: Cluster) -> int:
        host = cluster.host
        return host.memory_bytes // cluster.devices_per_node if host.device_kind == "cpu" else host.device_memory_bytes

    def run(self, shown: int) -> Found:
        allowed = self.allowed()
        pool = self.pool(allowed)
        order = self.in_order(pool)
        best = self.walk(pool, order, shown)
        front = self.complete_front(pool, order, best)
        ranked = simplest_first(list(best.values()))[:shown]
        self._tell_slower(pool, order, ranked)
        if ranked:
            told = self.scale.resolve(ranked[0].choice, derive=True)
            ranked[0] = msgspec.structs.replace(ranked[0], resolved=told)
        return Found(
            tuple(ranked), tuple(front), self.rejections, None, self.held, self.layouts,
            int(pool.seconds.size), len(self.steps),
        )  # fmt: skip

    def allowed(self) -> list[Layout]:
        found = []
        for layout in layouts(self.world):
            self.layouts += 1
            reason = fault(layout, self.limits, self.held)
            if reason is None:
                found.append(layout)
            else:
                self.rejections.layout(reason, layout)
        return found

    def pool(self, allowed: list[Layout]) -> Pool:
        """All choices of the layouts that have any.

        Raises:
            JobError: there are none, whatever the layout.
        """
        optimizer = self.job.optimizer
        away = self.scale.base.transforms.offload.place != "none"
        moments = 0 if away else moments_bytes(optimizer, 1, 0, 8 if self.scale.base.precision == "fp64" else 4)
        parallel = self.job.parallel
        time = TimeBound(self.scale.setting, parallel.sequence_parallel, parallel.reduce_every)
        memory = MemoryBound(self.scale.setting, parallel, self.scale.base.host.device_kind, moments, self.scale.cut)
        groups = Bounds(time, memory, self.limits, self.held, self.limit).groups(allowed)
        kept = {layout for group in groups for layout in group.layouts}
        for layout in allowed:
            if layout not in kept:
                self.rejections.layout("no schedule, stage or micro-batch that the job sets runs in it", layout)
        if not groups:
            raise nothing_runs(self.job, self.world, self.rejections)
        self._pool = Pool(groups)
        return self._pool

    def in_order(self, pool: Pool) -> Any:
        """Numbers of the choices that may fit, the one with the lowest bound first."""
        import numpy as np

        fits = pool.memory <= self.limit
        self.rejections.schedule(pool, np.flatnonzero(~pool.runs))
        self.rejections.memory(pool, np.flatnonzero(pool.runs & ~fits), self.limit, self.available)
        may = np.flatnonzero(pool.runs & fits)
        return may[np.argsort(pool.seconds[may], kind="stable")]

    def walk(self, pool: Pool, order: Any, shown: int) -> dict[Layout, Weighed]:
        """The best choice of each of the best layouts.

        Choices come in the order of their predictions: one is taken when no other's prediction or bound is below its own.
        """
        best: dict[Layout, Weighed] = {}
        waiting: list[tuple[float, int, Choice]] = []
        at, last = 0, len(order)
        while at < last or waiting:
            bound = float(pool.seconds[order[at]]) if at < last else float("inf")
            if not waiting or waiting[0][0] > bound:
                choice = pool.choice(int(order[at]))
                if choice.layout not in best:
                    heappush(waiting, (self._step(choice).seconds, at, choice))
                at += 1
                continue
            seconds, _, choice = heappop(waiting)
            if len(best) >= shown and seconds > (1 + NEAR) * min(w.seconds for w in best.values()):
                break
            weighed = None if choice.layout in best else self._weigh(choice)
            if weighed is not None:
                best[choice.layout] = weighed
        return best

    def complete_front(self, pool: Pool, order: Any, best: dict[Layout, Weighed]) -> list[Weighed]:
        """Choices of which each leaves more memory free than every faster one, in steps of `FRONT_STEP`."""
        import numpy as np

        step = FRONT_STEP * self.available
        seconds, memory = pool.seconds[order], pool.memory[order]
        open_ = np.ones(len(order), dtype=bool)
        known = front_of([w for w in self.met.values() if isinstance(w, Weighed)], step)
        for _ in range(FRONT_LIMIT):
            for point in known:
                open_ &= (seconds < point.seconds) | (memory < point.memory_bytes - step)
            left = np.flatnonzero(open_)
            if not len(left) or not known:
                break
            open_[left[0]] = False
            choice = pool.choice(int(order[left[0]]))
            weighed = self._weigh(choice)
            if weighed is not None:
                known = front_of([*known, weighed], step)
        return known

    @property
    def may_fit(self) -> bool:
        """Whether the bound of any choice leaves room for it to fit by its figure."""
        pool = self._pool
        return pool is not None and bool((pool.memory[pool.runs] <= self.available).any())

    def nearest(self) -> Weighed | None:
        """Of the choices with the lowest bounds of memory, the one that needs the least, whether it fits or not."""
        import numpy as np

        pool = self._pool or self.pool(self.allowed())
        runs = np.flatnonzero(pool.runs)
        lowest = runs[np.argsort(pool.memory[runs], kind="stable")][:SHOWN]
        found = [w for i in lowest if isinstance(w := self.scale.weigh(pool.choice(int(i))), Weighed)]
        return min(found, key=lambda w: (w.memory_bytes, w.seconds), default=None)

    def _step(self, choice: Choice) -> StepTime:
        if choice not in self.steps:
            self.steps[choice] = self.scale.step(self.scale.setting_of(choice))
        return self.steps[choice]

    def _weigh(self, choice: Choice) -> Weighed | None:
        """The choice with its figures where it fits; what does not is told to the rejections."""
        if choice not in self.met:
            found = self.scale.weigh(choice, self._step(choice))
            if isinstance(found, str):
                self.rejections.refused(found, choice)
            elif found.memory_bytes > self.limit:
                self.rejections.misfit(choice, found.memory_bytes, self.limit, self.available)
                found = ""
            self.met[choice] = found
        weighed = self.met[choice]
        return weighed if isinstance(weighed, Weighed) else None

    def _tell_slower(self, pool: Pool, order: Any, ranked: list[Weighed]) -> None:
        if ranked:
            kept = {w.choice for w in ranked}
            refused = {choice for choice, found in self.met.items() if isinstance(found, str)}
            self.rejections.slower(pool, order, ranked[0].seconds, self.steps, kept | refused)


def careful_limit(available_bytes: int, device_kind: str) -> int:
    """Bytes up to which a rank runs out of memory with a chance of at most `OOM_CHANCE`."""
    usable = available_bytes * (1.0 if device_kind == "cpu" else USABLE)
    return int(usable * math.exp(-Z95 * OWN_SIGMA[device_kind]))


def simplest_first(weighed: list[Weighed]) -> list[Weighed]:
    """By time; of those within `NEAR` of the fastest, the one that splits along the fewest axes first."""
    ordered = sorted(weighed, key=lambda w: w.seconds)
    if not ordered:
        return []
    near = [w for w in ordered if w.seconds <= ordered[0].seconds * (1 + NEAR)]
    first = min(near, key=lambda w: (len(w.choice.layout.split_axes()), w.seconds))
    return [first, *(w for w in ordered if w is not first)]


def front_of(weighed: list[Weighed], step_bytes: float) -> list[Weighed]:
    """Those that leave at least `step_bytes` more free than every faster one, the fastest first."""
    front: list[Weighed] = []
    for w in sorted(weighed, key=lambda w: (w.seconds, w.memory_bytes)):
        if not front or w.memory_bytes <= front[-1].memory_bytes - step_bytes:
            front.append(w)
    return front
