"""CUDA graphs and float8 are never accepted in silence: each refusal with its reason, and all of them in the guide."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.cluster.probe import Host
from paceline.errors import JobError
from paceline.job.load import load_job
from paceline.job.resolve import resolve_job
from paceline.parallel import gpu_only
from paceline.parallel.gpu_only import CUDA_GRAPHS, FLOAT8

CPU = Host("test", "cpu", 0, "a processor of no name", 2**36, 4, 2**36, True, None)
GPU = msgspec.structs.replace(CPU, device_kind="cuda", devices=2, device_name="gpu", device_memory_bytes=2**36)
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "platforms.md"


def refused(host: Host, ranks: int, *words: str) -> JobError:
    with pytest.raises(JobError) as raised:
        resolve_job(load_job(None, ["batch.global_batch=24", *words]), ranks, host)
    return raised.value


@pytest.mark.parametrize(
    ("host", "ranks", "words", "where"),
    [
        (CPU, 2, (), "a processor"),
        (GPU, 2, ("parallel.tp=2",), "tp"),
        (GPU, 2, ("parallel.cp=2",), "cp"),
        (GPU, 2, ("parallel.pp=2", "batch.microbatch=1"), "pp"),
        (GPU, 2, ("parallel.dp_shard=2",), "dp_shard"),
        (GPU, 2, (), "dp_replicate"),
        (GPU, 1, ("parallel.offload=host",), "offload"),
        (GPU, 1, (), "anything else"),
    ],
)
def test_graphs_are_refused_under_every_layout_with_its_own_reason(
    host: Host, ranks: int, words: tuple[str, ...], where: str
) -> None:  # BL-86
    error = refused(host, ranks, *words, "parallel.cuda_graphs=true")
    reason = next(refusal.reason for refusal in CUDA_GRAPHS if refusal.where == where)
    assert error.key == "parallel.cuda_graphs" and error.values["because_of"] == where
    assert reason in str(error) and host.device_name in str(error) and "Remove it" in str(error.hint)


def test_float8_is_refused_where_it_is_not_there_and_where_nothing_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("parallel.precision=fp8",)
    error = refused(CPU, 1, *words)
    assert error.key == "parallel.precision" and "no float8 products" in str(error)
    assert "auto, bf16, fp16, fp32 or fp64" in str(error.hint)
    monkeypatch.setattr(gpu_only, "find_spec", lambda name: None)
    assert "torchao's, which is not installed" in str(refused(GPU, 1, *words))
    monkeypatch.setattr(gpu_only, "find_spec", lambda name: name)
    assert "compiled" in str(refused(GPU, 1, *words, "parallel.compile=false"))
    assert "this version multiplies nothing in float8" in str(refused(GPU, 1, *words))


def test_what_is_not_asked_for_is_not_judged() -> None:
    resolve_job(load_job(None, ["parallel.cuda_graphs=false"]), 1, CPU)


def test_the_guide_shows_both_tables() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for refusal in (*CUDA_GRAPHS, *FLOAT8):
        assert f"| {refusal.where} | {refusal.reason} |" in text
