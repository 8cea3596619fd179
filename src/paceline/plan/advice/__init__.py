"""Advice: one file a rule, one line of the plan each, with the numbers of the job. Imports no torch.

A rule is a module with `line(facts) -> Advice | None`; they are told in the order of `RULES`.
"""

from __future__ import annotations

from paceline.plan.advice import (
    batch_split,
    critical_batch,
    decision_tree,
    efficiency,
    learning_rate,
    one_device,
    queueing,
    regions,
    smoke_test,
)
from paceline.plan.advice.facts import Facts
from paceline.plan.advice.line import Advice

RULES = (
    one_device,
    efficiency,
    batch_split,
    critical_batch,
    decision_tree,
    queueing,
    smoke_test,
    regions,
    learning_rate,
)


def advice(facts: Facts | None) -> list[Advice]:
    """What the rules say of a job; nothing where nothing fits."""
    if facts is None:
        return []
    return [told for rule in RULES if (told := rule.line(facts)) is not None]
