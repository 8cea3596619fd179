"""What a decoder is, in figures: its resolved architecture and the list of its parameters. Imports no torch."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.config import nearest
from paceline.errors import JobError
from paceline.model.config import ModelSection, RopeScaling

CATALOG = Path(__file__).parent / "catalog"


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder with every figure resolved. Equal specs build equal modules. Field meanings: `ModelSection`."""

    preset: str
    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    tie_embeddings: bool
    max_sequence_length: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm: str = "rmsnorm"
    norm_eps: float = 1e-5
    mlp: str = "swiglu"
    positions: str = "rope"
    qk_norm: bool = False
    qkv_bias: bool = False
    bias: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0


class Published(msgspec.Struct, frozen=True):
    """A parameter count as published, the half width of its last printed digit, and where it stands."""

    parameters: int
    within: int
    source: str


class CatalogEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the catalogue."""

    source: str
    architecture: dict[str, Any]
    extends: str | None = None
    published: Published | None = None


class Parameter(NamedTuple):
    """One weight: name as in `named_parameters()`, whole shape, role of the sharding table, block or None."""

    name: str
    shape: tuple[int, ...]
    role: str
    layer: int | None


def catalog_names() -> list[str]:
    """The presets, sorted."""
    return sorted(path.stem for path in CATALOG.glob("*.toml"))


@lru_cache(maxsize=64)
def catalog_entry(preset: str) -> CatalogEntry:
    """The catalogue file of a preset, the architecture of the one it extends below its own.

    Raises:
        JobError: there is no such preset; names the nearest and all of them.
    """
    path = CATALOG / f"{preset}.toml"
    names = catalog_names()
    if preset not in names:
        near = nearest(preset.lower(), names)
        raise JobError(
            f"no model {preset!r} in the catalogue: {', '.join(names)}",
            key="model.preset",
            values={"preset": preset, "catalog": names},
            hint=f"Did you mean {near}?" if near else "Choose one of them, or set the architecture keys of [model].",
        )
    entry = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), CatalogEntry)
    if entry.extends is None:
        return entry
    base = catalog_entry(entry.extends)
    return msgspec.structs.replace(entry, architecture=base.architecture | entry.architecture)


def resolve(section: ModelSection) -> ModelSpec:
    """The spec of a `[model]` section: the preset's figures, replaced by the keys that are set.

    Raises:
        JobError: unknown preset, sizes that do not divide, or a key that would have no effect.
    """
    given = {field: value for field in section.__struct_fields__ if (value := getattr(section, field)) is not None}
    figures = catalog_entry(section.preset).architecture | given
    figures.setdefault("num_kv_heads", figures["num_heads"])
    _check_effect(given, figures)
    if "head_dim" not in figures:
        _check_divides("model.dim", figures["dim"], "model.num_heads", figures["num_heads"])
        figures["head_dim"] = figures["dim"] // figures["num_heads"]
    spec = msgspec.convert(figures, ModelSpec)
    _check_divides("model.num_heads", spec.num_heads, "model.num_kv_heads", spec.num_kv_heads)
    if spec.positions == "rope" and spec.head_dim % 2:
        raise JobError(
            f"{spec.head_dim} is odd, and rotary positions turn pairs of numbers",
            key="model.head_dim",
            values={"head_dim": spec.head_dim, "dim": spec.dim, "num_heads": spec.num_heads},
            hint=f'Use {spec.head_dim + 1}, or model.positions="learned".',
        )
    return spec


@lru_cache(maxsize=64)
def parameters(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Every parameter of the decoder, in the order of the module's `named_parameters()`; tied ones once."""
    return tuple(_parameters(spec))


def parameter_count(spec: ModelSpec) -> int:
    """All parameters, tied embeddings counted once."""
    return sum(math.prod(p.shape) for p in parameters(spec))


def non_embedding_parameter_count(spec: ModelSpec) -> int:
    """Parameters outside the token and position tables and the output head."""
    tables = ("embedding", "position_embedding", "head")
    return sum(math.prod(p.shape) for p in parameters(spec) if p.role not in tables)


def _parameters(spec: ModelSpec) -> Iterator[Parameter]:
    shape: tuple[int, ...]
    yield Parameter("embedding.weight", (spec.vocab_size, spec.dim), "embedding", None)
    if spec.positions == "learned":
        shape = (spec.max_sequence_length, spec.dim)
        yield Parameter("position_embedding.weight", shape, "position_embedding", None)
    for layer in range(spec.num_layers):
        for name, shape, role in _block(spec):
            yield Parameter(f"blocks.{layer}.{name}", shape, role, layer)
    for name, shape, role in _norm(spec, "norm", spec.dim):
        yield Parameter(name, shape, role, None)
    if not spec.tie_embeddings:
        yield Parameter("lm_head.weight", (spec.vocab_size, spec.dim), "head", None)


def _block(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...], str]]:
    dim, ffn_dim = spec.dim, spec.ffn_dim
    query_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv_bias = spec.bias or spec.qkv_bias
    yield from _norm(spec, "attention_norm", dim)
    yield from _linear("attention.q_proj", query_dim, dim, "query", qkv_bias)
    yield from _linear("attention.k_proj", kv_dim, dim, "key_value", qkv_bias)
    yield from _linear("attention.v_proj", kv_dim, dim, "key_value", qkv_bias)
    yield from _linear("attention.o_proj", dim, query_dim, "attention_output", spec.bias)
    if spec.qk_norm:
        yield "attention.q_norm.weight", (spec.head_dim,), "head_norm"
        yield "attention.k_norm.weight", (spec.head_dim,), "head_norm"
    yield from _norm(spec, "mlp_norm", dim)
    if spec.mlp == "swiglu":
        yield from _linear("mlp.gate_proj", ffn_dim, dim, "mlp_input", spec.bias)
    yield from _linear("mlp.up_proj", ffn_dim, dim, "mlp_input", spec.bias)
    yield from _linear("mlp.down_proj", dim, ffn_dim, "mlp_output", spec.bias)


def _linear(name: str, rows: int, columns: int, role: str, bias: bool) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield f"{name}.weight", (rows, columns), role
    if bias:
        yield f"{name}.bias", (rows,), f"{role}_bias"


def _norm(spec: ModelSpec, name: str, dim: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield f"{name}.weight", (dim,), "norm"
    if spec.norm == "layernorm" and spec.bias:
        yield f"{name}.bias", (dim,), "norm"


def _check_divides(key: str, whole: int, part_key: str, part: int) -> None:
    if whole % part == 0:
        return
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    near = sorted(sorted(divisors, key=lambda n: abs(n - part))[:3])
    raise JobError(
        f"{part} does not divide {key} = {whole}",
        key=part_key,
        values={key: whole, part_key: part, "works": divisors},
        hint=f"Set {part_key} to {' or '.join(map(str, near))}, or {key} to {whole - whole % part + part}.",
    )


def _check_effect(given: dict[str, Any], figures: dict[str, Any]) -> None:
    if figures.get("positions", "rope") != "learned":
        return
    for key in ("rope_theta", "rope_scaling"):
        if key in given:
            raise JobError(
                f"has no effect with learned positions (model.positions of preset {figures['preset']!r})",
                key=f"model.{key}",
                hint='Remove it, or set model.positions="rope".',
            )
