"""`make soak`: the tests that take minutes, each with its verdict and seconds, kept as a dated result.

    python -m benchmarks.soak [PYTEST WORDS ...]

The exit code is pytest's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.launch import environment
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure
from paceline.units import format_seconds

BAD = ("failure", "error")


def figures_of(report: Path) -> list[Figure]:
    """A figure for each test of a JUnit report."""
    return [_figure(case) for case in ElementTree.parse(report).iter("testcase")]


def _figure(case: ElementTree.Element) -> Figure:
    outcome = next((child for child in case if child.tag in (*BAD, "skipped")), None)
    said = "passed" if outcome is None else f"{outcome.tag}: {outcome.get('message', '')[:200]}"
    name = f"{case.get('classname', '').removeprefix('tests.')}.{case.get('name', '')}"
    return Figure(name, "passes", f"{said}, {format_seconds(float(case.get('time', 0)))}", outcome is None)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("words", nargs=argparse.REMAINDER, help="further words for pytest")
    args = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-soak-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "soak", f"--junitxml={report}", *args.words]
        code = subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode
        figures = figures_of(report) if report.exists() else []
    finish("soak", figures, {"exit": code, "words": args.words}, args, [])
    return code


if __name__ == "__main__":
    sys.exit(main())
