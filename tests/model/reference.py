"""An independent decoder for the tests: explicit matrix products, one head at a time, no torch.nn, no shared code.

It reads a state dict by name. Written for clarity and used in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.model.spec import ModelSpec


def decode(spec: ModelSpec, weights: Mapping[str, Tensor], tokens: Tensor, borders: list[int] | None = None) -> Tensor:
    """Logits (B, L, V). `borders`: first tokens of the documents in the flattened batch."""
    batch, length = tokens.shape
    document = [0] * (batch * length)
    for place in borders or []:
        for token in range(place, batch * length):
            document[token] += 1
    rows = []
    for b in range(batch):
        x = torch.stack([weights["embedding.weight"][token] for token in tokens[b]])
        if spec.positions == "learned":
            x = x + weights["position_embedding.weight"][:length]
        for layer in range(spec.num_layers):
            own = {
                k.removeprefix(f"blocks.{layer}."): v for k, v in weights.items() if k.startswith(f"blocks.{layer}.")
            }
            x = x + _attention(
                spec, own, _norm(spec, own, "attention_norm", x), document[b * length : (b + 1) * length]
            )
            x = x + _mlp(spec, own, _norm(spec, own, "mlp_norm", x))
        x = _norm(spec, weights, "norm", x)
        rows.append(x @ weights.get("lm_head.weight", weights["embedding.weight"]).T)
    return torch.stack(rows)


def _attention(spec: ModelSpec, own: Mapping[str, Tensor], x: Tensor, document: list[int]) -> Tensor:
    length, width = x.shape[0], spec.head_dim
    q, k, v = (_linear(own, f"attention.{name}_proj", x) for name in "qkv")
    heads = []
    for head in range(spec.num_heads):
        group = head * spec.num_kv_heads // spec.num_heads
        q_h, k_h = q[:, head * width : (head + 1) * width], k[:, group * width : (group + 1) * width]
        v_h = v[:, group * width : (group + 1) * width]
        if spec.qk_norm:
            q_h = _rms(q_h, spec.norm_eps) * own["attention.q_norm.weight"]
            k_h = _rms(k_h, spec.norm_eps) * own["attention.k_norm.weight"]
        if spec.positions == "rope":
            q_h, k_h = _turn(spec, q_h), _turn(spec, k_h)
        out = []
        for i in range(length):
            seen = [j for j in range(i + 1) if document[j] == document[i]]
            scores = torch.stack([q_h[i] @ k_h[j] / math.sqrt(width) for j in seen])
            weight = scores.exp() / scores.exp().sum()
            out.append(sum((w * v_h[j] for w, j in zip(weight, seen, strict=True)), torch.zeros_like(v_h[0])))
        heads.append(torch.stack(out))
    return _linear(own, "attention.o_proj", torch.cat(heads, dim=1))


def _turn(spec: ModelSpec, x: Tensor) -> Tensor:
    """The pair (i, i + K/2) of position p, as a complex number, times e^(i p theta^(-2i/K))."""
    half = spec.head_dim // 2
    pairs = torch.complex(x[:, :half], x[:, half:])
    angle = torch.tensor(
        [[p * spec.rope_theta ** (-2 * i / spec.head_dim) for i in range(half)] for p in range(x.shape[0])],
        dtype=x.dtype,
    )
    turned = pairs * torch.exp(1j * angle)
    return torch.cat((turned.real, turned.imag), dim=1)


def _mlp(spec: ModelSpec, own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    up = _linear(own, "mlp.up_proj", x)
    if spec.mlp == "swiglu":
        gate = _linear(own, "mlp.gate_proj", x)
        return _linear(own, "mlp.down_proj", gate / (1 + (-gate).exp()) * up)
    inner = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return _linear(own, "mlp.down_proj", inner)


def _linear(own: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ own[f"{name}.weight"].T
    return y + own[f"{name}.bias"] if f"{name}.bias" in own else y


def _norm(spec: ModelSpec, own: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    if spec.norm == "rmsnorm":
        return _rms(x, spec.norm_eps) * own[f"{name}.weight"]
    centred = x - x.mean(dim=-1, keepdim=True)
    y = centred / (centred.pow(2).mean(dim=-1, keepdim=True) + spec.norm_eps).sqrt() * own[f"{name}.weight"]
    return y + own[f"{name}.bias"] if f"{name}.bias" in own else y


def _rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(dim=-1, keepdim=True) + eps).sqrt()
