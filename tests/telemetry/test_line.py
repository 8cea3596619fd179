"""The live line: plain lines where there is no terminal, a bar that is not redrawn too often where there is one."""

from __future__ import annotations

import io
import math

import pytest
from tests.run.samples import step

from paceline.telemetry.line import LiveLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(stream: io.StringIO, steps: int, seconds: float, **options: object) -> LiveLine:
    clock = Clock()
    line = LiveLine(700, 10, stream=stream, clock=clock, **options)  # type: ignore[arg-type]
    for number in range(1, steps + 1):
        clock.now += seconds
        line.update(step(number, loss=2.34561, grad_norm=1.016, lr=3e-3, tokens_per_second=12345.4, mfu=0.4512))
    return line


def test_plain_lines_every_log_every_steps() -> None:
    stream = io.StringIO()
    run(stream, 25, 0.1).close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/700", "10/700", "20/700"]
    assert lines[2] == (
        "step 20/700  loss 2.3456  grad_norm 1.02  lr 3.0e-03  12,345 tokens/s  mfu 45.1%  left 1m 08s"
    )  # 680 steps of 0.1 s
    assert lines[0].endswith("left ...")


def test_the_last_step_is_shown_and_done() -> None:
    stream = io.StringIO()
    clock = Clock()
    with LiveLine(5, 10, stream=stream, clock=clock) as line:
        for number in range(1, 6):
            line.update(step(number))
    assert stream.getvalue().splitlines()[-1].startswith("step 5/5  ")
    assert stream.getvalue().endswith("  done\n")


def test_time_left_leaves_out_the_first_slow_step() -> None:
    clock = Clock()
    line = LiveLine(102, 10, stream=io.StringIO(), clock=clock)
    for number, seconds in ((1, 60.0), (2, 30.0), (3, 0.5), (4, 0.5)):
        clock.now += seconds
        line.update(step(number))
    assert line.seconds_left == pytest.approx(49.0)


def test_other_ranks_are_silent() -> None:  # BL-93
    for stream in (io.StringIO(), Terminal()):
        line = run(stream, 20, 0.1, enabled=False)
        line.message("hello")
        line.close()
        assert stream.getvalue() == ""


def test_a_bar_on_a_terminal_is_drawn_at_most_8_times_a_second() -> None:
    stream = Terminal()
    line = run(stream, 400, 0.01)  # 4 s
    line.message("[saved]")
    line.close()
    line.close()
    drawn = stream.getvalue().count("loss 2.3456")
    assert 20 <= drawn <= 40
    assert "[saved]" in stream.getvalue()
    assert "step" in stream.getvalue()


def test_a_bad_step_is_named() -> None:
    stream = io.StringIO()
    line = LiveLine(10, 10, stream=stream)
    line.update(step(1, loss=math.nan, grad_norm=None, mfu=None, skipped=True))
    assert "loss nan  grad_norm -" in stream.getvalue()
    assert "skipped" in stream.getvalue()


def test_a_closed_terminal_ends_the_line_and_not_the_run() -> None:
    stream = io.StringIO()
    line = LiveLine(10, 1, stream=stream)
    stream.close()
    line.update(step(1))
    line.update(step(2))
