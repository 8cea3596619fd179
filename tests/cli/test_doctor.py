"""`paceline doctor` as a user runs it: exit codes, the document, snapshots, the smoke test, and what it must not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.doctor import snapshot
from paceline.doctor.variables import CAPTURED
from tests.doctor.hosts import change, h100_host, healthy_hosts, with_variables
from tests.pool.launch import Completed, Launcher

CLEAN = ("variables", "threads", "timeouts")
"""Checks that read the environment."""


def _document(ended: Completed) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(ended.stdout)
    assert document["schema"] == "paceline.doctor/1"
    return document


def test_each_wrong_variable_is_named_with_its_mend(launch: Launcher) -> None:
    env = {"NCCL_IB_DISABLE": "1", "NCCL_PROTO": "LL128", "OMP_NUM_THREADS": "64"}
    ended = launch(["doctor", "--json"], env=env, timeout=60)
    assert ended.returncode == 1
    findings = [f for f in _document(ended)["findings"] if f["id"] in CLEAN]
    mends = {f["found"].split("=")[0]: f["mend"] for f in findings}
    assert set(mends) == set(env)
    assert mends["NCCL_IB_DISABLE"] == "unset NCCL_IB_DISABLE" and mends["NCCL_PROTO"] == "unset NCCL_PROTO"
    assert "unset OMP_NUM_THREADS" in mends["OMP_NUM_THREADS"]
    assert set(findings[0]) == {"id", "severity", "host", "rank", "found", "why", "mend", "source"}


def test_a_clean_environment_names_no_variable(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(CAPTURED)]:
        monkeypatch.delenv(name)
    ended = launch(["doctor", "--json"], timeout=60)
    document = _document(ended)
    assert [f for f in document["findings"] if f["id"] in CLEAN] == []
    assert {"variables", "threads", "shared-memory", "folder-space"} <= set(document["checked"])
    assert all(entry["reason"] for entry in document["not_checked"])
    assert ended.returncode == (1 if document["findings"] else 0)


@pytest.mark.parametrize("kind", healthy_hosts())
def test_a_healthy_snapshot_has_no_finding(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot.write(healthy_hosts()[kind], tmp_path / "host.json")
    assert cli.main(["doctor", "--from", str(tmp_path / "host.json")]) == 0
    printed = capsys.readouterr().out
    assert "nothing is wrong with what was checked" in printed and "not checked:" in printed


def test_differences_between_captured_hosts_are_told_first(launch: Launcher) -> None:
    first = with_variables(h100_host("node1"), NCCL_SHM_DISABLE="1")
    second = change(h100_host("node2"), versions={**h100_host().versions, "torch": "2.12.0"})
    for host in (first, second):
        snapshot.write(host, launch.folder / f"{host.name}.json")
    ended = launch(["doctor", "--from", "node1.json", "node2.json"], timeout=30)
    assert ended.returncode == 1
    heads = [line for line in ended.stdout.splitlines() if line.startswith(("error:", "warning:"))]
    assert heads[0] == "error: variables-differ: NCCL_SHM_DISABLE is 1 on node1 and unset on node2"
    assert heads[1] == "error: versions-differ: torch is 2.13.0 on node1 and 2.12.0 on node2"
    assert heads[2] == "warning: variables on node1: NCCL_SHM_DISABLE=1"
    assert "3 findings" not in ended.stdout and "on 2 hosts" in ended.stdout


def test_a_captured_host_is_judged_like_the_one_it_was_taken_on(launch: Launcher) -> None:
    env = {"NCCL_P2P_LEVEL": "3"}
    here = launch(["doctor", "--capture", "here.json", "--json"], env=env, timeout=60)
    again = launch(["doctor", "--from", "here.json", "--json"], timeout=30)
    assert _document(here)["findings"] == _document(again)["findings"]
    assert here.returncode == again.returncode == 1


def test_a_snapshot_that_cannot_be_read_leaves_the_others(launch: Launcher) -> None:
    snapshot.write(h100_host("node1"), launch.folder / "node1.json")
    content = (launch.folder / "node1.json").read_text()
    (launch.folder / "cut.json").write_text(content[:400])
    (launch.folder / "newer.json").write_text(content.replace('"format": 1', '"format": 9'))
    ended = launch(["doctor", "--from", "node1.json", "cut.json", "newer.json", "--json"], timeout=30)
    document = _document(ended)
    assert ended.returncode == 1 and document["hosts"] == ["node1"] and len(document["checked"]) > 30
    said = {f["host"]: f["found"] for f in document["findings"]}
    assert "is cut short" in said["cut.json"]
    assert "has format 9, this program reads up to 1" in said["newer.json"]
    assert all("\n" not in text for text in said.values())


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--from", "nope.json"], 2, "--from nope.json: No such file"),
        (["--from", "node.json", "--capture", "x.json"], 2, "leave one of them out"),
        (["--from", "node.json", "--measure"], 2, "leave one of them out"),
        (["--capture", "nowhere/x.json"], 2, "--capture nowhere/x.json"),
        (["nope.toml"], 78, "no job file at nope.toml"),
        (["--procs", "0"], 2, "--procs 0 starts nothing"),
    ],
)
def test_a_wrong_command_is_one_clear_line(
    words: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    snapshot.write(h100_host(), tmp_path / "node.json")
    assert cli.main(["doctor", *words]) == code
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said


def test_the_command_imports_neither_torch_nor_what_is_slow(tmp_path: Path) -> None:
    program = (
        "import sys; from paceline import cli; cli.main(['doctor', '--json'])\n"
        "print(sorted({'torch', 'pandas'} & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
    )
    assert ended.stderr.splitlines()[-1] == "[]"


def test_a_job_that_cannot_run_here_is_a_finding_and_is_not_tried(launch: Launcher) -> None:
    ended = launch(["doctor", "batch.global_batch=7", "--procs", "2", "--json"], timeout=60)
    document = _document(ended)
    [finding] = [f for f in document["findings"] if f["id"] == "job-runs"]
    assert (
        "7 sequences do not divide over 2 data ranks" in finding["found"] and "batch.global_batch=" in finding["mend"]
    )
    assert document["smoke"] is None
    assert any(entry["id"] == "smoke" for entry in document["not_checked"])


@pytest.mark.limit(200)
def test_ranks_of_torchrun_are_judged_together_by_the_first(launch: Launcher) -> None:
    words = ["--standalone", "--nproc-per-node", "2", "-m", "paceline", "doctor", "--json"]
    ended = launch(words, module="torch.distributed.run", env={"NCCL_IB_DISABLE": "1"}, timeout=180)
    document = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith("{")))
    assert len(document["hosts"]) == 1
    found = [f for f in document["findings"] if f["id"] == "variables"]
    assert [f["rank"] for f in found] == [0], "what both ranks say alike is said once"
    assert {"versions-differ", "variables-differ", "machines-differ"} <= set(document["checked"])
    assert not [f for f in document["findings"] if f["id"].endswith("differ")]
