"""Records: one whole JSON object a line, whatever happens to the writer."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.run.samples import started, step

from paceline.errors import DiskFull
from paceline.run.records import Eval, Record, RecordWriter, Step, json_safe, latest_steps, read_records, redone
from paceline.units import Bytes, Seconds

WRITE_FOR_EVER = """
import sys
from pathlib import Path
from paceline.run.records import RecordWriter
from tests.run.samples import step
writer = RecordWriter(Path(sys.argv[1]), 1)
number = 0
while True:
    number += 1
    writer.write(step(number))
    if number == 200:
        print("going", flush=True)
"""


def write(run_dir: Path, attempt: int, *records: Record, name: str = "rank0", time: float = 0.0) -> None:
    with RecordWriter(run_dir, attempt, clock=lambda: time, name=name) as writer:
        for record in records:
            writer.write(record)


def test_a_line_begins_with_kind_time_attempt_step(tmp_path: Path) -> None:
    write(tmp_path, 3, step(7), time=12.5)
    line = next((tmp_path / "records").glob("*.jsonl")).read_text()
    assert line.startswith('{"kind":"step","time":12.500000,"attempt":3,"step":7,"loss":')
    assert line.endswith("}\n")


def test_kill_in_the_middle_of_writing_leaves_whole_lines(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"going\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=10) == -signal.SIGKILL
    torn: list[str] = []
    steps = [record["step"] for record in read_records(tmp_path, torn=torn)]
    assert torn == []
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 200


def test_a_torn_last_line_is_skipped_and_reported(tmp_path: Path) -> None:
    write(tmp_path, 1, step(1), step(2))
    path = next((tmp_path / "records").glob("*.jsonl"))
    path.write_bytes(path.read_bytes()[:-40])
    torn: list[str] = []
    assert [record["step"] for record in read_records(tmp_path, torn=torn)] == [1]
    assert len(torn) == 1
    assert path.name in torn[0]
    assert "line 2" in torn[0]


def test_nothing_is_lost_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, []

    def short_once(handle: int, data: bytes) -> int:
        calls.append(data)
        return real(handle, data[:20] if len(calls) == 2 else data)

    monkeypatch.setattr(os, "write", short_once)
    write(tmp_path, 1, step(1), step(2), step(3))
    torn: list[str] = []
    assert [record["step"] for record in read_records(tmp_path, torn=torn)] == [1, 2, 3]
    assert len(torn) == 1


def test_values_that_json_has_not_are_null_and_named(tmp_path: Path) -> None:
    write(tmp_path, 1, step(1, loss=math.nan, grad_norm=-math.inf, parts={"forward": math.inf}))

    def refuse(word: str) -> None:
        raise AssertionError(word)

    line = next((tmp_path / "records").glob("*.jsonl")).read_text()
    record = json.loads(line, parse_constant=refuse)
    assert record["loss"] is None
    assert record["nonfinite"] == {"loss": "nan", "grad_norm": "-inf", "parts.forward": "inf"}
    write(tmp_path, 2, Eval(step=1, name="eval", loss=None, weight=0.0, seconds=0.0))
    assert "nonfinite" not in list(read_records(tmp_path))[-1]


def test_unknown_kinds_and_fields_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 1, step(1))
    path = next((tmp_path / "records").glob("*.jsonl"))
    with path.open("a") as file:
        file.write('{"kind":"from_the_future","time":1,"attempt":1,"step":1}\n')
        file.write('{"kind":"eval","time":2,"attempt":1,"step":1,"name":"eval","loss":1.5,"colour":"red"}\n')
    assert [record["kind"] for record in read_records(tmp_path)] == ["step", "eval"]
    assert [record["kind"] for record in read_records(tmp_path, kinds=["eval"])] == ["eval"]


def test_files_of_one_attempt_are_read_in_the_order_of_time(tmp_path: Path) -> None:
    write(tmp_path, 1, step(5), time=5.0)
    write(tmp_path, 1, step(4), name="supervisor", time=4.0)
    write(tmp_path, 2, step(3), time=3.0)
    assert [record["step"] for record in read_records(tmp_path)] == [4, 5, 3]


def test_after_a_resume_each_step_stands_once_and_rises(tmp_path: Path) -> None:  # BL-93, its first half
    write(tmp_path, 1, started(), *(step(n, loss=1.0) for n in range(1, 13)))
    write(tmp_path, 2, started(at=10), *(step(n, loss=2.0) for n in range(11, 21)))
    records = list(read_records(tmp_path))
    kept = latest_steps(records)
    assert [record["step"] for record in kept] == list(range(1, 21))
    assert [record["loss"] for record in kept] == [1.0] * 10 + [2.0] * 10
    assert [(record["step"], record["attempt"]) for record in redone(records)] == [(11, 1), (12, 1)]


def test_steps_that_a_later_attempt_began_before_are_void_even_if_not_yet_redone(tmp_path: Path) -> None:
    write(tmp_path, 1, started(), *(step(n) for n in range(1, 13)))
    write(tmp_path, 2, started(at=10), step(11))
    records = list(read_records(tmp_path))
    assert [record["step"] for record in latest_steps(records)] == list(range(1, 12))
    assert [record["step"] for record in redone(records)] == [11, 12]


def test_a_full_disk_names_the_folder(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, 1)
    writer.write(step(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 10, before[1]))
        with pytest.raises(DiskFull) as caught:
            writer.write(step(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(tmp_path / "records") in str(caught.value)
    assert caught.value.exit_code == 79
    writer.write(step(3))
    writer.close()
    torn: list[str] = []
    assert [record["step"] for record in read_records(tmp_path, torn=torn)] == [1, 3]
    assert len(torn) == 1


def test_a_run_without_records_has_none(tmp_path: Path) -> None:
    assert list(read_records(tmp_path)) == []


def test_step_parts_default_to_none_measured() -> None:
    assert Step(
        step=1, loss=1.0, grad_norm=None, lr=0.1, tokens=1, seconds=1.0, tokens_per_second=1.0, mfu=None, samples=1
    ).parts == {}  # fmt: skip


def test_json_safe_gives_what_json_has() -> None:
    value = {"a": math.nan, "b": [Bytes(3), (Path("x"), True)], 4: Seconds(2.5), "c": None, "d": started().layout}
    plain = json_safe(value)
    assert plain == {"a": None, "b": [3, ["x", True]], "4": 2.5, "c": None, "d": started().layout}
    assert type(plain["b"][0]) is int
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
