"""No setting is accepted that has no effect: rules over what the user set, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from paceline.errors import JobError


class _Rule(NamedTuple):
    """`key` has no effect where `when(values)` holds."""

    key: str
    when: Callable[[dict[str, Any]], bool]
    reason: str
    hint: str


_RULES = (
    *(
        _Rule(
            f"optimizer.{key}",
            lambda v: v["optimizer.name"] != "adamw",
            "belongs to adamw and has no effect on {optimizer.name}",
            "Remove it, or set optimizer.name=adamw.",
        )
        for key in ("betas", "eps")
    ),
    _Rule(
        "optimizer.momentum",
        lambda v: v["optimizer.name"] != "sgd",
        "belongs to sgd and has no effect on {optimizer.name}",
        "Remove it, or set optimizer.name=sgd; adamw's first moment is betas[0].",
    ),
    _Rule(
        "optimizer.lr_reference_batch",
        lambda v: v["optimizer.lr_scaling"] == "none",
        "has no effect with lr_scaling = none",
        'Set optimizer.lr_scaling to "linear", "sqrt" or "auto", or remove it.',
    ),
    _Rule(
        "optimizer.decay_steps",
        lambda v: v["optimizer.schedule"] != "wsd",
        "has no effect on the schedule {optimizer.schedule}",
        "Remove it, or set optimizer.schedule=wsd.",
    ),
    _Rule(
        "optimizer.min_lr_ratio",
        lambda v: v["optimizer.schedule"] == "constant",
        "has no effect on a constant schedule",
        "Remove it, or choose a schedule that decays.",
    ),
    _Rule(
        "optimizer.max_bad_steps",
        lambda v: v["optimizer.bad_step"] == "stop",
        "has no effect with bad_step = stop, which ends the run at the first one",
        "Remove it, or set optimizer.bad_step=skip.",
    ),
)


def without_effect(values: Iterable[tuple[str, Any]]) -> set[str]:
    """Keys that have no effect beside the other values, whoever set them."""
    held = dict(values)
    return {rule.key for rule in _RULES if rule.when(held)}


def check_effects(values: Iterable[tuple[str, Any]], is_set: Callable[[str], bool]) -> None:
    """Refuse what the user set without effect.

    Raises:
        JobError: the first such key, with the reason.
    """
    held = dict(values)
    for rule in _RULES:
        if is_set(rule.key) and rule.when(held):
            reason = rule.reason
            for key, value in held.items():
                reason = reason.replace("{" + key + "}", str(value))
            raise JobError(reason, key=rule.key, values={rule.key: held[rule.key]}, hint=rule.hint)
