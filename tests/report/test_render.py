"""The page: one file, no network, from any run however it ended."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.report.samples import lifelike_run, make_job, resumed_run, simple_run

from paceline.cli import report as command
from paceline.errors import JobError
from paceline.page.charts import Line, line_chart, ticks
from paceline.page.render import embedded_json
from paceline.report.render import render, render_comparison, write_report
from paceline.report.summary import summarise
from paceline.report.text import comparison_rows

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Every tag is closed by its own; text and the embedded data are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.data = ""
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href", "srcset")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ("path", "circle", "rect", "polyline"), tag

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"] and data.startswith("{"):
            self.data += data
        else:
            self.text.append(data)


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    assert checker.loads == []
    assert re.search(r"https?:", page) is None
    assert "@import" not in page
    assert "url(" not in page
    return checker


def test_a_finished_run(tmp_path: Path) -> None:
    lifelike_run(tmp_path / "tiny", steps=120)
    document = summarise(tmp_path / "tiny")
    path = write_report(tmp_path / "tiny", document)
    assert path == tmp_path / "tiny" / "report.html"
    page = path.read_text()
    checker = check(page)
    text = " ".join(checker.text)
    for word in ("1.813", "bigram model 2.49", "MFU convention", "Where the time went", "Exposed reduction", "Goodput",
                 "Planned and measured", "batch.microbatch", "largest divisor of 24 / 2", "rank 1 was killed",
                 "dp_replicate", "2.13.0+cpu", "examples/tiny.toml", "attempt 2"):  # fmt: skip
        assert word in text, word
    assert json.loads(checker.data) == document
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page
    assert page.count('<svg class="chart"') == 3


def test_a_crashed_run(tmp_path: Path) -> None:
    simple_run(tmp_path, finished=False)
    text = " ".join(check(render(summarise(tmp_path))).text)
    assert "crashed" in text
    assert "the last attempt ended without a verdict" in text


def test_a_resumed_run_shades_the_steps_done_again(tmp_path: Path) -> None:
    resumed_run(tmp_path)
    page = render(summarise(tmp_path))
    check(page)
    assert 'class="band"' in page
    assert "steps done again" in page


def test_a_run_without_steps(tmp_path: Path) -> None:
    make_job(tmp_path)
    page = render(summarise(tmp_path))
    check(page)
    assert '<svg class="chart"' not in page


def test_words_of_the_run_cannot_become_markup_or_addresses(tmp_path: Path) -> None:
    resumed_run(tmp_path)
    document = summarise(tmp_path)
    document["reason"] = "</script><script>alert(1)</script>"
    page = render(document)
    assert "<script>alert" not in page
    assert json.loads(check(page).data)["reason"] == document["reason"]
    assert embedded_json({"a": "https://x/</script>"}) == '{"a":"https:\\/\\/x\\/\\u003c\\/script>"}'


def test_several_runs_on_one_page(tmp_path: Path) -> None:
    simple_run(tmp_path / "one")
    resumed_run(tmp_path / "two")
    documents = [summarise(tmp_path / "one"), summarise(tmp_path / "two")]
    page = render_comparison(documents, comparison_rows(documents))
    text = " ".join(check(page).text)
    assert "one" in text
    assert "steps done again" in text
    assert page.count("<polyline") == 2


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.5, 1.0]), (1.7, 5.9, [0, 2, 4, 6]), (0, 30000, [0, 10000, 20000, 30000]), (1e-9, 2e-9, None)],
)
def test_ticks_are_round_and_cover_the_span(low: float, high: float, expected: list[float] | None) -> None:
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high * (1 - 1e-9)
    assert expected is None or found == expected


def test_charts_keep_gaps_single_points_and_flat_lines() -> None:
    gap = line_chart("t", [Line("a", [1, 2, 3, 4], [1.0, None, 2.0, 3.0])], y_format=str)
    assert gap is not None
    assert len(gap.curves[0]["paths"]) == 2  # type: ignore[arg-type]
    assert len(gap.hover) == 3
    for ys in ([2.0], [0.0, 0.0]):
        assert line_chart("t", [Line("a", range(1, len(ys) + 1), ys)], y_format=str) is not None
    assert line_chart("t", [Line("a", [1], [None])], y_format=str) is None


def test_one_wild_value_does_not_flatten_the_rest() -> None:
    ys: list[float | None] = [2.0] * 999
    ys[500] = 1e6
    chart = line_chart("t", [Line("a", range(999), ys)], y_format=str)
    assert chart is not None
    assert float(chart.y_ticks[-1][1]) < 10


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_writes_the_page_and_prints_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simple_run(tmp_path / "one")
    resumed_run(tmp_path / "two")
    assert command.run(arguments(str(tmp_path / "one"), "--json")) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["schema"] == "paceline.report/1"
    assert str(tmp_path / "one" / "report.html") in printed.err
    assert command.run(arguments(str(tmp_path / "one"), str(tmp_path / "two"), "--html", str(tmp_path / "c.html"))) == 0
    assert "tokens/s" in capsys.readouterr().out
    assert (tmp_path / "c.html").is_file()
    assert not (tmp_path / "two" / "report.html").exists()
    assert command.run(arguments(str(tmp_path / "one"), str(tmp_path / "two"), "--json")) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["one", "two"]
    with pytest.raises(JobError, match="cannot write the report"):
        command.run(arguments(str(tmp_path / "one"), "--html", str(tmp_path / "no" / "such" / "x.html")))


def test_explaining_needs_no_torch(tmp_path: Path) -> None:
    simple_run(tmp_path)
    program = (
        "import sys; from pathlib import Path; from paceline.report.summary import summarise; "
        "from paceline.report.page import write_page; "
        f"p = Path({str(tmp_path)!r}); write_page([p], [summarise(p)], None); "
        "print([m for m in ('torch', 'numpy', 'rich', 'tomlkit') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
