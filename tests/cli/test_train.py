"""`paceline train` as a user runs it: what it leaves, how it goes on, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import tomllib
from pathlib import Path

import pytest

from paceline.checkpoint.places import find_one
from paceline.report.summary import summarise
from paceline.run.control import ask_procs
from paceline.run.records import read_records
from tests.cli.job import SMALL, TEXT
from tests.pool.launch import Launcher


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def steps_of(run: Path) -> list[dict[str, object]]:
    return list(read_records(run, kinds=("step",)))


def test_ranks_walk_one_curve_from_one_set_of_weights(launch: Launcher, text: Path) -> None:
    curves, hashes = [], set()
    for procs in (1, 2, 4):
        words = ["train", *SMALL, "run.steps=12", "parallel.precision=fp32", f"run.name=p{procs}", "--json"]
        done = launch([*words, "--procs", str(procs)], timeout=90)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert summary["layout"]["dp_replicate"] == procs and summary["steps"] == 12
        run = text / "runs" / f"p{procs}"
        curves.append([float(r["loss"]) for r in steps_of(run)])  # type: ignore[arg-type]
        hashes |= {r["weights_hash"] for r in read_records(run, kinds=("run_started",))}
        assert summary["eval_loss"] is not None and summary["bigram_eval_loss"] is not None
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-5)
    assert len(hashes) == 1


def test_a_run_leaves_its_files_and_is_done_the_second_time(launch: Launcher, text: Path) -> None:
    words = ["train", *SMALL, "run.steps=6", "run.eval_every=3", "--procs", "2"]
    first = launch(words, timeout=90)
    assert first.returncode == 0, first.stderr
    run = text / "runs" / "default"
    for name in ("job.toml", "plan.json", "report.html", "checkpoints/step-00000006/COMMIT"):
        assert (run / name).exists()
    assert "http" not in (run / "report.html").read_text()
    planned = json.loads((run / "plan.json").read_text())["chosen"]
    assert planned["step_seconds"] == pytest.approx(sum(planned["step_parts"].values())) and planned["step_seconds"] > 0
    rows = {row["quantity"]: row for row in summarise(run)["predicted_measured"]}
    for name in ("step_seconds", "forward", "backward", "optimizer", "peak_memory"):
        assert rows[name]["predicted"] > 0 and rows[name]["measured"] > 0
    kinds = [r["kind"] for r in read_records(run)]
    assert kinds.count("step") == 6 and kinds.count("eval") == 2 and kinds.count("run_finished") == 1
    again = launch(words)
    assert again.returncode == 0 and "this run is done" in again.stderr
    assert len(steps_of(run)) == 6
    other = launch([*words, "optimizer.lr=0.1"])
    assert other.returncode == 78 and "optimizer.lr: 0.003 -> 0.1" in other.stderr
    beside = launch([*words, "optimizer.lr=0.1", "checkpoint.resume=never", "run.steps=2"], timeout=60)
    assert beside.returncode == 0 and (text / "runs" / "default-2").is_dir()


def test_every_rank_of_an_automatic_layout_runs_what_the_planner_chose(launch: Launcher, text: Path) -> None:
    words = ["train", *SMALL, "run.steps=2", "parallel.layout=auto", "--procs", "2"]
    done = launch(words, timeout=90)
    assert done.returncode == 0, done.stderr
    chosen = re.search(r"^layout = auto: (.*)$", done.stderr, re.M)
    assert chosen is not None
    stored = tomllib.loads((text / "runs" / "default" / "job.toml").read_text())
    for key, value in (word.split("=") for word in chosen[1].split()):
        section, name = key.split(".")
        assert str(stored[section][name]) == value, key
    assert stored["parallel"]["layout"] == "given", "the resolved job holds numbers"
    again = launch(words)
    assert again.returncode == 0 and "this run is done" in again.stderr


def test_an_automatic_layout_is_planned_anew_for_each_number_of_a_range(launch: Launcher, text: Path) -> None:
    words = ["train", *SMALL, "run.steps=1000000", "parallel.layout=auto", "run.log_every=1", "--procs", "1:2"]
    running = launch.start(words)
    running.until("step 3/", timeout=60)
    ask_procs(text / "runs" / "default", 1)
    running.until("control/procs = 1: stopping")
    running.until("attempt 2: one rank", timeout=30)
    deadline = time.monotonic() + 40
    while len(started := list(read_records(text / "runs" / "default", kinds=("run_started",)))) < 2:
        assert time.monotonic() < deadline and running.process.poll() is None, running.stderr[-3000:]
        time.sleep(0.1)
    running.signal(signal.SIGTERM)
    assert running.wait(30).returncode == 75
    assert [one["world_size"] for one in started] == [2, 1]


def test_a_held_directory_is_refused_and_ctrl_c_saves(launch: Launcher, text: Path) -> None:
    words = ["train", *SMALL, "run.steps=100000", "run.log_every=1", "--procs", "2"]
    running = launch.start(words)
    running.until("step 5/", timeout=60)
    second = launch(words)
    assert second.returncode == 74 and f"{running.process.pid}" in second.stderr
    running.signal_all(signal.SIGINT)
    done = running.wait(timeout=30)
    assert done.returncode == 75 and "Traceback" not in done.stderr and "stopped by Ctrl-C" in done.stderr
    (finished,) = read_records(text / "runs" / "default", kinds=("run_finished",))
    assert finished["exit"] == 75 and finished["step"] >= 5


def test_without_restarts_a_worker_that_dies_ends_the_run_and_the_next_start_goes_on(
    launch: Launcher, text: Path
) -> None:
    words = ["train", *SMALL, "run.steps=100000", "run.log_every=1", "recovery.max_restarts=0", "--procs", "2"]
    running = launch.start(words)
    running.until("step 5/", timeout=60)
    workers = _children(running.process.pid)
    began = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    done = running.wait(timeout=30)
    assert done.returncode == 1 and time.monotonic() - began < 15
    assert "rank 1" in done.stderr and "signal 9" in done.stderr and "Traceback" not in done.stderr
    again = launch([*words, "run.steps=8"], timeout=60)  # the length may change
    assert again.returncode == 0, again.stderr
    started = [r["attempt"] for r in read_records(text / "runs" / "default", kinds=("run_started",))]
    assert started == [1, 2]


def test_four_ranks_leave_one_run_and_say_each_line_once(launch: Launcher, text: Path) -> None:  # BL-93
    words = ["train", *SMALL, "run.steps=20", "run.eval_every=5", "telemetry.tensorboard=true", "--procs", "4"]
    done = launch(words, timeout=90)
    assert done.returncode == 0, done.stderr
    runs = list((text / "runs").iterdir())
    assert [r.name for r in runs] == ["default"]
    assert len(list((runs[0] / "tensorboard").iterdir())) == 1
    assert [r["step"] for r in steps_of(runs[0])] == list(range(1, 21))
    lines = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert len(lines) == len(set(lines)) == 5  # the first, and every fifth
    windows = list(read_records(runs[0], kinds=("window",)))
    assert {r["rank"] for r in windows} == {0, 1, 2, 3} and len(windows) == 16


def test_torchrun_s_processes_join_the_same_run(launch: Launcher, text: Path) -> None:
    words = ["--nproc-per-node", "2", "-m", "paceline", "train", *SMALL, "run.steps=3"]
    done = launch(words, module="torch.distributed.run", timeout=90)
    assert done.returncode == 0, done.stderr
    run = text / "runs" / "default"
    assert len(steps_of(run)) == 3 and (run / "report.html").exists() and (run / "plan.json").exists()


def test_generate_continues_a_text_and_data_is_inspected(launch: Launcher, text: Path) -> None:
    assert launch(["train", *SMALL, "run.steps=5", "--procs", "1"], timeout=60).returncode == 0
    words = ["generate", "runs/default", "--prompt", "the dog", "--tokens", "12", "--seed", "3"]
    first, second = launch(words, timeout=60), launch(words, timeout=60)
    assert first.returncode == 0 and first.stdout == second.stdout and first.stdout.startswith("the dog")
    saved = find_one(str(text / "runs/default"))
    piece = saved.manifest().tensors["model/embedding.weight"].pieces[0]
    shard = text / "runs/default/checkpoints" / saved.folder / piece.file
    data = bytearray(shard.read_bytes())
    data[piece.begin] ^= 1
    shard.write_bytes(data)
    damaged = launch(words, timeout=60)
    assert damaged.returncode == 77 and "damaged" in damaged.stderr
    found = json.loads(launch(["data", "inspect", *SMALL, "--json"]).stdout)
    assert found["sets"]["train"]["tokens"] > 0 and found["damage"] == []


def test_a_bpe_run_keeps_its_tokenizer(launch: Launcher, text: Path) -> None:
    words = ["train", *SMALL, "data.tokenizer=bpe:300", "run.steps=4", "--procs", "1"]
    done = launch(words, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (text / "runs/default/tokenizer.json").exists()
    assert launch(["generate", "runs/default", "--tokens", "5"], timeout=60).returncode == 0


def _children(pid: int) -> list[int]:
    """Worker processes in the order of their ranks."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return sorted(int(child) for child in text.split())
