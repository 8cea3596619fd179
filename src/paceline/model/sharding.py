"""How each kind of weight may be split between the ranks of a tensor-parallel group. Imports no torch.

The model names the role of every tensor (`model.spec.parameters`); a strategy reads this table and decides. A linear
layer computes y = x W^T + b, with W of shape (outputs, inputs):

column      rows of W are split: each rank makes a slice of the outputs from the whole input
row         columns of W are split: each rank holds a slice of the inputs, and the partial outputs are summed
vocabulary  rows of a table of tokens are split: lookups and losses outside a rank's rows come from the others
replicated  whole on every rank; where the ranks hold slices of the sequence, its gradient is summed over them
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Split(NamedTuple):
    """`kind` of split, the tensor `dim` it cuts (None where whole), and the `unit` that must not be cut in two."""

    kind: Literal["column", "row", "vocabulary", "replicated"]
    dim: int | None
    unit: Literal["vocab_size", "num_heads", "num_kv_heads", "ffn_dim"] | None


_WHOLE = Split("replicated", None, None)

SHARDING: dict[str, Split] = {
    "embedding": Split("vocabulary", 0, "vocab_size"),
    "head": Split("vocabulary", 0, "vocab_size"),
    "position_embedding": _WHOLE,
    "norm": _WHOLE,
    "head_norm": _WHOLE,
    "query": Split("column", 0, "num_heads"),
    "query_bias": Split("column", 0, "num_heads"),
    "key_value": Split("column", 0, "num_kv_heads"),
    "key_value_bias": Split("column", 0, "num_kv_heads"),
    "attention_output": Split("row", 1, "num_heads"),
    # Added once, after the partial sums.
    "attention_output_bias": _WHOLE,
    "mlp_input": Split("column", 0, "ffn_dim"),
    "mlp_input_bias": Split("column", 0, "ffn_dim"),
    "mlp_output": Split("row", 1, "ffn_dim"),
    "mlp_output_bias": _WHOLE,
}
"""Role of `model.spec.Parameter` to its split."""
