"""`paceline plan` as a user meets it: the document, the text, the job file, `layout = "auto"`, and what is refused."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.job.load import load_job, split_words
from paceline.job.resolve import resolve_job
from paceline.plan.text import WIDTH
from tests.plan.places import CPU

SMALL = ["model.num_layers=4", "batch.global_batch=8", "data.sequence_length=64", "run.steps=100"]
BIG = ["model.preset=llama3-8b", "batch.global_batch=64", "data.sequence_length=4096", "run.tokens=1e9"]
JOB = """\
# my job
[model]
preset = "tiny" # small

[batch]
global_batch = 24

[parallel]
layout = "auto"
compile = false
"""


def plan(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    assert main(list(words)) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_the_document_has_what_the_contract_names(capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, *SMALL, "--cluster", "1x4xh100-sxm")
    assert document["schema"] == "paceline.plan/1"
    for entry in (document["chosen"], *document["alternatives"]):
        assert entry["fits"] and entry["step_seconds"] == pytest.approx(sum(entry["step_parts"].values()))
        assert entry["step_p10_seconds"] < entry["step_seconds"] < entry["step_p90_seconds"]
        assert entry["run_seconds"] == pytest.approx(100 * entry["step_seconds"])
        assert 0 < entry["mfu"] < 1 and entry["mfu_convention"] == "palm"
        stage = entry["memory"]["stages"][entry["memory"]["heaviest"]]
        assert stage["total_bytes"] == sum(size for name, size in stage.items() if name != "total_bytes")
        rate = 8 * 64 / entry["step_seconds"] / 4
        assert entry["tokens_per_second_per_device"] == pytest.approx(rate)
    assert all({"layout", "reason", "count", "example"} <= set(r) for r in document["rejected"])
    assert document["advice"] and document["assumptions"] and document["derivations"]
    assert document["alternatives"] == sorted(document["alternatives"], key=lambda a: a["step_seconds"])


def test_layouts_whose_ranges_overlap_are_tied_and_their_trials_run_them(capsys: pytest.CaptureFixture[str]) -> None:
    tied = plan(capsys, *BIG, "--cluster", "1x8xh100-sxm")["tied"]
    assert len(tied["layouts"]) >= 2 and 2 <= len(tied["trials"]) <= 3
    assert tied["tried"][0] == tied["layouts"][0] and all(tried in tied["layouts"] for tried in tied["tried"])
    for command, layout in zip(tied["trials"], tied["tried"], strict=True):
        words = shlex.split(command)
        assert words[:2] == ["paceline", "train"]
        job = load_job(*split_words(words[2:]))
        resolved = resolve_job(job, 8, CPU)
        assert resolved.layout.to_record() == {axis: layout[axis] for axis in resolved.layout.to_record()}
        assert resolved.batch.microbatch == layout["microbatch"] and resolved.steps == 20
        assert resolved.transforms.recompute == layout["recompute"]


def test_the_text_fits_a_terminal_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *BIG, "--cluster", "2x8xh100-sxm:ndr400"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= WIDTH, max(lines, key=len)
    text = "\n".join(lines)
    for words in ("chosen: ", "rejected", "advice", "assumptions", "not ranked", "memory of a rank", "a step"):
        assert words in text


def test_several_clusters_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BIG, "--cluster", "1x8xh100-sxm", "--cluster", "2x8xa100-sxm-80g:hdr200", "--cluster", "1x1xh100-sxm"]
    document = plan(capsys, *words)
    rows = document["clusters"]
    assert [row["fits"] for row in rows] == [True, True, False]
    assert document["chosen"]["step_seconds"] == min(row["step_seconds"] for row in rows if row["fits"])
    assert main(["plan", *words]) == 0
    assert "nothing fits" in capsys.readouterr().out.splitlines()[3]


def test_money_decides_between_clusters_where_it_is_preferred(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*BIG, "run.tokens=1e11", "--cluster", "1x8xh100-sxm", "--cluster", "4x8xh100-sxm:ndr400"]
    by_time, by_money = plan(capsys, *words), plan(capsys, *words, "--prefer", "money")
    rows = {row["cluster"]: row for row in by_time["clusters"]}
    assert by_time["cluster"] == min(rows, key=lambda name: rows[name]["step_seconds"])
    assert by_money["cluster"] == min(rows, key=lambda name: rows[name]["cost"]["total"])
    assert by_money["cluster"] != by_time["cluster"]
    assert not any(row["beaten_by"] for row in rows.values())


def test_money_cannot_decide_without_a_cost(capsys: pytest.CaptureFixture[str]) -> None:
    two = ["--cluster", "1x1xcpu", "--cluster", "1x2xcpu"]
    assert main(["plan", "examples/tiny.toml", *two, "--prefer", "money"]) == 2
    assert "the cost of the run on 1x1xcpu, 1x2xcpu is not known" in capsys.readouterr().err
    assert main(["plan", *BIG, "--cluster", "1x8xh100-sxm", "--prefer", "money"]) == 2
    assert "--prefer money has no effect with one cluster" in capsys.readouterr().err


def test_what_fits_nowhere_names_the_nearest_and_the_fewest_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.preset=llama3-70b", "batch.global_batch=64", "data.sequence_length=8192"]
    document = plan(capsys, *words, "--cluster", "1x8xh100-sxm", code=1)
    assert document["chosen"] is None and document["alternatives"] == []
    nearest = document["nearest"]
    total = nearest["memory"]["stages"][nearest["memory"]["heaviest"]]["total_bytes"]
    assert not nearest["fits"] and total > nearest["memory_available_bytes"]
    nodes = int(document["would_fit"][0].split()[0])
    assert nodes > 1
    assert plan(capsys, *words, "--cluster", f"{nodes}x8xh100-sxm:ndr400")["chosen"]["fits"]
    assert plan(capsys, *words, "--cluster", f"{nodes - 1}x8xh100-sxm:ndr400", code=1)["chosen"] is None
    assert main(["plan", *words, "--cluster", "1x8xh100-sxm"]) == 1
    said = capsys.readouterr().out
    assert "no layout fits" in said and f"{nodes} nodes of 8 such devices" in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "code", "texts"),
    [
        (["--cluster", "0x8xh100-sxm"], 2, ["0 nodes of 8 devices", "--cluster 1x8xh100-sxm"]),
        (["--cluster", "2x0xh100-sxm:ndr400"], 2, ["--cluster 2x1xh100-sxm:ndr400"]),
        (["--cluster", "1x8xh100-smx"], 2, ["no device 'h100-smx'", "h100-sxm"]),
        (["--cluster", "2x8xh100-sxm:ndr40"], 2, ["no fabric 'ndr40'", "ndr400"]),
        (["--cluster", "2x8xh100-sxm:100GB"], 2, ["no fabric '100GB'"]),
        (["--cluster", "1x8xh100-sxm", "--write"], 2, ["--write", "JOB.toml"]),
        (["--cluster", "1x8xh100-sxm", "--fixed", "--write"], 2, ["--fixed has no effect"]),
        (["--cluster", "1x8xh100-sxm", "batch.microbatch=5"], 78, ["no layout of 8 ranks", "batch.microbatch"]),
        (["--cluster", "1x8xh100-sxm", "run.tokens=2GiB"], 78, ["run.tokens", "2GiB"]),
        (
            ["--cluster", "1x7xh100-sxm", "batch.global_batch=8", "model.num_layers=4", "data.sequence_length=64"],
            78,
            ["8 sequences do not divide", "batch.global_batch=7 or 14"],
        ),
    ],
)
def test_bad_input_is_one_message_with_what_would_work(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, texts: list[str]
) -> None:
    said = refused(capsys, code, "plan", *words)
    assert len(said.splitlines()) <= 3
    for text in texts:
        assert text in said


def test_write_puts_the_layout_into_the_file_and_keeps_its_comments(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    document = plan(capsys, str(path), "--cluster", "1x4xh100-sxm", "--write")
    text = path.read_text()
    assert "# my job" in text and "# small" in text and 'layout = "given"' in text
    resolved = resolve_job(load_job(path), 4, CPU)
    chosen = document["chosen"]["layout"]
    assert resolved.layout.to_record() == {axis: chosen[axis] for axis in resolved.layout.to_record()}
    assert resolved.batch.microbatch == chosen["microbatch"]
    again = plan(capsys, str(path), "--cluster", "1x4xh100-sxm")
    assert again["chosen"]["layout"] == chosen and "parallel.dp_replicate" in again["searched"]["kept"]


def test_write_refuses_a_file_that_is_read_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    # Root may write what is read-only, so that the question is answered here.
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "it is read-only" in refused(capsys, 78, "plan", str(path), "--cluster", "1x4xh100-sxm", "--write")
    assert path.read_text() == JOB


def test_an_automatic_layout_is_the_planners_and_a_set_degree_wins(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    document = plan(capsys, "job.toml", "--cluster", "here", "--procs", "2")
    assert main(["train", "job.toml", "--procs", "2", "--explain", "--json"]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    chosen = document["chosen"]["layout"]
    assert {axis: job[f"parallel.{axis}"]["value"] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")} == {
        axis: chosen[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    }
    assert job["parallel.layout"]["value"] == "given", "the resolved job holds numbers"
    # Several hosts are planned as several like this one.
    wide = plan(capsys, "job.toml", "--procs", "2", "launch.nodes=2", "launch.rendezvous=node0:29400")["chosen"][
        "layout"
    ]
    assert math.prod(wide[axis] for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp")) == 4
    assert main(["train", "job.toml", "parallel.tp=2", "--procs", "2", "--explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["parallel.tp"]["value"] == 2
