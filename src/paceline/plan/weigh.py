"""One choice, weighed exactly: the step's time from its setting, the memory from the job as it would really run."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.cluster.spec import Cluster
from paceline.config import Setting as Given
from paceline.errors import JobError
from paceline.job.load import Job
from paceline.job.resolve import Resolved, decide_compile, resolve_job
from paceline.model.flop import training_flop_per_token
from paceline.parallel.ddp.config import ddp_config
from paceline.parallel.layout import AXES, Layout
from paceline.parallel.pipeline.balance import balanced_layers, layer_costs
from paceline.parallel.pipeline.config import NO_PIPELINE, SPLIT_BACKWARD, PipelineConfig
from paceline.parallel.transforms import loss_chunk_tokens
from paceline.plan.setting import Setting, StepTime
from paceline.plan.setting_of import fewer_blocks, setting_of
from paceline.plan.space import Choice, Style
from paceline.plan.step_time import predict_step

PLANNER = "planner"
"""Where a value comes from that the planner chose."""

SEARCHED = (
    *(f"parallel.{axis}" for axis in AXES), "parallel.pp_schedule", "parallel.pp_stages_per_rank",
    "parallel.zero_stage", "parallel.recompute", "parallel.layout", "batch.microbatch",
)  # fmt: skip
"""Keys that a choice decides, so that they are taken out of a job before one is put in."""

FREE_OF_LAYOUT = ("parallel.reduce_every", "parallel.reduce_dtype", "parallel.bucket_bytes", "parallel.overlap",
                  "parallel.sequence_parallel", "parallel.cp_method", "parallel.pp_layers")  # fmt: skip
"""Keys that have no effect on one rank: left out only where the job is looked at without a layout."""


class Weighed(msgspec.Struct, frozen=True):
    """A choice with its exact figures."""

    choice: Choice
    setting: Setting
    step: StepTime
    resolved: Resolved

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def memory_bytes(self) -> int:
        return self.resolved.memory.total_bytes

    @property
    def headroom_bytes(self) -> int:
        return self.resolved.memory_available_bytes - self.memory_bytes


class Scale:
    """Weighs choices of one job on one cluster."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        self.base = resolve_job(with_keys(job, {"batch.microbatch": 1}, *FREE_OF_LAYOUT), 1, cluster.host)
        self.setting = msgspec.structs.replace(
            setting_of(self.base, cluster), nodes=cluster.nodes, devices_per_node=cluster.devices_per_node
        )
        whole = setting_of(msgspec.structs.replace(self.base, layout=_all_ranks(cluster)), cluster)
        compiled, _ = decide_compile(
            job, self.base.spec, cluster.host, _all_ranks(cluster), self.base.batch, self.base.steps, NO_PIPELINE
        )
        ddp = ddp_config(job.parallel)
        self.setting = msgspec.structs.replace(
            self.setting, link=whole.link, fabric=whole.fabric, compile=compiled, ddp=ddp,
            gradient_bytes=2 if ddp.reduce_bf16 else 0,
        )  # fmt: skip
        self._costs = layer_costs(self.base.spec, self.setting.sequence_length)
        self._cuts: dict[tuple[int, Style], PipelineConfig] = {}
        self._fewer: dict[tuple[int, Style], tuple[int, int]] = {}

    def step(self, setting: Setting) -> StepTime:
        return predict_step(setting)

    def setting_of(self, choice: Choice) -> Setting:
        """The setting of a choice, without resolving the job: a test holds it to the resolved one."""
        layout, style = choice.layout, choice.style
        spec, length = self.base.spec, self.setting.sequence_length
        sharded = layout.dp_shard > 1
        tokens = choice.microbatch * length // layout.cp
        per_rank = int(self.job.batch.global_batch) // layout.dp
        split = self.job.parallel.sequence_parallel
        divides = layout.tp > 1 and length % (layout.cp * layout.tp) == 0
        every = self.job.parallel.reduce_every
        first, last = self.fewer_blocks(layout.pp, style)
        return msgspec.structs.replace(
            self.setting, layout=layout, microbatch=choice.microbatch, accumulation=per_rank // choice.microbatch,
            recompute=choice.recompute, zero_stage=style.zero_stage, schedule=style.schedule,
            stages_per_rank=style.stages_per_rank, sequence_parallel=divides if split is None else split and layout.tp > 1,
            compile=self.setting.compile and not (layout.pp > 1 and style.schedule in SPLIT_BACKWARD),
            loss_chunk_tokens=loss_chunk_tokens(self.job.parallel, spec, tokens, self.base.host.device_kind),
            reduce_every_microbatch=sharded and layout.pp == 1
            and (style.zero_stage > 1 if every == "auto" else every == "microbatch"),
            first_layers=first, last_layers=last,
            layers=tuple(self.job.parallel.pp_layers or ()) if layout.pp > 1 else (),
        )  # fmt: skip

    def cut(self, ranks: int, style: Style) -> PipelineConfig:
        """The stages of a pipeline; cut once for each number of them."""
        key = (ranks, style)
        if key not in self._cuts:
            given, stages = self.job.parallel.pp_layers, ranks * style.stages_per_rank
            layers = balanced_layers(self._costs, stages) if given is None else tuple(given)
            self._cuts[key] = PipelineConfig(style.schedule, ranks, style.stages_per_rank, layers)
        return self._cuts[key]

    def fewer_blocks(self, ranks: int, style: Style) -> tuple[int, int]:
        """Blocks that the first and the last rank have fewer than most."""
        key = (ranks, style)
        if key not in self._fewer:
            self._fewer[key] = fewer_blocks(self.cut(ranks, style)) if ranks > 1 else (0, 0)
        return self._fewer[key]

    def resolve(self, choice: Choice, derive: bool = False) -> Resolved:
        """The job as it runs under a choice; `derive`: with the origin of each value in words.

        Raises:
            JobError: it cannot, whatever the search's own rules say.
        """
        return resolve_job(
            with_keys(self.job, choice.keys()), choice.layout.world_size, self.cluster.host,
            ranks_per_host=self.cluster.devices_per_node, derive=derive,
        )  # fmt: skip

    def weigh(self, choice: Choice, step: StepTime | None = None) -> Weighed | str:
        """The choice with its figures, or the reason for which the job refuses it."""
        try:
            resolved = self.resolve(choice)
        except JobError as error:
            return str(error).split("\n")[0]
        setting = self.setting_of(choice)
        return Weighed(choice, setting, self.step(setting) if step is None else step, resolved)


def with_keys(job: Job, keys: dict[str, Any], *without: str) -> Job:
    """The job with `section.key` values from the planner in place of all that a search decides."""
    settings = {key: given for key, given in job.settings.items() if key not in SEARCHED and key not in without}
    settings |= {key: Given(value, PLANNER) for key, value in keys.items()}
    blank = type(job.parallel)()
    cleared = {key.split(".")[1]: None for key in (*SEARCHED, *without) if key.startswith("parallel.")}
    parallel = {name: getattr(blank, name) for name in cleared} | _of(keys, "parallel")
    batch = {"microbatch": None} | _of(keys, "batch")
    return msgspec.structs.replace(
        job, settings=settings, parallel=msgspec.structs.replace(job.parallel, **parallel),
        batch=msgspec.structs.replace(job.batch, **batch),
    )  # fmt: skip


def _of(keys: dict[str, Any], section: str) -> dict[str, Any]:
    return {key.split(".")[1]: value for key, value in keys.items() if key.startswith(f"{section}.")}


def _all_ranks(cluster: Cluster) -> Layout:
    return Layout(dp_replicate=cluster.devices)


def tokens_per_second(step: StepTime, setting: Setting) -> float:
    """Of one device."""
    return setting.tokens_per_step / step.seconds / setting.layout.world_size


def mfu(step: StepTime, setting: Setting) -> float:
    """Model FLOP of a step (convention palm) over what the device's peak would do in its time."""
    flop = training_flop_per_token(setting.spec, setting.sequence_length)
    peak = setting.device.peak.get(setting.precision) or max(setting.device.peak.values())
    return tokens_per_second(step, setting) * flop / peak
