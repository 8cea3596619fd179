"""How well predictions rank runs that differ only in their layout. Imports no torch.

Rank correlation is Spearman's. The regret of the first k is what it costs to run the best of the planner's first k
layouts and not the best of all: its measured seconds over the least, less 1.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

ENOUGH = 4
"""Layouts from which on a group has a rank correlation."""


def group_records(members: Sequence[tuple[str, str]], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Groups of two runs and more, and what they come to.

    Args:
        members: the group and the id of each run. rows: of predicted runs, by id.
    """
    by_group: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for group, name in members:
        if name in rows:
            by_group[group].append(rows[name])
    found = [_record(group, rows) for group, rows in by_group.items() if len(rows) > 1]
    correlations = [record["rank_correlation"] for record in found if record["rank_correlation"] is not None]
    regrets = {k: [record[f"top{k}_regret"] for record in found if record["layouts"] >= ENOUGH] for k in (1, 3)}
    return {
        "each": found,
        "layouts_from": ENOUGH,
        "groups": len(correlations),
        "median_rank_correlation": statistics.median(correlations) if correlations else None,
        "mean_rank_correlation": statistics.fmean(correlations) if correlations else None,
        "top1_regret_mean": statistics.fmean(regrets[1]) if regrets[1] else None,
        "top1_regret_max": max(regrets[1], default=None),
        "top3_regret_mean": statistics.fmean(regrets[3]) if regrets[3] else None,
        "top3_regret_max": max(regrets[3], default=None),
    }


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's; equal values share the mean of their ranks. None where one of both does not vary."""
    a, b = _ranks(first), _ranks(second)
    if len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return statistics.correlation(a, b)


def regret(predicted: Sequence[float], measured: Sequence[float], first: int) -> float:
    """What the best of the first so many by prediction costs over the best of all."""
    chosen = sorted(range(len(predicted)), key=lambda i: predicted[i])[:first]
    return min(measured[i] for i in chosen) / min(measured) - 1


def _record(group: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    predicted, measured = [row["predicted"] for row in rows], [row["measured"] for row in rows]
    return {
        "group": group,
        "runs": [row["id"] for row in rows],
        "layouts": len(rows),
        "rank_correlation": rank_correlation(predicted, measured) if len(rows) >= ENOUGH else None,
        "top1_regret": regret(predicted, measured, 1),
        "top3_regret": regret(predicted, measured, 3),
        "spread": max(measured) / min(measured),
    }


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for i in order[at : end + 1]:
            ranks[i] = (at + end) / 2
        at = end + 1
    return ranks
