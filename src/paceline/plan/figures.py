"""The predicted figures of one layout as `plan --json` names them. No torch."""

from __future__ import annotations

from typing import Any

from paceline.cluster.spec import Cluster
from paceline.job.resolve import Resolved
from paceline.plan.fixed import NOT_MODELLED, fixed_plan
from paceline.plan.memory_change import words_of_changes
from paceline.plan.setting import Setting, StepTime
from paceline.plan.setting_of import setting_of
from paceline.plan.step_time import predict_step
from paceline.plan.weigh import mfu, tokens_per_second

MFU_CONVENTION = "palm"
"""Model FLOP of an MFU, as runs record theirs: attention as if every token saw every other."""


def time_figures(step: StepTime, setting: Setting, steps: int | None) -> dict[str, Any]:
    """Step, rate, MFU and run of a prediction. `run_seconds` is training alone: no start, no checkpoints, no failures."""
    return {
        "step_seconds": step.seconds,
        "step_p10_seconds": step.p10,
        "step_p90_seconds": step.p90,
        "step_parts": step.parts,
        "step_detail": step.detail,
        "tokens_per_second_per_device": tokens_per_second(step, setting),
        "mfu": mfu(step, setting),
        "mfu_convention": MFU_CONVENTION,
        "run_seconds": None if steps is None else steps * step.seconds,
        "cost": None,
    }


def predicted(resolved: Resolved, cluster: Cluster) -> dict[str, Any]:
    """What the given layout of a job is predicted to do, with what was assumed of the cluster under `assumed`.

    Raises:
        UsageError: the catalogue lacks the device.
    """
    setting = setting_of(resolved, cluster)
    return {**time_figures(predict_step(setting), setting, resolved.steps), "assumed": list(setting.assumed)}


def fixed_with_time(resolved: Resolved, cluster: Cluster) -> dict[str, Any]:
    """The document of `plan --fixed --json`, less its schema: `fixed_plan` with the predicted time.

    Raises:
        UsageError: the catalogue lacks the device.
    """
    document = fixed_plan(resolved, cluster.text, cluster.devices_per_node, cluster.measured)
    figures = predicted(resolved, cluster)
    assumed = figures.pop("assumed")
    ways = [] if resolved.fits else words_of_changes(setting_of(resolved, cluster))
    kept = [told for told in document["assumptions"] if told != NOT_MODELLED]
    return {
        **document,
        "chosen": {**document["chosen"], **figures},
        "would_fit": ways,
        "assumptions": list(dict.fromkeys([*kept, *assumed])),
    }
