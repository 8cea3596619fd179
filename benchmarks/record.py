"""What a program found: its figures against their targets, printed as a table and kept as JSON with commit and machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.cluster.probe import probe_host

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SCRATCH = ROOT / ".cache" / "benchmarks"
"""Where quick runs, which measure nothing, and the benchmarks' text go."""

PACKAGES = ("torch", "numpy", "accelerate", "transformers")


@dataclass(frozen=True)
class Figure:
    """One figure: what was wanted, what was measured. `reached` is None for a figure without a target."""

    name: str
    target: str
    measured: str
    reached: bool | None = None

    @property
    def verdict(self) -> str:
        return {True: "reached", False: "short", None: "-"}[self.reached]


def table(figures: Sequence[Figure]) -> str:
    """The figures as aligned columns."""
    rows = [("figure", "target", "measured", "verdict")]
    rows += [(f.name, f.target, f.measured, f.verdict) for f in figures]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def save(
    name: str,
    figures: Sequence[Figure],
    details: dict[str, Any],
    *,
    job: Sequence[str],
    quick: bool,
    output: Path | None,
) -> Path:
    """Write the result and return its path: `output`, else `<date>-<name>.json` (of a quick run: not in `results`)."""
    now = datetime.now(UTC)
    path = output or (SCRATCH if quick else RESULTS) / f"{now:%Y-%m-%d}-{name}.json"
    document = {
        "name": name,
        "date": now.isoformat(timespec="seconds"),
        "quick": quick,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "job": [word.replace(f"{ROOT}/", "") for word in job],
        "figures": [{**asdict(f), "verdict": f.verdict} for f in figures],
        "details": details,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def load_figures(path: Path) -> list[Figure]:
    """The figures of a result file."""
    rows = json.loads(path.read_text(encoding="utf-8"))["figures"]
    return [Figure(r["name"], r["target"], r["measured"], r["reached"]) for r in rows]


def commit() -> str:
    """The commit that was measured, `+changes` where the product or the benchmarks differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        return f"{head}+changes" if _git("status", "--porcelain", "--", "src", "benchmarks/*.py") else head
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> dict[str, Any]:
    """What was measured on."""
    host = probe_host()
    return {
        "processor": next((n for n in _processor_names() if n), platform.processor()),
        "cores": host.cores,
        "memory_bytes": host.memory_bytes,
        "devices": host.devices,
        "device": host.device_name,
        "compiler": host.compiler is not None,
        "system": platform.system(),
        "load_average": list(os.getloadavg()),
    }


def versions() -> dict[str, str]:
    """Python and the packages that a figure depends on."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


def _processor_names() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
