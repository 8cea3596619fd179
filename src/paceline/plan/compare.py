"""Searches one cluster or several, and compares the best layout of each in time and money. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from paceline.cluster.spec import Cluster
from paceline.errors import UsageError
from paceline.job.load import Job
from paceline.plan.priced import premiums
from paceline.plan.search import search
from paceline.plan.searched import found_plan
from paceline.plan.would_fit import would_fit

Pay = Callable[[dict[str, Any], Cluster], None]
"""Fills the costs of a document of a cluster (`plan/priced.py`)."""

Prefer = Literal["time", "money"]
"""What decides between clusters: the seconds of a step, or what the run costs with failures."""


def searched(
    job: Job, clusters: list[Cluster], words: list[str], pay: Pay | None = None, prefer: Prefer = "time"
) -> dict[str, Any]:
    """The document of `plan --json` for a search: that of the preferred cluster, and under `clusters` the best layout of
    each with the clusters that are `beaten_by` none, being neither slower nor dearer.

    Args:
        words: of the command, for those of trials.
        pay: puts costs into each document.
        prefer: which of several clusters is the plan's own.

    Raises:
        JobError: the job is wrong under every layout.
        UsageError: the catalogue lacks a device; or money decides and a cluster that fits has no comparable cost.
    """
    documents = [_document(job, cluster, words) for cluster in clusters]
    if pay is not None:
        for document, cluster in zip(documents, clusters, strict=True):
            pay(document, cluster)
    if len(documents) == 1:
        return documents[0]
    fitting = [d for d in documents if d["chosen"] is not None]
    rows = [_row(d, c) for d, c in zip(documents, clusters, strict=True)]
    if prefer == "money":
        _check_comparable(rows)
    first = min(fitting, key=lambda d: _weight(d["chosen"], prefer)) if fitting else documents[0]
    for row in rows:
        row["beaten_by"] = next((other["cluster"] for other in rows if _beats(other, row)), None)
    return {**first, "clusters": rows, "premiums": premiums(rows, clusters)}


def _weight(layout: dict[str, Any], prefer: Prefer) -> float:
    return float(layout["cost"]["total"] if prefer == "money" else layout["step_seconds"])


def _check_comparable(rows: list[dict[str, Any]]) -> None:
    fitting = [row for row in rows if row["fits"]]
    unknown = [row["cluster"] for row in fitting if not row["cost"]]
    currencies = sorted({row["cost"]["currency"] for row in fitting if row["cost"]})
    if unknown:
        raise UsageError(
            f"the cost of the run on {', '.join(unknown)} is not known: its length or the price of its devices is missing",
            key="--prefer",
            values={"clusters": unknown},
            hint="Give run.tokens or run.steps, and prices with --prices FILE; or --prefer time.",
        )
    if len(currencies) > 1:
        raise UsageError(
            f"costs in {' and '.join(currencies)} cannot be compared",
            key="--prefer",
            values={"currencies": currencies},
            hint="Give prices in one currency with --prices FILE.",
        )


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a cluster is at least as fast and as cheap as another, and better in one of the two."""
    if not (one["fits"] and other["fits"] and one["cost"] and other["cost"]):
        return False
    if one["cost"]["currency"] != other["cost"]["currency"]:
        return False
    mine, its = ((row["step_seconds"], row["cost"]["total"]) for row in (one, other))
    return mine[0] <= its[0] and mine[1] <= its[1] and mine != its


def _document(job: Job, cluster: Cluster, words: list[str]) -> dict[str, Any]:
    found = search(job, cluster)
    document = found_plan(found, job, cluster, words)
    ways = [] if found.ranked else would_fit(job, cluster, found.nearest)
    return {**document, "would_fit": ways}


def _row(document: dict[str, Any], cluster: Cluster) -> dict[str, Any]:
    chosen = document["chosen"] or {}
    kept = ("layout", "step_seconds", "tokens_per_second_per_device", "mfu", "run_seconds", "cost")
    return {
        "cluster": cluster.text,
        "devices": cluster.devices,
        "fits": bool(chosen),
        **{k: chosen.get(k) for k in kept},
    }
