"""`paceline bench compute`, `storage` and `loader` as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.compute import curves
from paceline.bench.loader import FIRST_STEPS, Need, measured_rate, verdicts
from paceline.cluster.measured import load_measured
from paceline.job.load import load_job
from tests.pool.launch import Completed, Launcher
from tests.pool.pool import ROOT

pytestmark = pytest.mark.limit(120)


def document(done: Completed) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["schema"] == "paceline.bench/1" and found["exit"] == done.returncode
    return found


def test_compute_gives_curves_over_size_and_type(launch: Launcher) -> None:
    short = ["--procs", "2", "--seconds", "20ms", "--iterations", "4", "--dtypes", "fp32"]
    words = ["bench", "compute", *short, "--json", "--save", "c.toml"]
    done = launch(words, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = document(done)["rows"]
    made = {(row["operation"], row["dtype"]) for row in rows}
    assert made == {("matmul", "fp32"), ("attention", "fp32"), ("copy", "bytes"), ("launch", "fp32")}
    for row in rows:
        if row["operation"] == "matmul":
            assert row["flop_per_second"] == pytest.approx(2 * row["size"] ** 3 / (row["time_us"] * 1e-6))
            # Between a small share of one core and more than any processor has.
            assert 1e8 < row["flop_per_second"] < 1e16
    compute = load_measured(launch.folder / "c.toml").compute
    assert compute is not None and [len(curve.sizes) for curve in compute.curves] == [5] * 2
    assert list(curves(rows)) == list(compute.curves)
    assert compute.memory_bytes_per_second > 1e8 and 0 < compute.launch_seconds < 0.1


def test_storage_measures_in_a_folder_of_its_own_and_removes_it(launch: Launcher) -> None:
    (launch.folder / "here").mkdir()
    (launch.folder / "here" / "mine").write_text("stays")
    small = ["bench", "storage", "--procs", "2", "--size", "16MiB", "--files", "20", "--json"]
    done = launch([*small, "--dir", "here", "--save", "c.toml"])
    assert done.returncode == 0, done.stderr
    rows = {row["operation"]: row for row in document(done)["rows"]}
    assert list(rows) == [
        "write",
        "sync",
        "durable_write",
        "read",
        "rename",
        "small_write",
        "small_list",
        "small_read",
        "small_remove",
    ]
    durable = rows["durable_write"]
    assert durable["bytes_per_second"] == pytest.approx(2 * durable["size_bytes"] / durable["seconds"])
    assert durable["seconds"] >= rows["write"]["seconds"] and durable["size_bytes"] == 16 * 2**20
    assert rows["small_write"]["operations_per_second"] == pytest.approx(40 / rows["small_write"]["seconds"])
    assert [path.name for path in (launch.folder / "here").iterdir()] == ["mine"]
    saved = load_measured(launch.folder / "c.toml").storage
    assert saved is not None and saved.place == str(launch.folder / "here") and saved.ranks == 2


def test_a_place_that_was_not_there_is_not_there_afterwards(launch: Launcher) -> None:
    words = ["bench", "storage", "run.dir=new", "--procs", "1", "--size", "8MiB", "--files", "2"]
    done = launch(words)
    assert done.returncode == 0, done.stderr
    assert "new/default/checkpoints: 1 ranks at once" in done.stdout
    assert not (launch.folder / "new").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["storage", "--dir", "file"], 78, "file is a file"),
        (["storage", "--size", "900TiB"], 79, "free, and the ranks' files need"),
        (["storage", "--dir", "s3://bucket"], 2, "no folder"),
        (["compute", "--dtypes", "fp8"], 2, "there is no type 'fp8'"),
        (["compute", "--procs", "0"], 2, "0 is too few"),
        (["loader", "missing.toml"], 78, "missing.toml"),
        (["loader", "--workers", "many"], 2, "no list of numbers"),
    ],
)
def test_bad_input_is_one_clear_line(launch: Launcher, words: list[str], code: int, says: str) -> None:
    (launch.folder / "file").write_text("")
    done = launch(["bench", *words, "--json"], timeout=30)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
    assert document(done)["error"]["message"]


def test_loader_is_held_against_what_the_devices_take(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("All happy families are alike. " * 4000)
    words = [
        "data.source=text.txt", "data.tokenizer=bytes", "data.sequence_length=64", "batch.global_batch=8",
        "data.eval_fraction=0", "--procs", "2", "--workers", "0,1", "--seconds", "300ms", "--json",
    ]  # fmt: skip
    done = launch(["bench", "loader", *words], timeout=100, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    told = document(done)
    assert [row["workers"] for row in told["rows"]] == [0, 1]
    for row in told["rows"]:
        assert row["tokens_per_second"] == pytest.approx(8 * 64 * row["steps_per_second"])
        assert row["share"] == pytest.approx(row["tokens_per_second"] / told["needed_tokens_per_second"])
    assert told["need"].startswith("the most that the devices could take")
    assert {remark["id"] for remark in told["remarks"]} <= {"starved", "fast_enough"}


def test_a_run_of_the_job_says_what_is_needed(tmp_path: Path) -> None:
    records = tmp_path / "runs/tiny/records"
    records.mkdir(parents=True)
    base = {"time": 1.0, "attempt": 1}
    started = {**base, "kind": "run_started", "step": 0, "world_size": 2}
    steps = [
        {**base, "kind": "step", "step": n, "tokens_per_second": 10.0 if n <= FIRST_STEPS else 1000.0 + n % 3}
        for n in range(1, 41)
    ]
    (records / "writer.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (started, *steps)))
    job = load_job(ROOT / "examples/tiny.toml", [f"run.dir={json.dumps(str(tmp_path / 'runs'))}"])
    need = measured_rate(job, 2)
    assert need is not None and need.measured and need.tokens_per_second == pytest.approx(1001, abs=1)
    assert measured_rate(job, 4) is None and measured_rate(load_job(None, ["run.dir=none"]), 2) is None


def test_a_loader_below_the_need_is_a_problem_where_the_need_was_measured() -> None:
    rows = [
        {"workers": 1, "tokens_per_second": 900.0, "share": 0.9},
        {"workers": 2, "tokens_per_second": 2e3, "share": 2.0},
    ]
    slow, fast = verdicts(rows, Need(1000.0, "measured in runs/tiny, on 2 ranks", True))
    assert slow.problem and "0.9 times what is needed" in slow.message and "raise data.workers" in slow.message
    assert not fast.problem and fast.id == "fast_enough"
    (at_most, _) = verdicts(rows, Need(1000.0, "the most that the devices could take", False))
    assert not at_most.problem and at_most.id == "starved"
