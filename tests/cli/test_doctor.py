"""`paceline doctor` as a user runs it: exit codes, the document, snapshots, the smoke test, and what it must not import."""

from __future__ import annotations

import json
import os
import socket
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

CLEAN = ("variables", "variables-unknown", "threads", "timeouts")
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _host_named(name: str) -> list[str]:
    """A prefix that runs a command under another host name, in a namespace of its own."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]


CAN_RENAME = (
    sys.platform == "linux" and subprocess.run([*_host_named("x"), "true"], capture_output=True).returncode == 0
)


# BL-71: a host whose name its peers cannot resolve.
@pytest.mark.skipif(not CAN_RENAME, reason="a host name of one's own takes a namespace, which this user may not make")
@pytest.mark.limit(150)
def test_hosts_that_a_launcher_started_are_judged_together_by_the_first(launch: Launcher) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    own = [{"NCCL_ALGO": "ring"}, {}]
    ranks = [
        launch.start(
            ["doctor", "--json", "--capture", "%h.json"],
            env={**meeting, **own[n], "RANK": str(n), "LOCAL_RANK": "0", "GROUP_RANK": str(n)},
            prefix=_host_named(f"no-such-host-{n}"),
        )
        for n in range(2)
    ]
    first, second = (rank.wait(120) for rank in ranks)
    assert (first.returncode, second.returncode, second.stdout) == (1, 0, ""), first.stderr + second.stderr
    document = _document(first)
    assert document["hosts"] == ["no-such-host-0", "no-such-host-1"]
    assert document["findings"][0]["found"].startswith(
        "NCCL_ALGO is ring on no-such-host-0 and unset on no-such-host-1"
    )
    found = {(f["id"], f["host"]): f for f in document["findings"]}
    for n in range(2):
        peer = found["peers", f"no-such-host-{n}"]
        assert f"cannot resolve no-such-host-{1 - n}" in peer["found"] and "MASTER_ADDR" in peer["mend"]
        assert peer["rank"] == n
        assert (launch.folder / f"no-such-host-{n}.json").exists()
    assert {"clocks-differ", "versions-differ", "networks-differ"} <= set(document["checked"])
    assert not {"clocks-differ", "versions-differ", "networks-differ"} & {f["id"] for f in document["findings"]}
