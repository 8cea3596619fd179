"""A line of published runs becomes a setting with its assumptions in words, or a reason; whatever is wrong with it."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from paceline.plan.against import scoreboard
from paceline.plan.row_machine import device_key
from paceline.plan.rows import read_run, read_runs
from tests.plan.test_accuracy import GOLDEN

LINES = [json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()]
BY_ID = {line["id"]: line for line in LINES}
BLOOM = BY_ID["bloom-176b-final"]
WRONG = ["gone", None, 0, -3, "x", 1e30, [], {}, True, 1.5, 7, "bf16", float("nan"), float("inf"), 100_000]


def changed(line: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """The line with some keys of its parts replaced: `model={"moe": {}}`."""
    new = copy.deepcopy(line)
    for part, value in parts.items():
        new[part] = {**new[part], **value} if isinstance(value, dict) else value
    return new


def reason_of(line: dict[str, Any]) -> str | None:
    return read_run(json.dumps(line)).reason


def test_a_complete_line_becomes_its_setting() -> None:
    run = read_run(json.dumps(BLOOM))
    setting = run.setting
    assert setting is not None and run.measured["step_seconds"] == 105.22
    assert (setting.layout.dp, setting.layout.tp, setting.layout.pp) == (8, 4, 12)
    assert (setting.zero_stage, setting.layout.dp_shard) == (1, 8)
    # 70 blocks over 12 ranks: the embedding and the head take a block's place each.
    assert (setting.first_layers, setting.last_layers) == (1, 1)
    assert setting.global_batch == 2048 and setting.recompute == "full" and not setting.fused_attention
    # Four Omni-Path cards of 100 Gbit/s for eight devices.
    assert setting.fabric is not None and setting.fabric.bytes_per_second == pytest.approx(6.25e9)


def test_what_a_line_does_not_say_is_assumed_in_words() -> None:
    run = read_run(json.dumps(changed(BLOOM, model={"vocab": None, "heads": None}, micro_batch=None)))
    assert run.setting is not None
    for what in ("vocabulary", "heads", "micro-batch"):
        assert any(what in words and "not published" in words for words in run.setting.assumed), what


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"model": {"moe": {"experts": 8}}}, "experts"),
        ({"model": {"mla": True}}, "latent attention"),
        ({"model": {"hybrid_mamba": True}}, "state-space"),
        ({"model": {"hidden": None}}, "width of the model"),
        ({"model": {"layers": 50_000}}, "cannot be"),
        ({"hardware": {"gpu": None}}, "device is not named"),
        ({"hardware": {"gpu": "TPU v5p"}}, "TPU v5p"),
        ({"parallelism": {"tp": None}}, "layout is not published"),
        ({"parallelism": {"dp": 7}}, "does not multiply"),
        ({"task": "lora"}, "adapters"),
    ],
)
def test_what_is_not_modelled_says_why(parts: dict[str, Any], reason: str) -> None:
    run = read_run(json.dumps(changed(BLOOM, **parts)))
    assert run.setting is None and reason in str(run.reason)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("A100-SXM4-80GB", "a100-sxm-80g"),
        ("A100-40GB", "a100-sxm-40g"),
        ("NVIDIA A100 PCIe 40GB", "a100-pcie-40g"),
        ("H100-SXM 96GB HBM2e (2.4TB/s, 500W cap)", "h100-sxm-96g"),
        ("GB200", "gb200"),
        ("Blackwell (model not named; about 184 GiB usable)", None),
        ("", None),
    ],
)
def test_devices_are_known_by_how_sources_write_them(name: str, key: str | None) -> None:
    assert device_key(name) == key


def test_software_is_chosen_by_source_and_release() -> None:
    def software(name: str) -> str:
        setting = read_run(json.dumps(BY_ID[name])).setting
        assert setting is not None
        return setting.software

    assert software("megatron-bridge-25.11-llama3-8b-pretrain-h100-8-fp8-cs") == "megatron-bridge-2025"
    assert software("megatron-bridge-26.06-llama3-70b-sft-h100-32-fp8") == "megatron-bridge-2026"
    assert software("sc21-t1-145b") == "megatron-2021"
    assert software("sc21-t2-zero3-174b-384") == "deepspeed-zero-2021"
    unknown = read_run(json.dumps(changed(BLOOM, source="somebody else"))).setting
    assert unknown is not None and any("software" in words for words in unknown.assumed)


def test_step_seconds_come_from_the_step_before_tokens_before_operations() -> None:
    def seconds(**measured: float) -> float:
        line = changed(BLOOM)
        line["measured"] = measured
        return read_run(json.dumps(line)).measured["step_seconds"]

    tokens = 2048 * 2048 / 384
    assert seconds(step_time_s=3.0, tokens_per_s_per_gpu=1.0) == 3.0
    assert seconds(tokens_per_s_per_gpu=tokens, tflops_per_gpu=1.0) == pytest.approx(1.0)
    # The source prints both; its formula leaves out the embedding's place, which shows in the fourth digit.
    assert seconds(tflops_per_gpu=149.02) == pytest.approx(105.22, rel=0.005)


def test_a_nvlink_domain_counts_as_one_node() -> None:
    setting = read_run(json.dumps(BY_ID["megatron-bridge-26.04-llama3-405b-pretrain-gb200-256-fp8"])).setting
    assert setting is not None and (setting.nodes, setting.devices_per_node) == (4, 64)


def mutated(line: dict[str, Any], random_: random.Random) -> dict[str, Any]:
    new = copy.deepcopy(line)
    for _ in range(random_.choice((1, 1, 2, 4))):
        table = random_.choice([new, *(new[k] for k in ("hardware", "model", "parallelism", "measured") if new.get(k))])
        if not isinstance(table, dict) or not table:
            continue
        key, value = random_.choice(list(table)), random_.choice(WRONG)
        if value == "gone":
            table.pop(key)
        else:
            table[key] = value
    return new


def test_any_line_gives_figures_or_a_reason() -> None:
    random_ = random.Random(7)
    for _ in range(400):
        line = mutated(random_.choice(LINES), random_)
        document = scoreboard([read_run(json.dumps(line))])
        assert json.loads(json.dumps(document["rows"], allow_nan=False))
        for row in document["rows"]:
            assert row["predicted"] is not None or row["reason"] or row["quantity"] == "fits", line


@pytest.mark.parametrize("text", ["{", "3", "[]", '{"id": 1, "hardware": 3}', "{}"])
def test_a_broken_line_keeps_its_place(text: str) -> None:
    run = read_run(text, 4)
    assert run.setting is None and run.reason


def test_a_file_of_all_lines_keeps_their_order(tmp_path: Any) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES[:3])) + "\nnot json\n\n")
    assert [run.id for run in read_runs(path)] == [*(line["id"] for line in LINES[:3]), "line 4"]
