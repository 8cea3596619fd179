"""Supervisors of several nodes, here on one host: nodes go and come, and one run goes on. BL-76."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.job import SMALL, TEXT
from tests.pool.launch import TOKEN, Launcher, Running
from tests.pool.proc import carrying, environment
from tests.train.attempts import left

from paceline.checkpoint.host_save import DESERTED_SECONDS
from paceline.run.records import read_records
from paceline.train.attempts import SUSPECTED

WORDS = [
    "train", *SMALL, "parallel.compile=false", "parallel.precision=fp64", "data.workers=0", "run.log_every=1",
    "run.record_samples=true", "optimizer.schedule=constant", "checkpoint.every=5", "launch.affinity=none",
    "launch.threads=1", "--procs", "1",
]  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


class Nodes:
    """The supervisors of a run with a range of one to two nodes."""

    def __init__(self, launch: Launcher, folder: Path, nodes: str = "1:2") -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.launch, self.run = launch, folder / "runs" / "default"
        self.words = [*WORDS, f"launch.nodes={nodes}", f"launch.rendezvous=127.0.0.1:{port}"]

    def start(self, *words: str) -> Running:
        return self.launch.start([*self.words, *words, "--json"])

    def serving(self, *words: str) -> Running:
        """The first node, whose supervisor serves the place where all meet."""
        first = self.start(*words)
        first.until("is served here", timeout=60)
        return first

    def started(self) -> list[tuple[int, int]]:
        """Of each attempt the number of ranks and the step that it began after."""
        return [(r["world_size"], r["step"]) for r in read_records(self.run, kinds=("run_started",))]

    def faults(self) -> list[dict[str, Any]]:
        """Those that were acted on: a node may suspect before that its own ranks wait for somebody."""
        return [r for r in read_records(self.run, kinds=("fault",)) if not r["message"].startswith(SUSPECTED)]

    def steps_of(self, count: int, timeout: float = 60.0) -> None:
        """Wait for two steps of attempt number `count`."""
        deadline = time.monotonic() + timeout
        while True:
            done = [r["step"] for r in read_records(self.run, kinds=("step",)) if r["attempt"] >= count]
            if len(self.started()) >= count and len(done) >= 2:
                return
            assert time.monotonic() < deadline, (
                f"no attempt {count} with two steps in {timeout:.0f} s: {self.started()}"
            )
            time.sleep(0.1)


ENDS = {signal.SIGTERM: 75, signal.SIGINT: 75, signal.SIGKILL: -9}


# BL-76
@pytest.mark.limit(150)
def test_a_node_goes_by_a_drawn_signal_and_the_run_goes_on(launch: Launcher, text: Path) -> None:
    drawn = random.choice(list(ENDS))
    print(drawn)
    going_and_coming(launch, text, [drawn])


# BL-76
@pytest.mark.soak
@pytest.mark.limit(300)
def test_nodes_go_by_any_signal_and_come_back_into_one_run(launch: Launcher, text: Path) -> None:
    going_and_coming(launch, text, list(ENDS))


def going_and_coming(launch: Launcher, text: Path, signals: list[signal.Signals]) -> None:
    """A run of one to two nodes, of which the second goes by each signal and comes back in between."""
    nodes = Nodes(launch, text)
    first = nodes.serving("run.steps=1000000")
    for number in signals:
        other = nodes.start("run.steps=1000000")
        other.until("paceline: node ", timeout=60)
        count = len(nodes.started()) + 1
        nodes.steps_of(count)
        assert nodes.started()[-1][0] == 2
        other.signal(number)
        began = time.monotonic()
        assert other.wait(40).returncode == ENDS[number], other.stderr
        nodes.steps_of(count + 1)
        assert nodes.started()[-1][0] == 1 and time.monotonic() - began < 60
        assert first.process.poll() is None
    assert launch(["stop", "runs/default"], timeout=60).returncode == 0
    done = first.wait(30)
    assert done.returncode == 75, done.stderr
    # One node alone, then two by turns; what was killed and not asked is the one fault.
    worlds = [world for world, _ in nodes.started()]
    assert worlds in ([1, *[2, 1] * len(signals)], [2, 1] * len(signals))
    reasons = [r["reason"] for r in read_records(nodes.run, kinds=("restart",))]
    killed = signals.count(signal.SIGKILL)
    assert sum("left; 1 node goes on" in reason for reason in reasons) == len(signals) - killed
    assert sum(reason == "a node has come" for reason in reasons) >= len(signals) - 1
    faults = list(read_records(nodes.run, kinds=("fault",)))
    assert len(faults) == killed and launch.left_over() == {}

    end = max(r["step"] for r in read_records(nodes.run, kinds=("step",))) + 2
    last = launch([*WORDS, f"run.steps={end}", "--json"], timeout=120)
    straight = launch([*WORDS, f"run.steps={end}", "run.name=straight"], timeout=120)
    assert last.returncode == straight.returncode == 0, last.stderr + straight.stderr
    one, expected = left(nodes.run), left(text / "runs" / "straight")
    assert one.samples == expected.samples, "each sample once, in the same order"
    for step, (loss, _) in expected.curve.items():
        assert one.curve[step][0] == pytest.approx(loss, rel=1e-9)


# BL-76
@pytest.mark.limit(150)
def test_without_the_node_that_serves_the_meeting_the_rest_ends_with_the_reason(launch: Launcher, text: Path) -> None:
    nodes = Nodes(launch, text)
    first = nodes.serving("run.steps=1000000")
    other = nodes.start("run.steps=1000000")
    other.until("of 2 (", timeout=60)
    nodes.steps_of(len(nodes.started()) + 1)
    first.signal(signal.SIGKILL)
    first.wait(10)
    done = other.wait(60)
    assert done.returncode == 76, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["key"] == "launch.rendezvous" and "its node is gone" in error["message"]
    assert "Give the same command again on all nodes" in done.stderr
    assert launch.left_over() == {}


@pytest.mark.limit(120)
def test_two_nodes_make_one_run_that_ends_on_both(launch: Launcher, text: Path) -> None:
    nodes = Nodes(launch, text, "2")
    pair = [nodes.start("run.steps=8"), nodes.start("run.steps=8")]
    done = [one.wait(90) for one in pair]
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    documents = [json.loads(one.stdout) for one in done]
    assert documents[0]["steps"] == documents[1]["steps"] == 8 and documents[0]["loss"] == documents[1]["loss"]
    assert sum("report: " in one.stderr for one in done) == 1 and (nodes.run / "report.html").exists()
    straight = launch([*WORDS[:-1], "2", "run.steps=8", "run.name=straight"])
    assert straight.returncode == 0, straight.stderr
    assert left(nodes.run).tensors == left(text / "runs" / "straight").tensors, "as two ranks of one node, bit for bit"
    # A finished run is done on all of them.
    again = [one.wait(60) for one in (nodes.start("run.steps=8"), nodes.start("run.steps=8"))]
    assert [one.returncode for one in again] == [0, 0] and any("this run is done" in one.stderr for one in again)


@pytest.mark.limit(120)
def test_what_contradicts_itself_is_refused_on_all_nodes(launch: Launcher, text: Path) -> None:
    nodes = Nodes(launch, text, "2")
    pair = [nodes.start("run.steps=8"), nodes.start("run.steps=9")]
    done = [one.wait(60) for one in pair]
    assert [one.returncode for one in done] == [78, 78], done[0].stderr + done[1].stderr
    for one in done:
        error = json.loads(one.stdout)["error"]
        assert error["key"] == "run.steps" and "the nodes were told different jobs: " in error["message"]
    alone = launch([*WORDS, "launch.nodes=2", "run.steps=8", "--json"])
    assert alone.returncode == 78 and json.loads(alone.stdout)["error"]["key"] == "launch.rendezvous"
    both = launch([*nodes.words[:-4], "launch.nodes=1:2", nodes.words[-1], "run.steps=8", "--procs", "1:2", "--json"])
    assert both.returncode == 78 and "do not go together" in both.stdout
    late = launch([*nodes.words, "run.steps=8", "recovery.start_timeout=2s", "--json"])
    error = json.loads(late.stdout)["error"]
    assert late.returncode == 76 and "fewer than 2 nodes came to" in error["message"]
    nobody = launch(
        [*WORDS, "launch.nodes=2", "launch.rendezvous=192.0.2.1:29400", "recovery.start_timeout=2s", "--json"]
    )
    assert nobody.returncode == 78 and "nobody serves 192.0.2.1:29400" in nobody.stdout


# R12
@pytest.mark.limit(120)
def test_a_stopped_rank_is_named_by_its_own_node_and_told_on_all(launch: Launcher, text: Path) -> None:
    nodes = Nodes(launch, text, "2")
    first = nodes.serving("run.steps=1000000")
    other = nodes.start("run.steps=1000000")
    nodes.steps_of(1)
    control = nodes.run / "control" / "procs"
    control.parent.mkdir(exist_ok=True)
    control.write_text("3\n")
    while len(list(read_records(nodes.run, kinds=("step",)))) < 20:
        time.sleep(0.1)
    first.until("control/procs changes nothing: of several hosts each has its own 1")
    assert not control.exists() and [world for world, _ in nodes.started()] == [2]
    stop_rank_1(launch)
    began = time.monotonic()
    nodes.steps_of(2)
    print(f"on again after {time.monotonic() - began:.1f} s")
    for one in (first, other):
        one.signal(signal.SIGTERM)
    done = [one.wait(60) for one in (first, other)]
    assert [one.returncode for one in done] == [75, 75], done[0].stderr + done[1].stderr
    (fault,) = nodes.faults()
    assert (fault["kind_of_fault"], fault["rank"]) == ("stopped", 1) and "rank 1" in fault["message"]
    assert launch.left_over() == {}


def stop_rank_1(launch: Launcher) -> None:
    found = carrying(TOKEN, launch.token).items()
    (pid,) = (pid for pid, command in found if ".boot" in command and environment(pid)["RANK"] == "1")
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.limit(120)
def test_a_leader_that_is_told_to_stop_leaves_though_a_rank_elsewhere_fails_first(launch: Launcher, text: Path) -> None:
    nodes = Nodes(launch, text)
    first = nodes.serving("run.steps=1000000")
    other = nodes.start("run.steps=1000000")
    other.until("of 2 (", timeout=60)
    nodes.steps_of(len(nodes.started()) + 1)
    attempts = nodes.started()
    # No save can be agreed on any more: the verdict comes before it.
    stop_rank_1(launch)
    time.sleep(0.2)
    first.signal(signal.SIGTERM)
    done = first.wait(60)
    assert done.returncode in (75, 130) and "interrupted by SIGTERM" in done.stdout, done.stderr
    # It served the place where all meet, so the run ends on both.
    assert other.wait(60).returncode == 76
    (fault,) = nodes.faults()
    assert (fault["kind_of_fault"], fault["rank"]) == ("stopped", 1) and nodes.started() == attempts
    assert launch.left_over(DESERTED_SECONDS + 2.0) == {}


@pytest.mark.limit(90)
@pytest.mark.skipif(os.geteuid() != 0, reason="hiding a directory from one process needs root")
def test_a_run_directory_that_another_host_does_not_see_is_refused_on_both(launch: Launcher, text: Path) -> None:
    (text / "runs").mkdir()
    nodes = Nodes(launch, text, "2")
    first = nodes.serving("run.steps=8")
    hidden = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none runs && exec "$@"', "sh"]
    other = launch.start([*nodes.words, "run.steps=8", "--json"], prefix=hidden)
    done = [one.wait(60) for one in (first, other)]
    assert [one.returncode for one in done] == [78, 78], done[0].stderr + done[1].stderr
    for one in done:
        error = json.loads(one.stdout)["error"]
        assert error["key"] == "run.dir" and "node 1 (on " in error["message"]
        assert "does not see the run directory" in error["message"] and "that node 0 opened" in error["message"]
    assert launch.left_over() == {}
