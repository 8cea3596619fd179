"""TensorBoard files, read by TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.run.samples import started, step

from paceline.errors import JobError
from paceline.run.records import Eval
from paceline.telemetry.exporters import TensorBoardExporter

pytest.importorskip("tensorboard")


def export(folder: Path, first: int, last: int, loss: float) -> None:
    exporter = TensorBoardExporter(folder, start_step=first - 1)
    exporter.write(started(at=first - 1))
    for number in range(first, last + 1):
        exporter.write(step(number, loss=loss))
        exporter.write(step(number, loss=99.0))
        if number % 5 == 0:
            exporter.write(Eval(step=number, name="eval", loss=loss, weight=1.0, seconds=0.1))
    exporter.close()


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_each_step_stands_once_and_rises_after_a_resume(tmp_path: Path) -> None:  # BL-93, its first half
    export(tmp_path, 1, 12, loss=1.0)
    export(tmp_path, 11, 20, loss=2.0)
    events = read(tmp_path)
    losses = events.Scalars("train/loss")
    assert [event.step for event in losses] == list(range(1, 21))
    assert [event.value for event in losses] == [1.0] * 10 + [2.0] * 10
    assert [event.step for event in events.Scalars("eval/eval_loss")] == [5, 10, 15, 20]
    assert "throughput/tokens_per_second" in events.Tags()["scalars"]
    assert "step_seconds/forward" in events.Tags()["scalars"]


def test_a_missing_package_is_an_error_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(JobError) as caught:
        TensorBoardExporter(tmp_path)
    assert "telemetry.tensorboard" in str(caught.value)
    assert "pip install 'paceline[tensorboard]'" in str(caught.value)


def test_the_exporter_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from paceline.telemetry.exporters import TensorBoardExporter as T; "
        f"T(Path({str(tmp_path)!r})).close(); print('torch' in sys.modules, 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]
