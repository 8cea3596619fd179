"""`paceline train` told to stop as a scheduler or a person does it: real processes, real signals."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from paceline.checkpoint.folders import list_steps
from paceline.checkpoint.places import find_one
from paceline.checkpoint.storage import open_storage
from paceline.run.records import latest_steps, read_records
from tests.cli.job import SMALL, TEXT
from tests.pool.launch import TOKEN, Completed, Launcher, Running
from tests.pool.proc import carrying, environment

WORDS = [
    "train", *SMALL, "parallel.compile=false", "parallel.precision=fp32", "model.dropout=0.1", "optimizer.schedule=constant",
    "run.log_every=1", "run.record_samples=true", "data.workers=0", 'checkpoint.allow_change=["data.workers"]',
]  # fmt: skip
ENDLESS = "run.steps=1000000"
GRACE = 30.0
"""Seconds, `recovery.grace` unless given."""
SEED = random.randrange(2**32)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def begin(launch: Launcher, *words: str, procs: int = 2) -> Running:
    """A run that has done two steps in this attempt."""
    run = launch.folder / "runs" / "default"
    first = newest(run)
    running = launch.start([*WORDS, ENDLESS, *words, "--procs", str(procs)])
    running.until(f"step {first + 2}/", timeout=60)
    return running


def newest(run: Path) -> int:
    place = run / "checkpoints"
    return max(list_steps(open_storage(place)), default=0) if place.exists() else 0


def workers(running: Running) -> list[int]:
    """Process ids by rank."""
    found = {}
    for pid in carrying(TOKEN, _token(running)):
        variables = environment(pid)
        if variables.get("PACELINE_PARENT_PID") == str(running.process.pid) and _parent(pid) == running.process.pid:
            found[int(variables["RANK"])] = pid
    return [found[rank] for rank in sorted(found)]


def _token(running: Running) -> str:
    return environment(running.process.pid)[TOKEN]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def preempted(running: Running, began: float, run: Path) -> Completed:
    """It ended with 75, in time, and what it was doing is saved."""
    done = running.wait(30)
    seconds = time.monotonic() - began
    assert done.returncode == 75, done.stderr[-3000:]
    assert seconds < GRACE and "Traceback" not in done.stderr
    finished = list(read_records(run, kinds=("run_finished",)))[-1]
    last = max(r["step"] for r in read_records(run, kinds=("step",)))
    assert finished["exit"] == 75 and finished["step"] == newest(run) == last, "steps were lost"
    return done


# R19, BL-78, BL-80
@pytest.mark.limit(240)
def test_every_way_of_stopping_saves_and_the_run_that_goes_on_is_the_undisturbed_one(
    launch: Launcher, text: Path
) -> None:
    run = text / "runs" / "default"
    running = begin(launch)
    saved = launch(["save", "runs/default", "--json"])
    assert saved.returncode == 0, saved.stderr
    step = json.loads(saved.stdout)["step"]
    assert (run / "checkpoints" / f"step-{step:08d}" / "COMMIT").exists()
    refused = launch(["save", "runs/default", "--timeout", "soon"])
    assert refused.returncode == 2
    one = workers(running)[1]
    began = time.monotonic()
    os.kill(one, signal.SIGTERM)
    assert "stopped by SIGTERM to rank 1" in preempted(running, began, run).stderr

    running = begin(launch, "data.workers=2")
    began = time.monotonic()
    for pid in carrying(TOKEN, launch.token):  # as Slurm does it: loader workers, checkpoint writer and all
        os.kill(pid, signal.SIGTERM)
    preempted(running, began, run)

    running = begin(launch, "checkpoint.every=1")
    began = time.monotonic()
    running.signal(signal.SIGUSR1)
    running.signal(signal.SIGUSR1)  # a notice may come twice
    assert "SIGUSR1: stopping 2 workers" in preempted(running, began, run).stderr

    end = newest(run) + 3
    last = launch([*WORDS, f"run.steps={end}", "--procs", "2"])
    assert last.returncode == 0, last.stderr
    straight = launch([*WORDS, f"run.steps={end}", "run.name=straight", "--procs", "2"])
    assert straight.returncode == 0, straight.stderr
    assert left(run) == left(text / "runs" / "straight")
    again = launch(["stop", "runs/default"])
    assert again.returncode == 1 and "is not live" in again.stderr and "exit code 0" in again.stderr


def left(run: Path) -> tuple[dict[int, float], dict[int, list[int]], dict[str, list[str]]]:
    """Losses and samples by step, checksums of all pieces of the final checkpoint."""
    records = list(read_records(run, kinds=("run_started", "step", "samples")))
    curve = {r["step"]: r["loss"] for r in latest_steps(records)}
    samples = {r["step"]: r["ids"] for r in records if r["kind"] == "samples"}
    assert len(samples) == len([r for r in records if r["kind"] == "samples"]), "a step was done twice"
    manifest = find_one(str(run)).manifest()
    return curve, samples, {name: [p.checksum for p in t.pieces] for name, t in manifest.tensors.items()}


@pytest.mark.limit(120)
def test_before_the_first_step_it_leaves_at_once_and_twice_leaves_at_once(launch: Launcher, text: Path) -> None:
    run = text / "runs" / "default"
    running = launch.start([*WORDS, ENDLESS, "--procs", "2"])
    running.until("cpus: ", timeout=30)
    time.sleep(1.0)  # while torch is imported, or the ranks meet
    began = time.monotonic()
    running.signal(signal.SIGTERM)
    done = running.wait(20)
    assert done.returncode == 130 and time.monotonic() - began < GRACE, done.stderr
    assert "interrupted by SIGTERM; nothing was saved" in done.stderr and "Traceback" not in done.stderr

    running = begin(launch)
    began = time.monotonic()
    told = launch(["stop", "runs/default", "--json"])
    assert told.returncode == 0, told.stderr
    answer = json.loads(told.stdout)
    done = preempted(running, began, run)
    assert (answer["run_exit"], answer["step"]) == (75, newest(run)) and "control/stop" in done.stderr
    stands = newest(run)

    # Nothing is lost where a checkpoint stands.
    running = launch.start([*WORDS, ENDLESS, "--procs", "2"])
    running.until("cpus: ", timeout=30)
    running.signal(signal.SIGTERM)
    done = running.wait(20)
    assert done.returncode == 75 and f"the checkpoint of step {stands} stands, nothing is lost" in done.stderr

    # A run that hangs while it stops.
    running = begin(launch)
    os.kill(workers(running)[1], signal.SIGSTOP)
    running.signal(signal.SIGTERM)
    running.until("once more to leave at once")
    running.signal(signal.SIGTERM)
    done = running.wait(10)
    assert done.returncode == 130 and "left at once" in done.stderr
    exits = [r["exit"] for r in read_records(run, kinds=("run_finished",))]
    assert exits == [130, 75, 75, 130]
    assert not list(read_records(run, kinds=("fault",))), "to be told to stop is no fault"

    # Nor is its grace waited for where no step can end any more: who holds it up is named.
    running = begin(launch)
    os.kill(workers(running)[1], signal.SIGSTOP)
    began = time.monotonic()
    running.signal(signal.SIGTERM)
    done = running.wait(40)
    assert done.returncode == 75 and time.monotonic() - began < GRACE - 5.0, done.stderr
    assert f"the checkpoint of step {newest(run)} stands" in done.stderr and "stopped: rank 1" in done.stderr
    (fault,) = read_records(run, kinds=("fault",))
    assert (fault["kind_of_fault"], fault["rank"]) == ("stopped", 1) and "interrupted by SIGTERM" in fault["message"]


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.limit(120)
def test_a_signal_while_a_compiler_runs_is_heard_at_once(launch: Launcher, text: Path) -> None:
    words = [word for word in WORDS if not word.startswith("parallel.compile")]
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(text / "inductor")}
    running = launch.start([*words, ENDLESS, "parallel.compile=true", "--procs", "2"], env=cache)
    deadline = time.monotonic() + 80
    while not any("cc1plus" in command for command in carrying(TOKEN, _token(running)).values()):
        assert running.process.poll() is None and time.monotonic() < deadline, running.stderr
        time.sleep(0.02)
    began = time.monotonic()
    running.signal(signal.SIGTERM)
    done = running.wait(30)
    assert done.returncode == 130 and time.monotonic() - began < 5.0, done.stderr
    assert launch.left_over() == {}


# R20
@pytest.mark.limit(90)
def test_a_grace_that_the_measured_save_does_not_fit_is_refused(launch: Launcher, text: Path) -> None:
    run = text / "runs" / "default"
    first = launch([*WORDS, "run.steps=3", "recovery.grace=1ms", "checkpoint.every=1", "--procs", "1"])
    assert first.returncode == 0, first.stderr
    assert first.stderr.count("warning: a stop signal would cost the steps since the checkpoint before") == 1
    longer = [*WORDS, "run.steps=5", "--procs", "1"]
    refused = launch([*longer, "recovery.grace=1ms", "--json"])
    assert refused.returncode == 78, refused.stderr
    error = json.loads(refused.stdout)["error"]
    assert (
        error["key"] == "recovery.grace" and error["values"]["save_seconds"] > 0 and "recovery.grace=" in error["next"]
    )
    assert newest(run) == 3 and not (run / "lease.json").exists(), "nothing was started and nothing is held"
    assert launch(longer).returncode == 0


@pytest.mark.limit(120)
@pytest.mark.parametrize("whom", ["one rank", pytest.param("torchrun", marks=pytest.mark.soak)])
def test_ranks_of_torchrun_save_together_without_a_supervisor(launch: Launcher, text: Path, whom: str) -> None:
    run = text / "runs" / "default"
    words = ["--nproc-per-node", "2", "-m", "paceline", *WORDS, ENDLESS]
    running = launch.start(words, module="torch.distributed.run")
    running.until("step 3/", timeout=60)
    ranks = {
        environment(pid)["RANK"]: pid
        for pid, command in carrying(TOKEN, launch.token).items()
        if "paceline train" in command and "RANK" in environment(pid)
    }
    os.kill(running.process.pid if whom == "torchrun" else ranks["1"], signal.SIGTERM)
    done = running.wait(40)
    assert done.returncode != 0 and "state saved" in done.stderr
    (finished,) = read_records(run, kinds=("run_finished",))
    assert finished["exit"] == 75 and finished["step"] == newest(run)
    assert not (run / "lease.json").exists()


SCRIPT = """
import json, os, signal, sys
import numpy as np, torch, torch.nn.functional as F
import paceline
from paceline.errors import Preempted

def loss(output, batch):
    return F.cross_entropy(output, batch["label"], reduction="sum"), torch.tensor(float(len(output)))

data = [{"inputs": np.full(4, i, np.float32), "label": np.int64(i % 2)} for i in range(48)]

def trainer():
    torch.manual_seed(0)
    return paceline.Trainer(torch.nn.Linear(4, 2), loss, data=data, global_batch=8, run="runs/own", workers=0)

if __name__ == "__main__":
    before = signal.getsignal(signal.SIGTERM)
    try:
        for metrics in trainer().steps(1000):
            if metrics.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
    except Preempted as error:
        assert signal.getsignal(signal.SIGTERM) == before
        print(json.dumps({"exit": error.exit_code, "step": error.values["step"], **trainer().fit(6)}))
"""


@pytest.mark.limit(90)
def test_a_signal_ends_fit_once_the_state_is_saved(launch: Launcher, text: Path) -> None:
    (text / "own_script.py").write_text(SCRIPT)
    done = launch([], module="own_script")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["exit"], answer["step"], answer["steps"]) == (75, 4, 6)
    assert [r["step"] for r in read_records(text / "runs" / "own", kinds=("step",))] == [1, 2, 3, 4, 5, 6]


def test_the_commands_say_what_is_not_there(launch: Launcher, text: Path) -> None:
    missing = launch(["stop", "runs/none", "--json"])
    assert missing.returncode == 78 and "there is no run in runs/none" in json.loads(missing.stdout)["error"]["message"]


@pytest.mark.limit(120)
def test_two_signals_at_random_moments_to_a_random_rank_lose_nothing(launch: Launcher, text: Path) -> None:
    preempt_at_random(launch, 2)


@pytest.mark.soak
@pytest.mark.limit(900)
def test_twenty_signals_at_random_moments_to_a_random_rank_lose_nothing(launch: Launcher, text: Path) -> None:
    """R19: 20 of 20 saved and out with 75 inside the grace, and the run that goes on is the undisturbed one."""
    preempt_at_random(launch, 20)
    run = text / "runs" / "default"
    end = newest(run) + 2
    assert launch([*WORDS, f"run.steps={end}", "--procs", "2"]).returncode == 0
    straight = launch([*WORDS, f"run.steps={end}", "run.name=straight", "--procs", "2"], timeout=300)
    assert straight.returncode == 0 and left(run) == left(text / "runs" / "straight")


def preempt_at_random(launch: Launcher, count: int, seed: int = SEED) -> None:
    print(f"seed {seed}")
    draw, run = random.Random(seed), launch.folder / "runs" / "default"
    slowest = 0.0
    for _ in range(count):
        running = begin(
            launch, f"checkpoint.every={draw.choice(['end', '1', '3'])}", f"data.workers={draw.choice([0, 2])}"
        )
        pids = [running.process.pid, *workers(running)]
        time.sleep(draw.uniform(0.0, 1.5))
        began = time.monotonic()
        os.kill(draw.choice(pids), draw.choice([signal.SIGTERM, signal.SIGUSR1]))
        preempted(running, began, run)
        slowest = max(slowest, time.monotonic() - began)
    print(f"{count} of {count} saved and out with 75, the slowest in {slowest:.1f} s")
