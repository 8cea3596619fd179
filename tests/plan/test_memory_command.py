"""What `paceline plan` says of memory: three figures beside the stages, what would fit, and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import cli

JOB = ["model.preset=llama3-8b", "batch.global_batch=64", "data.sequence_length=4096", "batch.microbatch=1"]
NODE = ["--cluster", "1x8xh100-sxm"]


def planned(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = cli.main(["plan", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("layout", [["parallel.dp_shard=8"], ["parallel.pp=8"], ["parallel.tp=8"]])
def test_three_memories_stand_beside_the_stages(layout: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, document = planned([*JOB, *layout, "--fixed", *NODE], capsys)
    memory = document["chosen"]["memory"]
    heaviest = memory["stages"][memory["heaviest"]]
    assert code == 0 and document["would_fit"] == []
    assert memory["device_bytes"] == heaviest["total_bytes"] == max(s["total_bytes"] for s in memory["stages"])
    assert memory["reserved_bytes"] == heaviest["total_bytes"] - heaviest["context_bytes"]
    assert memory["allocated_bytes"] == memory["reserved_bytes"] - heaviest["reserve_bytes"]
    assert memory["device_p10_bytes"] < memory["device_bytes"] < memory["device_p90_bytes"]
    assert 0 <= memory["oom_probability"] < 0.5


def test_a_layout_that_does_not_fit_says_what_would_make_it_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = planned([*JOB, "parallel.dp_replicate=8", "--fixed", *NODE], capsys)
    assert code == 1
    assert document["chosen"]["memory"]["oom_probability"] > 0.99
    assert any("zero_stage 3" in way and "which makes it fit" in way for way in document["would_fit"])


@pytest.mark.parametrize("more", [["--fixed", "parallel.pp=8"], []])
def test_a_picture_is_written_of_the_given_and_of_the_found_layout(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.html"
    code, document = planned([*JOB, *more, *NODE, "--picture", str(path)], capsys)
    page = path.read_text()
    assert code == 0
    embedded = json.loads(page.split('id="plan">')[1].split("</script>")[0])
    assert embedded["memory"]["device_bytes"] == document["chosen"]["memory"]["device_bytes"]
    assert embedded["step"]["seconds"] == pytest.approx(document["chosen"]["step_seconds"])


def test_a_picture_that_cannot_be_written_is_an_error_with_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere" / "plan.html"
    code = cli.main(["plan", *JOB, "parallel.dp_shard=8", "--fixed", *NODE, "--picture", str(path)])
    assert code == 78
    assert "cannot write the picture" in capsys.readouterr().err
