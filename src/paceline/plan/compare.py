"""Searches one cluster or several, and compares the best layout of each in time and money. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.cluster.spec import Cluster
from paceline.job.load import Job
from paceline.plan.priced import premiums
from paceline.plan.search import search
from paceline.plan.searched import found_plan
from paceline.plan.would_fit import would_fit

Pay = Callable[[dict[str, Any], Cluster], None]
"""Fills the costs of a document of a cluster (`plan/priced.py`)."""


def searched(job: Job, clusters: list[Cluster], words: list[str], pay: Pay | None = None) -> dict[str, Any]:
    """The document of `plan --json` for a search: that of the cluster on which the run is fastest, and under `clusters`
    the best layout of each.

    Args:
        words: of the command, for those of trials.
        pay: puts costs into each document.

    Raises:
        JobError: the job is wrong under every layout.
        UsageError: the catalogue lacks a device.
    """
    documents = [_document(job, cluster, words) for cluster in clusters]
    if pay is not None:
        for document, cluster in zip(documents, clusters, strict=True):
            pay(document, cluster)
    if len(documents) == 1:
        return documents[0]
    fitting = [d for d in documents if d["chosen"] is not None]
    first = min(fitting, key=lambda d: d["chosen"]["step_seconds"]) if fitting else documents[0]
    rows = [_row(d, c) for d, c in zip(documents, clusters, strict=True)]
    return {**first, "clusters": rows, "premiums": premiums(rows, clusters)}


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
