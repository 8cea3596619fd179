# ruff: noqa: N815 -- tensors carry their shape as a suffix, in tuples too
"""The decoder: Llama, Qwen and GPT-2 are settings of one module.

Positions run over the whole sequence, across document borders: rotary positions are relative, so documents need no
restart, and learned positions see every row of their table. A caller that wants a restart gives `positions_BL`.

Shapes: B sequences, L positions, D width, H query heads, G key and value heads, K head width, F inner width of the
feed-forward layer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.model.attention import Attention, Documents, sdpa, sdpa_documents
from paceline.model.dropout import (
    ATTENTION,
    ATTENTION_OUTPUT,
    MLP_OUTPUT,
    AttentionDropout,
    DropoutKey,
    block_keys,
    dropout,
)
from paceline.model.norm import RMSNorm, make_norm
from paceline.model.rotary import rotary_table, rotate
from paceline.model.spec import ModelSpec

Device = torch.device | str | None
Head = Callable[[Tensor, Tensor], Tensor]
"""What may take the output head's place: (h_BLD, weight_VD) to anything, such as a loss over logits never made whole."""


class Share:
    """How much of the residual stream and of the vocabulary a rank has; a strategy puts its own in the place of this one,
    where a rank has all of both. The length of what the model is given is a multiple of `length_multiple`."""

    length_multiple: int = 1

    def whole(self, x_BLD: Tensor) -> Tensor:
        """All positions, before products with weights, of which a rank may hold a slice."""
        return x_BLD

    def own_positions(self, positions_BL: Tensor) -> Tensor:
        """The positions of this rank's part of the residual stream."""
        return positions_BL

    def whole_logits(self, logits_BLV: Tensor) -> Tensor:
        """Logits of the whole vocabulary."""
        return logits_BLV


class Passage(NamedTuple):
    """A stretch of a decoder, which a forward runs in the place of all of it.

    `entering_BLD` takes the place of the embedding; without a `head` the residual stream is what comes out.
    """

    blocks: range
    entering_BLD: Tensor | None
    head: bool


class BlockDropout(NamedTuple):
    """What one block's dropout follows from: a word per site and sample, the positions (1 or B, L) in attention, and
    those of the rank's part of the residual stream."""

    keys_SB: Tensor
    positions_BL: Tensor
    own_positions_BL: Tensor


class SelfAttention(nn.Module):
    """Causal grouped-query self-attention; the kernel is the injected `attend`."""

    def __init__(self, spec: ModelSpec, attention: Attention, device: Device = None) -> None:
        super().__init__()
        self.head_dim, self.dropout = spec.head_dim, spec.attention_dropout
        self.attend = attention
        self.first_head = 0
        query_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        bias = spec.bias or spec.qkv_bias
        self.q_proj = nn.Linear(spec.dim, query_dim, bias, device)
        self.k_proj = nn.Linear(spec.dim, kv_dim, bias, device)
        self.v_proj = nn.Linear(spec.dim, kv_dim, bias, device)
        self.o_proj = nn.Linear(query_dim, spec.dim, spec.bias, device)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, device) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, device) if spec.qk_norm else None

    def forward(
        self,
        x_BLD: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        documents: Documents | None,
        dropped: BlockDropout | None,
    ) -> Tensor:
        # A slice of the heads may be all that a rank has: their number follows from the layer, not from the spec.
        q_BLHK = self.q_proj(x_BLD).unflatten(-1, (-1, self.head_dim))
        k_BLGK = self.k_proj(x_BLD).unflatten(-1, (-1, self.head_dim))
        v_BLGK = self.v_proj(x_BLD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHK, k_BLGK = self.q_norm(q_BLHK).to(v_BLGK.dtype), self.k_norm(k_BLGK).to(v_BLGK.dtype)
        if rotary is not None:
            q_BLHK, k_BLGK = rotate(q_BLHK, *rotary), rotate(k_BLGK, *rotary)
        o_BHLK = self.attend(
            q_BLHK.transpose(1, 2),
            k_BLGK.transpose(1, 2),
            v_BLGK.transpose(1, 2),
            documents,
            scale=self.head_dim**-0.5,
            dropout=self._attention_dropout(dropped, q_BLHK),
        )
        output: Tensor = self.o_proj(o_BHLK.transpose(1, 2).flatten(2))
        return output

    def _attention_dropout(self, dropped: BlockDropout | None, q_BLHK: Tensor) -> AttentionDropout | None:
        if dropped is None or self.dropout == 0:
            return None
        heads_H = torch.arange(q_BLHK.shape[2], device=q_BLHK.device) + self.first_head
        return AttentionDropout(self.dropout, dropped.keys_SB[ATTENTION], dropped.positions_BL, heads_H)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, spec: ModelSpec, device: Device = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.dim, spec.ffn_dim, spec.bias, device)
        self.up_proj = nn.Linear(spec.dim, spec.ffn_dim, spec.bias, device)
        self.down_proj = nn.Linear(spec.ffn_dim, spec.dim, spec.bias, device)

    def forward(self, x_BLD: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x_BLD)) * self.up_proj(x_BLD))
        return output


class GELU(nn.Module):
    """down(gelu(up(x))), with GELU's tanh form as in GPT-2 (Hendrycks and Gimpel 2016, arXiv 1606.08415)."""

    def __init__(self, spec: ModelSpec, device: Device = None) -> None:
        super().__init__()
        self.up_proj = nn.Linear(spec.dim, spec.ffn_dim, spec.bias, device)
        self.down_proj = nn.Linear(spec.ffn_dim, spec.dim, spec.bias, device)

    def forward(self, x_BLD: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.gelu(self.up_proj(x_BLD), approximate="tanh"))
        return output


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Nothing in it depends on its number: all blocks compile as one."""

    def __init__(self, spec: ModelSpec, attention: Attention, device: Device = None) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.share = Share()
        self.attention_norm = make_norm(spec, device)
        self.attention = SelfAttention(spec, attention, device)
        self.mlp_norm = make_norm(spec, device)
        self.mlp = SwiGLU(spec, device) if spec.mlp == "swiglu" else GELU(spec, device)

    def forward(
        self,
        x_BLD: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        documents: Documents | None = None,
        dropped: BlockDropout | None = None,
    ) -> Tensor:
        h_BLD = self.share.whole(for_matmul(self.attention_norm(x_BLD)))
        h_BLD = self.attention(h_BLD, rotary, documents, dropped)
        x_BLD = x_BLD + self._drop(h_BLD, dropped, ATTENTION_OUTPUT)
        h_BLD = self.mlp(self.share.whole(for_matmul(self.mlp_norm(x_BLD))))
        return x_BLD + self._drop(h_BLD, dropped, MLP_OUTPUT)

    def _drop(self, h_BLD: Tensor, dropped: BlockDropout | None, site: int) -> Tensor:
        if dropped is None or self.dropout == 0:
            return h_BLD
        return dropout(h_BLD, self.dropout, dropped.keys_SB[site], dropped.own_positions_BL)


class Decoder(nn.Module):
    """A decoder-only language model: tokens_BL to logits_BLV. Parameters as `model.spec.parameters` lists them.

    Built on any device, the meta device too; weights are torch's defaults until `model.init.initialise`. Tied
    embeddings are one parameter read twice, so that nothing can part them.
    """

    def __init__(self, spec: ModelSpec, attention: Attention = sdpa, device: Device = None) -> None:
        super().__init__()
        self.spec = spec
        self.share = Share()
        self.passage: Passage | None = None
        self.embedding = _table(spec.vocab_size, spec.dim, device)
        self.position_embedding = None
        if spec.positions == "learned":
            self.position_embedding = _table(spec.max_sequence_length, spec.dim, device)
        self.blocks = nn.ModuleDict({str(n): Block(spec, attention, device) for n in range(spec.num_layers)})
        self.norm = make_norm(spec, device)
        self.lm_head = None if spec.tie_embeddings else nn.Linear(spec.dim, spec.vocab_size, False, device)

    def forward(
        self,
        tokens_BL: Tensor,
        documents: Documents | None = None,
        positions_BL: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """Logits. `positions_BL`: (B or 1, L); by default 0, 1, ... L - 1. `dropout_key` is needed in training where
        the spec drops anything, and not looked at otherwise. A `head` takes the last norm's output and the head's
        weight, and what it returns takes the place of the logits: it runs inside the forward, where strategies that
        split weights have them whole.

        Raises:
            JobError: the sequence is longer than the spec allows.
            ValueError: dropout without a key.
        """
        if positions_BL is None:
            self._check_length(tokens_BL.shape[1])
            positions_BL = torch.arange(tokens_BL.shape[1], device=tokens_BL.device).unsqueeze(0)
        own_positions_BL = self.share.own_positions(positions_BL)
        x_BLD = self._enter(tokens_BL, own_positions_BL)
        rotary = rotary_table(self.spec, positions_BL, x_BLD.dtype) if self.spec.positions == "rope" else None
        documents = self._with_bias(documents, x_BLD, positions_BL.shape[1])
        keys = self._block_keys(dropout_key)
        for name, block in self.blocks.items():
            if self.passage is not None and int(name) not in self.passage.blocks:
                continue
            dropped = None if keys is None else BlockDropout(keys[int(name)], positions_BL, own_positions_BL)
            x_BLD = block(x_BLD, rotary, documents, dropped)
        if self.passage is not None and not self.passage.head:
            return x_BLD
        h_BLD = self.share.whole(for_matmul(self.norm(x_BLD)))
        if head is not None:
            return head(h_BLD, self.embedding.weight if self.lm_head is None else self.lm_head.weight)
        logits_BLV: Tensor = F.linear(h_BLD, self.embedding.weight) if self.lm_head is None else self.lm_head(h_BLD)
        return self.share.whole_logits(logits_BLV)

    def keep(self, blocks: Iterable[int], *, embedding: bool, head: bool) -> None:
        """Drop all but these blocks, and what stands before and after them; parameters keep their names.

        What is left runs passage by passage. A tied table stays with either of its two uses.
        """
        kept = set(blocks)
        for name in [name for name in self.blocks if int(name) not in kept]:
            del self.blocks[name]
        if not embedding:
            self.position_embedding = None
        if not embedding and not (head and self.spec.tie_embeddings):
            self.register_module("embedding", None)
        if not head:
            self.lm_head = None
            self.register_module("norm", None)

    def residual_shape(self, tokens_BL: Tensor) -> tuple[int, int, int]:
        """Shape of this rank's residual stream over its tokens."""
        positions_BL = torch.arange(tokens_BL.shape[1], device="meta").unsqueeze(0)
        return tokens_BL.shape[0], self.share.own_positions(positions_BL).shape[1], self.spec.dim

    def _enter(self, tokens_BL: Tensor, own_positions_BL: Tensor) -> Tensor:
        if self.passage is not None and self.passage.entering_BLD is not None:
            return self.passage.entering_BLD
        x_BLD: Tensor = self.embedding(tokens_BL)
        if self.position_embedding is not None:
            x_BLD = x_BLD + self.position_embedding(own_positions_BL)
        return x_BLD

    def replace_share(self, share: Share) -> None:
        """Another share of the residual stream and the vocabulary, in every block too."""
        self.share = share
        for block in self.blocks.values():
            assert isinstance(block, Block)
            block.share = share

    def replace_attention(self, attention: Attention) -> None:
        """Another kernel in every block, such as one over a split sequence."""
        for block in self.blocks.values():
            assert isinstance(block, Block)
            block.attention.attend = attention

    def _with_bias(self, documents: Documents | None, x_BLD: Tensor, length: int) -> Documents | None:
        """The bias of torch's masked kernels, made once for all blocks where their attention will want it."""
        first = next(iter(self.blocks.values()), None)
        if documents is None or not isinstance(first, Block):
            return documents
        prepare = sdpa_documents if first.attention.attend is sdpa else getattr(first.attention.attend, "prepare", None)
        if prepare is None:
            return documents
        dropping = self.training and self.spec.attention_dropout > 0
        prepared: Documents = prepare(documents, x_BLD.shape[0], length, matmul_dtype(x_BLD), dropping)
        return prepared

    def _block_keys(self, key: DropoutKey | None) -> Tensor | None:
        if not self.training or (self.spec.dropout == 0 and self.spec.attention_dropout == 0):
            return None
        if key is None:
            raise ValueError("a decoder with dropout is trained with a dropout_key; call eval() to run it without")
        return block_keys(key, self.spec.num_layers)

    def _check_length(self, length: int) -> None:
        if length > self.spec.max_sequence_length:
            raise JobError(
                f"{length} tokens, but the model takes at most {self.spec.max_sequence_length}",
                key="data.sequence_length",
                values={"sequence_length": length, "max_sequence_length": self.spec.max_sequence_length},
                hint="Shorten data.sequence_length, or raise model.max_sequence_length.",
            )


def for_matmul(x: Tensor) -> Tensor:
    """x in the type of matrix products: one cast, where each of several layers under autocast would make its own."""
    return x.to(matmul_dtype(x))


def matmul_dtype(x: Tensor) -> torch.dtype:
    """The type in which a linear layer would multiply x: autocast's where that is on, else x's own."""
    kind = x.device.type
    if x.dtype == torch.float32 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _table(rows: int, width: int, device: Device) -> nn.Embedding:
    """An embedding. On the meta device no values are drawn, as that would load torch's compiler, for two seconds."""
    weight_VD = torch.empty(rows, width, device=device)
    if not weight_VD.is_meta:
        nn.init.normal_(weight_VD)
    return nn.Embedding(rows, width, _weight=weight_VD, device=device)
