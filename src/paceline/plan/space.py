"""What is searched: every layout of a number of ranks, and every way to run each. Imports no torch and no numpy.

A layout is refused by the same rules that refuse a job (`tensor.config`, `context.config`, `pipeline.rules`); they stand
here once more as plain conditions, since a search asks them many thousand times, and a test holds both together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from paceline.job.load import Job
from paceline.model.flop import Recompute
from paceline.model.spec import ModelSpec
from paceline.parallel.layout import AXES, Layout
from paceline.parallel.pipeline.config import DEFAULT_SCHEDULE, SPLIT_BACKWARD, ScheduleName
from paceline.parallel.tensor.config import degrees_that_work

MAX_STAGES_PER_RANK = 8
"""More stages a rank than this are not tried: what each saves of the bubble falls with their square, and every one more
sends each micro-batch around all ranks once more."""

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


DEPENDENT = (
    "sequence_parallel",
    "cp_method",
    "reduce_every",
    "reduce_dtype",
    "bucket_bytes",
    "overlap",
    "parameter_dtype",
)
"""Settings that have an effect under some layouts only."""


class Style(NamedTuple):
    """How a layout runs: its schedule, stages of each rank, and stage of sharding (0: nothing is sharded)."""

    schedule: ScheduleName
    stages_per_rank: int
    zero_stage: int


class Choice(NamedTuple):
    """Everything that a search decides about a job."""

    layout: Layout
    style: Style
    microbatch: int
    recompute: Recompute

    def keys(self) -> dict[str, Any]:
        """The `section.key` values that make a job run so; only those that have an effect."""
        layout, style = self.layout, self.style
        found: dict[str, Any] = {
            f"parallel.{a}": d for a, d in layout.degrees().items() if d > 1 or a == "dp_replicate"
        }
        if layout.pp > 1:
            found["parallel.pp_schedule"] = style.schedule
            found["parallel.pp_stages_per_rank"] = style.stages_per_rank
        elif layout.dp_shard > 1:
            found["parallel.zero_stage"] = style.zero_stage
        return found | {"parallel.recompute": self.recompute, "batch.microbatch": self.microbatch}

    def to_record(self) -> dict[str, Any]:
        """The choice as `plan --json` shows it; None for what does not apply."""
        pipelined = self.layout.pp > 1
        return {
            **self.layout.to_record(),
            "pp_schedule": self.style.schedule if pipelined else None,
            "pp_stages_per_rank": self.style.stages_per_rank if pipelined else None,
            "zero_stage": self.style.zero_stage or None,
            "recompute": self.recompute,
            "microbatch": self.microbatch,
        }

    def __str__(self) -> str:
        parts = [str(self.layout)]
        if self.layout.pp > 1:
            per_rank = self.style.stages_per_rank
            parts.append(self.style.schedule + (f" x{per_rank}" if per_rank > 1 else ""))
        elif self.layout.dp_shard > 1:
            parts.append(f"zero {self.style.zero_stage}")
        parts.append(f"microbatch {self.microbatch}")
        return ", ".join(parts if self.recompute == "none" else [*parts, f"recompute {self.recompute}"])


class Held(msgspec.Struct, frozen=True):
    """What the user set and a search keeps; None where it is free. `keys` are the job's keys, for the text; `given` are
    settings that no choice decides and that some layouts would leave without effect."""

    degrees: dict[str, int]
    schedule: str | None = None
    stages_per_rank: int | None = None
    zero_stage: int | None = None
    recompute: str | None = None
    microbatch: int | None = None
    num_stages: int | None = None
    whole_backward: bool = False
    given: dict[str, Any] = {}
    keys: tuple[str, ...] = ()


def held_by(job: Job) -> Held:
    """What a job fixes. A degree of -1 is free; blocks per stage that were set fix the number of stages."""
    parallel = job.parallel
    degrees = {a: int(getattr(parallel, a)) for a in AXES if job.is_set(f"parallel.{a}") and getattr(parallel, a) != -1}
    keys = [f"parallel.{axis}" for axis in degrees]

    def value(key: str, section: Any = parallel) -> Any:
        dotted = f"{'batch' if section is job.batch else 'parallel'}.{key}"
        found = getattr(section, key) if job.is_set(dotted) else None
        keys.extend([dotted] if found is not None else [])
        return found

    microbatch = value("microbatch", job.batch)
    return Held(
        degrees=degrees, schedule=value("pp_schedule"), stages_per_rank=value("pp_stages_per_rank"),
        zero_stage=value("zero_stage"), recompute=value("recompute"),
        microbatch=None if microbatch is None else int(microbatch),
        num_stages=None if (layers := value("pp_layers")) is None else len(layers),
        whole_backward=bool(parallel.compile) or parallel.parameter_dtype == "bf16", keys=tuple(keys),
        given={key: getattr(parallel, key) for key in DEPENDENT
               if job.is_set(f"parallel.{key}") and getattr(parallel, key) not in (None, "auto")},
    )  # fmt: skip


class Limits(msgspec.Struct, frozen=True):
    """What the rules of layouts ask of a model and a batch."""

    num_layers: int
    sequence_length: int
    global_batch: int
    tp_degrees: frozenset[int]
    exchanged_heads: tuple[int, int] | None = None

    @classmethod
    def of(cls, spec: ModelSpec, job: Job) -> Limits:
        heads = (spec.num_heads, spec.num_kv_heads) if job.parallel.cp_method == "alltoall" else None
        return cls(
            spec.num_layers,
            job.data.sequence_length,
            int(job.batch.global_batch),
            frozenset(degrees_that_work(spec)),
            heads,
        )


def layouts(world_size: int) -> Iterator[Layout]:
    """Every layout of `world_size` ranks."""
    for pp in divisors(world_size):
        for tp in divisors(world_size // pp):
            for cp in divisors(world_size // (pp * tp)):
                data = world_size // (pp * tp * cp)
                for dp_shard in divisors(data):
                    yield Layout(data // dp_shard, dp_shard, cp, tp, pp)


def fault(layout: Layout, limits: Limits, held: Held) -> str | None:
    """The rule that refuses a layout, in words without this layout's numbers; None where none does."""
    for axis, degree in held.degrees.items():
        if getattr(layout, axis) != degree:
            return f"the job sets parallel.{axis} = {degree}"
    idle = without_effect(layout, held.given)
    if idle is not None:
        return f"parallel.{idle} is set and has no effect, or no sense, in it"
    if layout.tp not in limits.tp_degrees:
        return "tp does not split the heads, the feed-forward layer or the vocabulary of this model"
    if layout.pp > limits.num_layers:
        return f"more stages than the model's {limits.num_layers} blocks"
    if layout.cp > 1 and limits.sequence_length % (2 * layout.cp):
        return f"a sequence of {limits.sequence_length} tokens does not divide into 2 x cp chunks"
    if layout.cp > 1 and limits.exchanged_heads is not None and not _handed_out(layout, limits.exchanged_heads):
        return "cp_method = alltoall cannot hand the heads out to cp ranks"
    if limits.global_batch % layout.dp:
        return f"{limits.global_batch} sequences do not divide over the data ranks"
    return None


def without_effect(layout: Layout, given: dict[str, Any]) -> str | None:
    """The setting that a layout leaves without effect, by the rules of `job.checks` and of the strategies."""
    sharded, piped = layout.dp_shard > 1, layout.pp > 1
    alone = layout.dp * layout.cp == 1
    rules = {
        "sequence_parallel": layout.tp == 1,
        "cp_method": layout.cp == 1,
        "reduce_every": alone or (given.get("reduce_every") == "microbatch" and (piped or not sharded)),
        "reduce_dtype": alone,
        "bucket_bytes": alone or sharded,
        "overlap": alone or sharded or (piped and bool(given.get("overlap"))),
        "parameter_dtype": sharded and given.get("parameter_dtype") == "bf16",
    }
    return next((key for key in given if rules[key]), None)


def _handed_out(layout: Layout, heads: tuple[int, int]) -> bool:
    queries, pairs = heads[0] // layout.tp, max(1, heads[1] // layout.tp)
    return queries % layout.cp == 0 and (pairs % layout.cp == 0 or layout.cp % pairs == 0)


def styles(layout: Layout, limits: Limits, held: Held) -> list[Style]:
    """The ways to run a layout that its rules and the user's settings allow."""
    if layout.pp == 1:
        stages = (1, 2, 3) if layout.dp_shard > 1 else (0,)
        kept = [s for s in stages if held.zero_stage in (None, s)]
        return (
            [Style(DEFAULT_SCHEDULE, 1, s) for s in kept] if held.schedule is None and held.num_stages is None else []
        )
    sharded = 1 if layout.dp_shard > 1 else 0
    if held.zero_stage not in (None, sharded):
        return []
    most = min(MAX_STAGES_PER_RANK, limits.num_layers // layout.pp)
    found: list[tuple[ScheduleName, int]] = [("1f1b", 1), ("gpipe", 1)]
    found += [("interleaved-1f1b", n) for n in range(2, most + 1)]
    if not held.whole_backward:
        found += [("zero-bubble", n) for n in range(1, most + 1)] + ([("zbv", 2)] if most > 1 else [])
    return [
        Style(name, n, sharded)
        for name, n in found
        if held.schedule in (None, name)
        and held.stages_per_rank in (None, n)
        and held.num_stages in (None, n * layout.pp)
    ]  # fmt: skip


def recomputes(style: Style, pipelined: bool, held: Held) -> tuple[Recompute, ...]:
    """Recomputations that a style takes: a backward in two parts would compute everything anew in each."""
    found: tuple[Recompute, ...] = ("none",) if pipelined and style.schedule in SPLIT_BACKWARD else RECOMPUTE
    return tuple(r for r in found if held.recompute in (None, r))


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
