"""`paceline bench collectives` as a user runs it: what it prints, what it keeps, how it ends."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.measured import load_measured
from paceline.parallel.wire import bus_factor
from tests.pool.launch import Completed, Launcher, Running
from tests.pool.proc import carrying

pytestmark = pytest.mark.limit(90)

SHORT = ["--procs", "2", "--min", "1KiB", "--max", "64KiB", "--factor", "4", "--iterations", "4", "--warmup", "1"]


def bench(launch: Launcher, *words: str, timeout: float = 80.0) -> Completed:
    return launch(["bench", "collectives", *words], timeout=timeout)


def document(done: Completed) -> dict[str, Any]:
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found["schema"] == "paceline.bench/1" and found["exit"] == done.returncode
    return found


def test_rows_fits_saved_cluster_and_baseline_of_one_sweep(launch: Launcher) -> None:
    done = bench(launch, *SHORT, "--pairs", "--json", "--save", "cluster.toml", "--store", "before.json")
    assert done.returncode == 0, done.stderr
    told = document(done)
    assert told["complete"] and told["backend"] == "gloo" and len(told["ranks"]) == 2
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"]
    assert [row["collective"] for row in told["rows"]] == [kind for kind in kinds for _ in range(4)]
    for row in told["rows"]:
        assert row["wrong"] == 0 and row["tier"] == "in_node" and row["type"] == "float" and row["time_us"] > 0
        assert row["algorithm_bandwidth"] == pytest.approx(row["size_bytes"] / row["time_us"] / 1e3)
        factor = bus_factor(row["collective"], 2)
        assert row["bus_bandwidth"] == pytest.approx(factor * row["algorithm_bandwidth"])
    assert {fit["collective"] for fit in told["fits"]} == set(kinds)
    assert [(p["source"], p["target"]) for p in told["pairs"]] == [(0, 1), (1, 0)]
    remarks = {remark["id"] for remark in told["remarks"]}
    assert {"not_representative", "reduce_scatter_bytes"} <= remarks
    saved = load_measured(launch.folder / "cluster.toml")
    assert saved.collectives is not None and len(saved.collectives.fits) == 6 and saved.devices_per_node == 2
    assert "bench collectives" in saved.collectives.command

    planned = launch(["plan", "--fixed", "--cluster", "cluster.toml", "parallel.dp_shard=2", "--json"])
    chosen = json.loads(planned.stdout)["chosen"]
    assert chosen["collectives"] and all(c["seconds"] > 0 and c["tier"] == "in_node" for c in chosen["collectives"])
    _doctored(launch.folder / "before.json", 0.5, "2026-01-02")
    again = bench(launch, *SHORT, "--collectives", "all_reduce", "--baseline", "before.json")
    assert "slower than on 2026-01-02" in again.stdout and "say nothing about NCCL" in again.stdout
    assert "# Out of bounds values : 0 OK" in again.stdout
    # A slower machine is no failure of the command.
    assert again.returncode == 0


def _doctored(path: Path, factor: float, date: str) -> None:
    """A stored result as of a machine that took `factor` of the time, without spread."""
    stored = json.loads(path.read_text())
    stored["date"] = f"{date}T00:00:00+00:00"
    for row in stored["rows"]:
        row["time_us"] *= factor / 100
        row["spread"] = 0.0
    path.write_text(json.dumps(stored))


def begun(launch: Launcher, *more: str) -> Running:
    """A sweep that would take minutes, with a few rows measured."""
    running = launch.start(
        ["bench", "collectives", "--procs", "2", "--max", "1MiB", "--iterations", "400", "--seconds", "30s", *more]
    )
    running.until("[2/", timeout=60)
    return running


def test_ctrl_c_keeps_what_is_there(launch: Launcher) -> None:
    running = begun(launch, "--json", "--store", "kept.json")
    running.signal_all(signal.SIGINT)
    done = running.wait(20)
    told = document(done)
    assert done.returncode == 130 and not told["complete"] and len(told["rows"]) >= 2
    assert "rows were measured before it and are kept" in told["error"]["message"]
    assert "nothing was saved" not in done.stderr and "Traceback" not in done.stderr
    assert json.loads((launch.folder / "kept.json").read_text())["rows"] == told["rows"]


def test_a_rank_that_dies_in_the_middle_leaves_its_rows_and_is_named(launch: Launcher) -> None:
    running = begun(launch)
    os.kill(_rank(launch, 1), signal.SIGKILL)
    done = running.wait(30)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "rank 1 of 2 was ended" in done.stderr and "are kept" in done.stderr
    assert [line for line in done.stdout.splitlines() if line.strip().startswith("1024 ")]
    assert "# incomplete: " in done.stdout


def _rank(launch: Launcher, rank: int) -> int:
    """The pid of a rank of the running command."""
    for pid in carrying("PACELINE_TEST_TOKEN", launch.token):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in variables:
            return pid
    raise AssertionError(f"no rank {rank}")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["--procs", "1"], 2, "1 process: a collective needs 2"),
        (["--procs", "2", "--max", "64TiB"], 2, "64.0 TiB needs"),
        (["--collectives", "all_redcue"], 2, "there is no collective 'all_redcue'"),
        (["--max", "1KiB", "--min", "2KiB"], 2, "name no sizes"),
        (["--max", "many"], 2, "'many' is not a size"),
        (["--baseline", "missing.json"], 2, "cannot read missing.json"),
        (["--csv", "--markdown"], 2, "exclude each other"),
        (["--iterations", "0"], 2, "0 is too few"),
        (["--seconds", "0s"], 2, "measures nothing"),
    ],
)
def test_bad_input_is_one_clear_line_before_anything_starts(
    launch: Launcher, words: list[str], code: int, says: str
) -> None:
    done = bench(launch, *words, "--json", timeout=20)
    assert done.returncode == code and says in done.stderr and "Traceback" not in done.stderr
    assert says in document(done)["error"]["message"] or words[0] in str(document(done)["error"]["key"])
    assert done.seconds < 10


@pytest.mark.parametrize(
    ("text", "says"), [("{", "cut short"), ("{}", "has the schema None"), ('{"schema": "paceline.bench/2"}', "bench/2")]
)
def test_a_baseline_that_is_none_is_refused(launch: Launcher, text: str, says: str) -> None:
    (launch.folder / "old.json").write_text(text)
    done = bench(launch, "--baseline", "old.json", timeout=20)
    assert done.returncode == 2 and says in done.stderr and "old.json" in done.stderr


def test_bench_alone_and_an_unknown_measurement_say_what_there_is(launch: Launcher) -> None:
    for words in (["bench"], ["bench", "colectives"]):
        done = launch(words)
        assert done.returncode == 2
        assert all(name in done.stderr for name in ("collectives", "compute", "storage", "loader", "--help"))
