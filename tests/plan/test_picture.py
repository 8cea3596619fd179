"""The picture of a plan: one file, with the passes of a step and the memory of each stage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from paceline.cluster.catalogue import device
from paceline.errors import JobError
from paceline.parallel.layout import Layout
from paceline.plan.device_memory import predict_memory
from paceline.plan.picture import MOST_PASSES, bars, picture, write_picture
from paceline.plan.setting import Setting, StepTime
from paceline.plan.verdict import usable_bytes
from paceline.units import format_bytes
from tests.plan.settings import llama, setting

STEP = StepTime(
    2.0, 1.7, 2.3,
    {"forward": 0.5, "backward": 1.0, "bubble": 0.25, "reduce_exposed": 0.15, "optimizer": 0.1, "other": 0.0}, {},
)  # fmt: skip


def own(**changes: object) -> Setting:
    fields = {"software": "paceline", "fused_attention": True, "accumulation": 8, **changes}
    return setting(llama(layers=8), Layout(pp=4), **fields)


def passes(page: str) -> int:
    return len(re.findall(r'class="pass-[FBIW]"', page))


def test_the_page_carries_its_figures_and_loads_nothing() -> None:
    job = own()
    page, memory = picture(job, STEP), predict_memory(job)
    for size in (memory.allocated_bytes, memory.reserved_bytes, memory.device_bytes):
        assert format_bytes(size) in page
    assert "2.00 s" in page
    assert re.search(r"https?:", page) is None and "src=" not in page
    found = re.search(r'id="plan">(.*?)</script>', page)
    assert found is not None
    assert json.loads(found[1])["memory"]["device_bytes"] == memory.device_bytes


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({}, 2), ({"schedule": "gpipe"}, 2), ({"schedule": "interleaved-1f1b", "stages_per_rank": 2}, 4),
        ({"schedule": "zero-bubble"}, 3),
    ],
)  # fmt: skip
def test_every_pass_of_a_step_is_drawn(changes: dict[str, object], each: int) -> None:
    drawn = passes(picture(own(**changes), STEP))
    first_stage_without_inputs = 8 if changes.get("schedule") == "zero-bubble" else 0
    assert drawn == 4 * 8 * each - first_stage_without_inputs


def test_a_step_of_many_passes_is_cut_and_says_so() -> None:
    page = picture(own(accumulation=4096), STEP)
    assert passes(page) == 4 * 2 * MOST_PASSES
    assert "of 4096 micro-batches" in page


def test_one_rank_and_a_schedule_of_others_have_a_page_too() -> None:
    assert passes(picture(setting(llama(layers=2), software="paceline", fused_attention=True), None)) == 2
    other = own(software="zero-bubble", schedule="zero-bubble-2p")
    assert passes(picture(other, None)) == 0 and "Memory by stage" in picture(other, None)


def test_bars_are_as_long_as_their_bytes() -> None:
    job = own()
    memory = predict_memory(job)
    drawing = bars(memory.stages, usable_bytes(job))
    per_byte = drawing.boxes[0].width / memory.stages[0].parts["parameters"]
    rows = {box.y for box in drawing.boxes}
    assert len(rows) == len(memory.stages)
    for y, stage in zip(sorted(rows), memory.stages, strict=True):
        width = sum(box.width for box in drawing.boxes if box.y == y)
        assert width == pytest.approx(stage.device_bytes * per_byte, rel=0.01)
    assert drawing.line is not None
    assert drawing.line[0] - 62 == pytest.approx(usable_bytes(job) * per_byte, rel=0.01)


def test_a_stage_larger_than_its_device_passes_the_line() -> None:
    small = msgspec.structs.replace(own(), device=msgspec.structs.replace(device("a100-sxm-80g"), memory_bytes=2**30))
    memory = predict_memory(small)
    drawing = bars(memory.stages, usable_bytes(small))
    assert drawing.line is not None
    assert max(box.x + box.width for box in drawing.boxes) > drawing.line[0]
    assert memory.oom_probability > 0.99


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot write the picture"):
        write_picture(tmp_path / "missing" / "plan.html", own(), STEP)
