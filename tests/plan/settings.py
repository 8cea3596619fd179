"""Settings of other people's systems, small enough to read."""

from __future__ import annotations

from typing import Any

from paceline.cluster.catalogue import device
from paceline.model.spec import ModelSpec
from paceline.parallel.layout import Layout
from paceline.plan.setting import Setting


def gpt(layers: int = 8, width: int = 1024, heads: int = 16, **changes: Any) -> ModelSpec:
    """A GPT as Megatron trains it: GELU, layer norm, dropout, tied embeddings."""
    fields: dict[str, Any] = {
        "preset": "gpt", "num_layers": layers, "dim": width, "num_heads": heads, "num_kv_heads": heads,
        "head_dim": width // heads, "ffn_dim": 4 * width, "vocab_size": 51200, "tie_embeddings": True,
        "max_sequence_length": 2048, "norm": "layernorm", "mlp": "gelu", "positions": "learned", "bias": True,
        "dropout": 0.1, "attention_dropout": 0.1,
    }  # fmt: skip
    return ModelSpec(**{**fields, **changes})


def llama(layers: int = 32, **changes: Any) -> ModelSpec:
    """Llama 3 8B."""
    fields: dict[str, Any] = {
        "preset": "llama3-8b", "num_layers": layers, "dim": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
        "ffn_dim": 14336, "vocab_size": 128256, "tie_embeddings": False, "max_sequence_length": 8192,
    }  # fmt: skip
    return ModelSpec(**{**fields, **changes})


def setting(spec: ModelSpec | None = None, layout: Layout | None = None, **changes: Any) -> Setting:
    """One device of 80 GiB for each rank of the layout."""
    layout = layout or Layout()
    found = device("a100-sxm-80g")
    fields: dict[str, Any] = {
        "name": "a run", "spec": spec or gpt(), "device": found, "nodes": -(-layout.world_size // 8),
        "devices_per_node": min(8, layout.world_size), "link": found.link, "fabric": None, "layout": layout,
        "microbatch": 1, "accumulation": 1, "sequence_length": 2048, "software": "megatron-2022",
        "fused_attention": False,
    }  # fmt: skip
    return Setting(**{**fields, **changes})
