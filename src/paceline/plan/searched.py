"""What a search found, as the document of `plan --json`. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from paceline.cluster.spec import Cluster
from paceline.job.load import Job
from paceline.plan.advice import advice
from paceline.plan.advice.facts import facts_of
from paceline.plan.figures import time_figures
from paceline.plan.fixed import axes, checkpoint_size, misfit
from paceline.plan.own_memory import three_figures
from paceline.plan.search import Found
from paceline.plan.traffic import traffic
from paceline.plan.weigh import Weighed

TRIAL_STEPS = 20
"""Steps of a trial: the first few begin cold, and the median of the rest settles within a few."""

UNSAID = (("parallel.recompute", "none"),)
"""What a trial's command leaves out: it is so anyhow."""

TRIED = 3
"""Layouts that a trial compares at most: a shortlist of three holds the best one nearly always (planner's own groups)."""


def found_plan(found: Found, job: Job, cluster: Cluster, words: list[str]) -> dict[str, Any]:
    """The document of a search, less its schema.

    Args:
        words: the command's words, from which those of the trials are made.
    """
    ranked = [layout_record(w, cluster) for w in found.ranked]
    chosen = ranked[0] if ranked else None
    if chosen is not None:
        per_node = min(cluster.devices_per_node, cluster.devices)
        chosen["collectives"] = traffic(found.ranked[0].resolved, per_node, cluster.measured)
    return {
        "cluster": cluster.text,
        "chosen": chosen,
        "alternatives": ranked[1:],
        "front": [_point(w) for w in found.front],
        "tied": tied(found.ranked, words),
        "rejected": [r.to_record() for r in found.rejections.listed()],
        "nearest": None if found.nearest is None else layout_record(found.nearest, cluster),
        "searched": {"layouts": found.layouts, "choices": found.choices, "predicted": found.weighed,
                     "kept": list(found.held.keys)},
        "advice": [a.to_record() for a in advice(facts_of(found, job, cluster))],
        "assumptions": assumptions(found, cluster),
        "derivations": [msgspec.structs.asdict(d) for d in found.ranked[0].resolved.derivations] if ranked else [],
    }  # fmt: skip


def layout_record(weighed: Weighed, cluster: Cluster) -> dict[str, Any]:
    """One layout with all of its figures."""
    resolved = weighed.resolved
    per_node = min(cluster.devices_per_node, resolved.layout.world_size)
    return {
        "layout": {**weighed.choice.to_record(), "accumulation": resolved.batch.accumulation},
        "keys": weighed.choice.keys(),
        "fits": resolved.fits,
        **({} if resolved.fits else {"reason": misfit(resolved)}),
        "memory": {
            "stages": [m.to_record() for m in resolved.stages],
            "heaviest": resolved.heaviest,
            **three_figures(resolved),
        },
        "memory_available_bytes": resolved.memory_available_bytes,
        "checkpoint_bytes": checkpoint_size(resolved),
        "axes": axes(resolved, per_node),
        **time_figures(weighed.step, weighed.setting, resolved.steps),
    }


def tied(ranked: tuple[Weighed, ...], words: list[str]) -> dict[str, Any] | None:
    """The layouts whose ranges overlap that of the chosen one, and the trials that tell them apart; None without any."""
    if not ranked:
        return None
    alike = [w for w in ranked[1:] if w.step.p10 <= ranked[0].step.p90]
    if not alike:
        return None
    tried = unlike([ranked[0], *alike])[:TRIED]
    return {
        "layouts": [w.choice.to_record() for w in [ranked[0], *alike]],
        "reason": "the ranges of their predictions overlap, so that they are not ranked among each other",
        "tried": [w.choice.to_record() for w in tried],
        "trials": [trial(w, words, number) for number, w in enumerate(tried, 1)],
        "seconds": [TRIAL_STEPS * w.seconds for w in tried],
    }


def unlike(weighed: Sequence[Weighed]) -> list[Weighed]:
    """The same, those first that split the model in another way than all before them: they tell most when tried."""
    seen: set[tuple[int, int, int]] = set()
    first: list[Weighed] = []
    for w in weighed:
        split = (w.choice.layout.pp, w.choice.layout.cp, w.choice.layout.tp)
        if split not in seen:
            seen.add(split)
            first.append(w)
    return [*first, *(w for w in weighed if w not in first)]


def trial(weighed: Weighed, words: list[str], number: int) -> str:
    """The command of a short run in one layout. `dp_replicate` is left to be what the other degrees leave."""
    keys = {key: value for key, value in weighed.choice.keys().items() if (key, value) not in UNSAID}
    keys.pop("parallel.dp_replicate")
    keys |= {"run.steps": TRIAL_STEPS, "run.name": f"trial-{number}"}
    kept = [w for w in words if "=" not in w or w.split("=")[0] not in {*keys, "run.tokens", "run.epochs"}]
    return shlex.join(["paceline", "train", *kept, *(f"{key}={value}" for key, value in keys.items())])


def assumptions(found: Found, cluster: Cluster) -> list[str]:
    """What the figures rest on, in words."""
    setting = (found.ranked or ([found.nearest] if found.nearest else []))[:1]
    walked = [
        f"choices within 1% of the fastest count as fast; {found.weighed} of {found.choices} were predicted, the others "
        "are slower or too large by their bounds"
    ] if found.ranked else []  # fmt: skip
    kept = [f"kept as the job sets them: {', '.join(found.held.keys)}"] if found.held.keys else []
    return [
        "memory is that of the eager decoder at the peak of a step; compiled blocks keep less",
        "run_seconds is training alone: no start, no checkpoints, no failures",
        *walked,
        *kept,
        *(setting[0].setting.assumed if setting else ()),
    ]


def _point(weighed: Weighed) -> dict[str, Any]:
    return {
        "layout": weighed.choice.to_record(),
        "step_seconds": weighed.seconds,
        "cost": None,
        "headroom_bytes": weighed.headroom_bytes,
    }
