"""What the workers print, merged."""

from __future__ import annotations

import io
from pathlib import Path

from paceline.workers.output import Output


# BL-93
def test_a_line_of_all_ranks_is_shown_once_and_others_are_tagged() -> None:
    out = io.StringIO()
    output = Output(out, range(4))
    for rank in (1, 2, 3):
        output.feed(rank, b"the same on all\n")
    output.feed(0, b"the same on all\n")
    output.feed(3, b"only here\n")
    output.feed(2, b"[rank2]:[W1129 15:04:06.430 17 x.cpp:1] native\n")
    output.feed(1, b"[rank1]:[W1129 15:04:07.112 19 x.cpp:1] native\n")
    output.close()
    lines = out.getvalue().splitlines()
    assert lines[0] == "the same on all"
    assert lines[1] == "[rank 3] only here"
    assert lines[2].startswith("[rank 2]") and "native" in lines[2]
    assert len(lines) == 3


def test_lines_that_differ_in_a_number_are_both_shown() -> None:
    out = io.StringIO()
    output = Output(out, range(3))
    output.feed(1, b"sample 17 is damaged\n")
    output.feed(2, b"sample 18 is damaged\n")
    output.close()
    assert out.getvalue().count("damaged") == 2


def test_a_bar_of_rank_0_passes_through_and_others_start_on_a_new_line() -> None:
    out = io.StringIO()
    output = Output(out, range(2))
    output.feed(0, b"step 1")
    output.feed(1, b"careful\n")
    output.release(everything=True)
    output.feed(0, b"\rstep 2\n")
    output.close()
    assert out.getvalue() == "step 1\n[rank 1] careful\n\rstep 2\n"


def test_characters_cut_between_two_reads_are_whole() -> None:
    out = io.StringIO()
    output = Output(out, range(2))
    text = "µs\n".encode()
    output.feed(0, text[:1])
    output.feed(0, text[1:])
    output.feed(1, text[:1])
    output.feed(1, text[1:])
    output.close()
    assert out.getvalue() == "µs\n"


def test_after_a_failure_only_the_supervisor_speaks() -> None:
    out = io.StringIO()
    output = Output(out, range(2))
    output.feed(1, b"before\n")
    output.mute()
    output.feed(0, b"echo\n")
    output.feed(1, b"echo of 1\n")
    output.say("the reason")
    output.close()
    assert out.getvalue() == "[rank 1] before\nthe reason\n"
    assert output.tail(0, 5) == ["echo"]


def test_the_tail_holds_the_last_state_of_a_bar(tmp_path: Path) -> None:
    output = Output(io.StringIO(), [0], tmp_path / "logs")
    output.feed(0, b"a\nstep 1\rstep 2\nno newline")
    output.close()
    assert output.tail(0, 2) == ["step 2", "no newline"]
    assert (tmp_path / "logs" / "rank-0.log").read_bytes() == b"a\nstep 1\rstep 2\nno newline"
