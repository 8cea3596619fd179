"""The report as one HTML file: no network, no other file, light and dark, fit to print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.page.charts import HALF_WIDTH, Chart, Line, line_chart
from paceline.page.render import format_loss, format_rate, render_page
from paceline.report.ledger import LEDGER_PARTS
from paceline.run.files import write_atomic

PART_NAMES = {
    "compute": ("Compute", "forward and backward of the steps that count"),
    "bubble": ("Pipeline bubble", "waiting for other stages"),
    "reduce_exposed": ("Exposed reduction", "waiting for gradients that no computation hides"),
    "optimizer": ("Optimizer", "clipping and update"),
    "data_wait": ("Data wait", "waiting for the next batch"),
    "evaluation": ("Evaluation", "evaluations"),
    "checkpoint": ("Checkpoint", "saves, as far as training stood still"),
    "telemetry": ("Telemetry", "records, live line, exporters"),
    "startup": ("Start-up", "from the command to the first step"),
    "compile": ("Compilation", "what the first steps took over the usual"),
    "restart": ("Restart", "from the last sign of a broken attempt to the next"),
    "idle": ("Idle", "pauses after an attempt that ended with a verdict"),
    "redone": ("Redone", "steps that were lost and done again"),
    "other": ("Other", "what no part claims"),
    "forward": ("Forward", ""),
    "backward": ("Backward", ""),
}


def render(document: Mapping[str, Any], job_text: str = "") -> str:
    """The page of one run, from the document of `summarise`."""
    return _page("report.html", document, run=document, charts=_charts(document), job_text=job_text)


def render_comparison(documents: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """The page of several runs: their loss curves in one chart and `rows` (`label` and one text per run) as a table."""
    lines = [
        Line(run["name"], run["series"]["step"], run["series"]["loss"], f"series-{i % 6 + 1}")
        for i, run in enumerate(documents)
    ]
    chart = line_chart("Loss", lines, y_format=format_loss, y_label="nats") if lines else None
    return _page("comparison.html", documents, runs=documents, rows=rows, chart=chart)


def write_report(run_dir: Path, document: Mapping[str, Any], path: Path | None = None) -> Path:
    """Write the page of a run, to `report.html` in its directory unless told otherwise; returns where it is.

    Raises:
        DiskFull: no space.
    """
    job_file = Path(run_dir) / "job.toml"
    job_text = job_file.read_text(encoding="utf-8") if job_file.is_file() else ""
    target = path or Path(run_dir) / "report.html"
    write_atomic(target, render(document, job_text))
    return target


def _page(template: str, document: Any, **values: Any) -> str:
    shared = {"part_names": PART_NAMES, "ledger_parts": LEDGER_PARTS}
    return render_page("paceline.report", template, document, shared, **values)


def _charts(run: Mapping[str, Any]) -> list[Chart]:
    curves, evals = run["series"], run["evals"]
    bands = [(low - 0.5, high + 0.5, "redone") for low, high in _spans(run["redone_steps"])]
    rules = [(a["from_step"], f"attempt {a['attempt']}") for a in run["attempts"][1:] if a["from_step"] is not None]
    levels = []
    if run["bigram_eval_loss"] is not None:
        levels.append(("bigram model", run["bigram_eval_loss"], "level-reference"))
    lines = [Line("training loss", curves["step"], curves["loss"], "series-1")]
    if evals:
        by_step = {e["step"]: e["loss"] for e in evals}  # of a step done again, the newest
        xs, ys = list(by_step), list(by_step.values())
        lines.append(Line("evaluation loss", xs, ys, "series-2", dots=True))
    typical = [] if run["tokens_per_second"] is None else [("mean", run["tokens_per_second"], "level-reference")]
    charts = [
        line_chart("Loss", lines, y_format=format_loss, y_label="nats", levels=levels, bands=bands, rules=rules),
        line_chart(
            "Throughput",
            [Line("tokens/s", curves["step"], curves["tokens_per_second"], "series-3")],
            y_format=format_rate,
            y_label="tokens/s",
            from_zero=True,
            width=HALF_WIDTH,
            levels=typical,
            bands=bands,
            rules=rules,
        ),
        line_chart(
            "Gradient norm",
            [Line("gradient norm before clipping", curves["step"], curves["grad_norm"], "series-4")],
            y_format=lambda norm: f"{norm:.3g}",
            from_zero=True,
            width=HALF_WIDTH,
            bands=bands,
            rules=rules,
        ),
    ]
    return [chart for chart in charts if chart is not None]


def _spans(steps: list[int]) -> list[tuple[int, int]]:
    """Runs of neighbouring numbers as (first, last)."""
    spans: list[tuple[int, int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], step)
        else:
            spans.append((step, step))
    return spans
