"""Catalogue figures against published counts, and what a wrong [model] section is told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from paceline.config import Setting, build
from paceline.errors import JobError
from paceline.model.config import ModelSection
from paceline.model.sharding import SHARDING
from paceline.model.spec import (
    catalog_entry,
    catalog_names,
    non_embedding_parameter_count,
    parameter_count,
    parameters,
    resolve,
)
from paceline.model.transformer import Decoder
from tests.model.models import FAMILIES, small_spec


@pytest.mark.parametrize("preset", catalog_names())
def test_parameter_count_is_the_published_one(preset: str) -> None:
    entry = catalog_entry(preset)
    assert entry.source
    count = parameter_count(resolve(ModelSection(preset=preset)))
    if entry.published is None:
        assert preset in ("tiny", "small")
    else:
        assert entry.published.source
        assert abs(count - entry.published.parameters) <= entry.published.within


def test_non_embedding_count_is_the_published_one() -> None:
    """Qwen's model cards print it, to two or three digits."""
    printed = {"0.6b": 0.44e9, "1.7b": 1.4e9, "4b": 3.6e9, "8b": 6.95e9, "14b": 13.2e9, "32b": 31.2e9}
    for size, published in printed.items():
        count = non_embedding_parameter_count(resolve(ModelSection(preset=f"qwen3-{size}")))
        assert count == pytest.approx(published, rel=0.012)


def test_own_presets_have_the_sizes_they_promise() -> None:
    assert parameter_count(resolve(ModelSection())) == 894_080
    assert parameter_count(resolve(ModelSection(preset="small"))) == 9_965_824


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_module(family: str, tied: bool) -> None:
    spec = small_spec(family, tie_embeddings=tied)
    module = [(name, tuple(p.shape)) for name, p in Decoder(spec, device="meta").named_parameters()]
    assert [(p.name, p.shape) for p in parameters(spec)] == module
    assert {p.role for p in parameters(spec)} <= SHARDING.keys()


@pytest.mark.parametrize("preset", ["gpt2", "llama3.1-405b", "qwen3-32b"])
def test_catalogue_models_are_built_on_the_meta_device(preset: str) -> None:
    spec = resolve(ModelSection(preset=preset))
    model = Decoder(spec, device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameter_count(spec)
    assert all(b.is_meta for b in model.buffers()) and not model.state_dict().keys() - {
        p.name for p in parameters(spec)
    }


def test_splits_are_whole_heads_or_features() -> None:
    spec = small_spec("gpt2")
    for parameter in parameters(spec):
        split = SHARDING[parameter.role]
        if split.dim is not None and split.unit is not None:
            assert parameter.shape[split.dim] % getattr(spec, split.unit) == 0


def test_explicit_keys_replace_the_preset() -> None:
    spec = resolve(ModelSection(preset="llama3-8b", num_layers=2, rope_theta=1e4, tie_embeddings=True))
    assert (spec.num_layers, spec.rope_theta, spec.tie_embeddings, spec.dim) == (2, 1e4, True, 4096)
    assert resolve(ModelSection(preset="llama3.1-8b")).rope_scaling is not None
    wider = resolve(ModelSection(num_heads=8))
    assert (wider.num_kv_heads, wider.head_dim) == (8, 16)


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        ({"preset": "lama3-8b"}, "model.preset", ["'lama3-8b'", "Did you mean llama3-8b?", "qwen3-0.6b"]),
        ({"num_heads": 3}, "model.num_heads", ["3 does not divide model.dim = 128", "2 or 4"]),
        (
            {"preset": "small", "num_kv_heads": 3},
            "model.num_kv_heads",
            ["3 does not divide model.num_heads = 8", "2 or 4"],
        ),
        ({"dim": 60}, "model.head_dim", ["15 is odd", "16"]),
        ({"preset": "gpt2", "rope_theta": 1e4}, "model.rope_theta", ["no effect", "learned"]),
    ],
)
def test_a_contradiction_is_refused_with_its_numbers(keys: dict[str, Any], key: str, says: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        resolve(ModelSection(**keys))
    assert caught.value.key == key
    for text in says:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast has no effect"),
        ({"type": "llama3", "factor": 8.0}, "needs rope_scaling.original_max_sequence_length"),
        ({"type": "llama3", "factor": 8.0, "original_max_sequence_length": -1}, "not above 0"),
    ],
)
def test_a_scaling_without_sense_is_refused(scaling: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError, match=says):
        build({"model": ModelSection}, {"model.rope_scaling": Setting(scaling, "job.toml")})


def test_figures_need_no_torch() -> None:
    code = (
        "import sys, paceline.model.spec, paceline.model.flop, paceline.model.sharding, paceline.model.config\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "[]\n"
