"""The document of `paceline report --json`, of runs that ended well, badly, or not at all."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.report.samples import lifelike_run, make_job, resumed_run, simple_run
from tests.run.samples import started, step

from paceline.errors import JobError
from paceline.report.summary import series, summarise
from paceline.report.text import compare, describe
from paceline.run.directory import RunDirectory
from paceline.run.records import RecordWriter, Summary, Window


def test_the_document_has_what_the_contract_names(tmp_path: Path) -> None:
    simple_run(tmp_path / "simple")
    run = summarise(tmp_path / "simple")
    assert json.loads(json.dumps(run, allow_nan=False)) == run
    assert run["schema"] == "paceline.report/1"
    assert {"goodput", "ledger", "step_parts", "predicted_measured", "stragglers", "faults", "checkpoints"} <= set(run)
    assert (run["state"], run["exit"], run["steps"], run["tokens"]) == ("done", 0, 10, 30720)
    assert (run["loss"], run["eval_loss"], run["bigram_eval_loss"]) == (4.9, 2.0, 2.49)
    assert run["tokens_per_second"] == pytest.approx(30720)
    assert run["mfu"] == pytest.approx(0.4)
    save = run["checkpoints"][0]
    assert len(run["checkpoints"]) == 1
    assert (save["state"], save["bytes"], save["blocked_seconds"], save["durable_seconds"]) == (
        "durable",
        1000,
        0.5,
        0.5,
    )


def test_step_parts_leave_out_the_first_steps_and_add_up(tmp_path: Path) -> None:
    simple_run(tmp_path)
    parts = summarise(tmp_path)["step_parts"]
    assert parts["backward"]["median_seconds"] == pytest.approx(0.04)
    assert parts["step"]["median_seconds"] == pytest.approx(0.1)
    assert sum(row["share"] for name, row in parts.items() if name != "step") == pytest.approx(1.0)


def test_the_slowest_rank_is_named(tmp_path: Path) -> None:
    lifelike_run(tmp_path, steps=60)
    rows = {row["part"]: row for row in summarise(tmp_path)["rank_parts"]}
    assert rows["data_wait"]["rank"] == 1
    assert rows["data_wait"]["mean_seconds"] > 1.04 * rows["data_wait"]["median_rank_seconds"]


def test_what_a_rank_waits_for_others_does_not_make_it_the_slowest(tmp_path: Path) -> None:
    with RecordWriter(tmp_path, 1) as writer:
        writer.write(started())
        for number in range(1, 5):
            writer.write(step(number))
        for rank, forward, waits in ((0, 0.060, 0.0), (1, 0.061, 0.04)):
            whole, own, wait = (Summary(4, 4 * s, s, s, 1) for s in (forward, forward - waits, 0.01 * rank))
            parts, less = (
                {"forward": whole, "reduce_exposed": wait},
                {"forward": own, "reduce_exposed": Summary(4, 0, 0, 0, 1)},
            )
            writer.write(Window(step=4, first_step=1, rank=rank, parts=parts, own=less))
    rows = {row["part"]: row for row in summarise(tmp_path)["rank_parts"]}
    assert (rows["forward"]["rank"], rows["forward"]["mean_seconds"]) == (0, pytest.approx(0.06))
    assert (rows["reduce_exposed"]["rank"], rows["reduce_exposed"]["mean_seconds"]) == (1, pytest.approx(0.01))


def test_planned_stands_beside_measured(tmp_path: Path) -> None:
    lifelike_run(tmp_path, steps=60)
    rows = {row["quantity"]: row for row in summarise(tmp_path)["predicted_measured"]}
    planned = 2 * 3_571_712 + 7_143_424 + 201_326_592 + 24_000_000 + 160_000_000
    assert rows["peak_memory"]["predicted"] == planned
    assert rows["peak_memory"]["measured"] == 412_000_000
    assert rows["peak_memory"]["relative_error"] == pytest.approx((planned - 412_000_000) / 412_000_000)
    assert rows["activations"]["part_of"] == "peak_memory"
    assert rows["step_seconds"]["predicted"] == 0.13
    assert rows["step_seconds"]["relative_error"] == pytest.approx(-0.04, abs=0.03)


def test_the_parts_of_a_step_stand_below_it_as_predicted_and_as_measured(tmp_path: Path) -> None:
    lifelike_run(tmp_path, steps=60)
    planned = {"forward": 0.04, "backward": 0.08, "bubble": 0.0, "optimizer": 0.01}
    (tmp_path / "plan.json").write_text(json.dumps({"chosen": {"step_seconds": 0.13, "step_parts": planned}}))
    run = summarise(tmp_path)
    rows = {r["quantity"]: r for r in run["predicted_measured"] if r["part_of"] == "step_seconds"}
    assert rows["forward"]["predicted"] == 0.04 and rows["backward"]["predicted"] == 0.08
    for name, row in rows.items():
        assert row["measured"] == run["step_parts"][name]["median_seconds"] and row["unit"] == "seconds"
    assert "bubble" not in rows, "what is neither predicted nor seen is left out"
    assert rows["data_wait"]["predicted"] is None and rows["data_wait"]["measured"] > 0
    order = [r["quantity"] for r in run["predicted_measured"]]
    assert order.index("step_seconds") < order.index("forward") < order.index("backward")


def test_memory_is_taken_from_the_plan_where_the_run_holds_none(tmp_path: Path) -> None:
    simple_run(tmp_path)
    stages = [{"parameters_bytes": 1, "total_bytes": 1}, {"parameters_bytes": 7, "total_bytes": 9}]
    plan = {"chosen": {"memory": {"stages": stages, "heaviest": 1}}}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    row = summarise(tmp_path)["predicted_measured"][0]
    assert (row["quantity"], row["predicted"], row["measured"]) == ("peak_memory", 9, 310_000_000)
    (tmp_path / "plan.json").write_text("{")
    assert summarise(tmp_path)["predicted_measured"][0]["predicted"] is None


def test_attempts_faults_and_steps_done_again(tmp_path: Path) -> None:
    resumed_run(tmp_path)
    run = summarise(tmp_path)
    assert run["redone_steps"] == [11, 12]
    assert run["series"]["step"] == list(range(1, 21))
    assert run["series"]["attempt"] == [1] * 10 + [2] * 10
    assert [a["reason"] for a in run["attempts"]] == [None, "all 20 steps done"]
    assert run["attempts"][1]["start_seconds"] == pytest.approx(1 + 1.2 + 4, abs=1e-5)
    assert run["faults"][0]["rank"] == 1
    assert run["changes"][0]["key"] == "parallel.dp_replicate"
    assert run["loss"] == pytest.approx(4.8)


def test_a_crashed_run_is_told_from_a_running_one(tmp_path: Path) -> None:
    simple_run(tmp_path, finished=False)
    assert summarise(tmp_path)["state"] == "crashed"
    with RunDirectory.open(tmp_path, "", {}, lambda key: True):
        assert summarise(tmp_path)["state"] == "running"


def test_a_run_that_never_took_a_step(tmp_path: Path) -> None:
    make_job(tmp_path)
    assert summarise(tmp_path)["state"] == "not started"
    describe(summarise(tmp_path))
    with RecordWriter(tmp_path, 1) as writer:
        writer.write(started())
    run = summarise(tmp_path)
    assert (run["state"], run["steps"], run["loss"], run["mfu"]) == ("crashed", 0, None, None)
    describe(run)


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    make_job(tmp_path)
    with RecordWriter(tmp_path, 1) as writer:
        writer.write(started())
        writer.write(step(1, loss=math.nan, grad_norm=math.inf, skipped=True))
    run = summarise(tmp_path)
    assert run["series"]["loss"] == [None]
    assert run["skipped_steps"] == [1]
    json.dumps(run, allow_nan=False)


def test_a_damaged_record_is_reported(tmp_path: Path) -> None:
    simple_run(tmp_path, finished=False)
    path = next((tmp_path / "records").glob("*.jsonl"))
    path.write_bytes(path.read_bytes()[:-30])
    run = summarise(tmp_path)
    assert run["steps"] == 9
    assert "is torn" in run["torn_records"][0]
    assert "is torn" in describe(run)


def test_a_missing_run_names_the_nearest(tmp_path: Path) -> None:
    simple_run(tmp_path / "tiny")
    with pytest.raises(JobError) as caught:
        summarise(tmp_path / "tinny")
    assert caught.value.exit_code == 78
    assert f"there is no run in {tmp_path / 'tinny'}" in str(caught.value)
    assert f"Did you mean {tmp_path / 'tiny'}?" in str(caught.value)
    with pytest.raises(JobError, match="Give the folder of a run"):
        summarise(tmp_path / "nowhere" / "at-all")


def test_long_runs_are_thinned_and_keep_their_spikes() -> None:
    steps = [
        {"step": n, "loss": 99.0 if n == 5001 else 1.0, "tokens": 10, "seconds": 0.1, "attempt": 1}
        for n in range(1, 10_001)
    ]
    thin = series(steps, points=100)
    assert len(thin["step"]) == 100
    assert thin["step"][-1] == 10_000
    assert max(value for value in thin["loss_max"] if value) == 99.0
    assert thin["tokens_per_second"] == pytest.approx([100.0] * 100)


def test_the_terminal_text_names_the_figures(tmp_path: Path) -> None:
    resumed_run(tmp_path / "resumed")
    simple_run(tmp_path / "simple")
    text = describe(summarise(tmp_path / "resumed"))
    assert "resumed  done: all 20 steps done" in text
    assert "steps done again    2" in text
    assert "restart" in text
    assert "step 12  rank 1 on box  killed: rank 1 was killed" in text
    table = compare([summarise(tmp_path / "resumed"), summarise(tmp_path / "simple")]).splitlines()
    assert table[0].split() == ["resumed", "simple"]
    assert any(line.split() == ["tokens/s", "30,720", "30,720"] for line in table)


def test_a_comparison_shows_the_keys_that_differ(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-3), ("b", 3e-3)):
        values = {"optimizer.lr": lr, "data.source": "stdlib", "run.name": name}
        RunDirectory.open(tmp_path / name, "", values, lambda key: True).release()
    table = compare([summarise(tmp_path / "a"), summarise(tmp_path / "b")])
    assert "optimizer.lr" in table
    assert "data.source" not in table
    assert "run.name" not in table
