"""Do not distribute what one device does in time; and fine-tuning seldom needs more than one."""

from __future__ import annotations

from paceline.plan.advice.facts import Facts
from paceline.plan.advice.line import Advice
from paceline.units import format_bytes, format_count, format_seconds

LIMIT_SECONDS = 2 * 86400.0
"""What takes less on one device is not worth distributing: the days saved go into making it run on several."""

FROM_SCRATCH = 20
"""Tokens per parameter of a compute-optimal run from scratch (Hoffmann et al. 2022, arXiv 2203.15556); a run far below
it most likely goes on with a trained model."""

LORA_BYTES = 2
"""A frozen weight in 16 bit; adapters of rank 16 with their state are less than a hundredth of it (Hu et al. 2021,
arXiv 2106.09685)."""

SPARE = 1.25
"""Over the frozen weights: adapters, their state and the activations of one sequence."""


def line(facts: Facts) -> Advice | None:
    if facts.devices == 1:
        return None
    alone, run = facts.alone, facts.run_seconds
    steps = facts.best.resolved.steps
    if alone is not None and run is not None and steps is not None and steps * alone.seconds < LIMIT_SECONDS:
        whole = steps * alone.seconds
        return Advice(
            "one_device",
            "Do not distribute: one device trains this in less than 2 days.",
            f"{steps} steps x {format_seconds(alone.seconds)} = {format_seconds(whole)} on one device, with "
            f"{format_bytes(alone.memory_bytes)} of {format_bytes(facts.memory_bytes)}; {facts.devices} devices need "
            f"{format_seconds(run)} and {facts.devices * run / whole:.2f}x the device hours. Fine-tuning needs less still: "
            "adapters (LoRA) train a hundredth of the weights.",
            {"seconds_on_one_device": whole, "seconds": run, "devices": facts.devices, "limit_seconds": LIMIT_SECONDS},
            "the planner's step time on one device; Hu et al. 2021, arXiv 2106.09685 for LoRA",
        )
    return _adapters(facts)


def _adapters(facts: Facts) -> Advice | None:
    """Where full training needs several devices and adapters on one would do, if the run only fine-tunes."""
    needed = SPARE * LORA_BYTES * facts.parameters
    tokens = facts.tokens
    if tokens is None or tokens >= FROM_SCRATCH * facts.parameters or needed > facts.memory_bytes:
        return None
    return Advice(
        "lora",
        "If this fine-tunes a trained model, adapters (LoRA) fit on one device; train all weights only if you must.",
        f"{format_count(tokens)} tokens are {tokens / facts.parameters:.2g} per parameter, and {FROM_SCRATCH} are usual from "
        f"scratch; frozen weights of 2 bytes x {format_count(facts.parameters)} with a quarter over are "
        f"{format_bytes(needed)} of a device's {format_bytes(facts.memory_bytes)}, full training keeps "
        f"{format_bytes(facts.state_bytes)} of state.",
        {"tokens_per_parameter": tokens / facts.parameters, "lora_bytes": needed, "state_bytes": facts.state_bytes},
        "Hu et al. 2021, arXiv 2106.09685; Hoffmann et al. 2022, arXiv 2203.15556",
    )
