"""A user's module under the transforms: the same curve, and what has no effect refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import paceline
from paceline.cluster.probe import probe_host
from paceline.errors import JobError
from paceline.parallel.compile.apply import compile_blocks


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


DATA = [{"inputs": torch.randn(8, generator=torch.Generator().manual_seed(i))} for i in range(32)]


def loss(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return (output - 1).float().square().sum(), torch.tensor(float(len(output)))


def final(run: Path, model: nn.Module | None = None, **layout: Any) -> float:
    trainer = paceline.Trainer(
        model or Stack(), loss, data=DATA, global_batch=8, run=run, workers=0, layout=layout or "auto"
    )
    return float(trainer.fit(steps=6)["loss"])


def test_results_stay_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests' folder may well be memory.
    monkeypatch.setattr("paceline.parallel.offload.config.MEMORY_FILE_SYSTEMS", frozenset())
    wanted = final(tmp_path / "plain")
    assert final(tmp_path / "full", recompute="full") == wanted
    assert final(tmp_path / "disk", recompute="selective", offload="disk") == wanted
    bf16 = {"precision": "bf16", "parameter_dtype": "bf16"}
    run = tmp_path / "bf16"
    trainer = paceline.Trainer(
        Stack(), loss, data=DATA, global_batch=8, run=run, workers=0, layout=bf16,
        forward=lambda model, batch: model(batch["inputs"].bfloat16()),
    )  # fmt: skip
    assert trainer.fit(steps=6)["loss"] == pytest.approx(wanted, rel=2e-2)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_of_the_engines_own_classes_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    monkeypatch.setattr("paceline.trainer.compile_blocks", partial(compile_blocks, backend=backend))
    monkeypatch.setattr("paceline.trainer.check_compiler", lambda *_: None)
    wanted = final(tmp_path / "plain")
    try:
        assert final(tmp_path / "compiled", compile=True, recompute=recompute) == pytest.approx(wanted, rel=1e-6)
        # The layers are alike; the input of the first one needs no gradient.
        assert len(graphs) == 2
    finally:
        torch._dynamo.reset()


def test_fp16_gives_the_same_where_the_processor_has_it_and_is_refused_where_not(tmp_path: Path) -> None:
    if not probe_host().fp16:
        with pytest.raises(JobError, match="has no fp16 arithmetic"):
            final(tmp_path / "fp16", precision="fp16")
        return
    assert final(tmp_path / "fp16", precision="fp16") == pytest.approx(final(tmp_path / "plain"), rel=1e-2)


@pytest.mark.parametrize(
    ("layout", "key"),
    [
        ({"loss_chunk_tokens": 4}, "parallel.loss_chunk_tokens"),
        ({"recompute": "full"}, "parallel.recompute"),
        ({"offload": "host"}, "parallel.offload"),
        ({"bucket_bytes": "4MiB"}, "parallel.bucket_bytes"),
        ({"overlap": False}, "parallel.overlap"),
        ({"reduce_dtype": "bf16"}, "parallel.reduce_dtype"),
        ({"reduce_every": "step"}, "parallel.reduce_every"),
        ({"layout": "auto"}, "parallel.layout"),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path: Path, layout: dict[str, Any], key: str) -> None:
    with pytest.raises(JobError) as caught:
        final(tmp_path / "run", nn.Linear(8, 8), **layout)
    assert caught.value.key == key
