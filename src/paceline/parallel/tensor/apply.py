"""Cuts a decoder over the ranks of a tensor-parallel group: each keeps slices of the weights as plain tensors.

Between the products a rank holds a slice of the positions (sequence parallel) or all of them; before a product that makes
a slice of the outputs all positions are there, after one that sums over a slice of the inputs the sums are taken. What
torch's own distributed tensors would do at each operator is done here at four places of a block (docs/decisions/0007).

Shapes: B sequences, L positions, D width, V vocabulary.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.loss.vocabulary import VocabularyPart
from paceline.model.sharding import SHARDING
from paceline.model.spec import ModelSpec, parameters
from paceline.model.transformer import Block, Decoder, Share
from paceline.parallel.mesh import Mesh, subgroup
from paceline.parallel.split import ModelSplit, PartialGradients
from paceline.parallel.tensor.collectives import (
    gather_columns,
    gather_positions,
    sum_gradients,
    sum_outputs,
    sum_to_slice,
)
from paceline.parallel.tensor.config import AXIS, TensorConfig, copies_of, is_partial, kv_copies, placements


class TensorShare(Share):
    """A rank's share where weights are split.

    Args:
        group: ranks that hold the slices.
        sequence_parallel: between products this rank has its slice of the positions.
        vocabulary_sizes: rows of each rank.
    """

    def __init__(self, group: dist.ProcessGroup, sequence_parallel: bool, vocabulary_sizes: list[int]) -> None:
        self.group, self.sequence_parallel, self.vocabulary_sizes = group, sequence_parallel, vocabulary_sizes
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.length_multiple = self.ranks if sequence_parallel else 1

    def whole(self, x_BLD: Tensor) -> Tensor:
        return gather_positions(x_BLD, self.group) if self.sequence_parallel else sum_gradients(x_BLD, self.group)

    def leave(self, x_BLD: Tensor) -> Tensor:
        """From partial sums of all positions to what this rank holds between products."""
        return sum_to_slice(x_BLD, self.group) if self.sequence_parallel else sum_outputs(x_BLD, self.group)

    def own_positions(self, positions_BL: Tensor) -> Tensor:
        if not self.sequence_parallel:
            return positions_BL
        length = positions_BL.shape[1] // self.ranks
        return positions_BL[:, self.rank * length : (self.rank + 1) * length]

    def whole_logits(self, logits_BLV: Tensor) -> Tensor:
        return gather_columns(logits_BLV, self.vocabulary_sizes, self.group)


class RowLinear(nn.Linear):
    """A linear layer over a slice of the inputs: its outputs are summed over the ranks, and its bias is added once."""

    def __init__(self, whole: nn.Linear, share: TensorShare) -> None:
        super().__init__(1, 1, whole.bias is not None, device="meta")
        self.weight, self.bias = whole.weight, whole.bias
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.share = share

    def forward(self, x_BLD: Tensor) -> Tensor:
        y_BLD = self.share.leave(F.linear(x_BLD, self.weight))
        return y_BLD if self.bias is None else y_BLD + self.bias.to(y_BLD.dtype)


class VocabularyEmbedding(nn.Embedding):
    """A lookup in a slice of the table: rows that other ranks hold come from them."""

    def __init__(self, whole: nn.Embedding, first: int, share: TensorShare) -> None:
        super().__init__(len(whole.weight), whole.embedding_dim, _weight=whole.weight)
        self.weight = whole.weight
        self.first, self.share = first, share

    def forward(self, tokens_BL: Tensor) -> Tensor:
        rows_BL = tokens_BL - self.first
        elsewhere_BL = (rows_BL < 0) | (rows_BL >= self.weight.shape[0])
        x_BLD = F.embedding(rows_BL.masked_fill(elsewhere_BL, 0), self.weight)
        return self.share.leave(x_BLD.masked_fill(elsewhere_BL.unsqueeze(-1), 0))


def split_decoder(model: Decoder, spec: ModelSpec, mesh: Mesh, config: TensorConfig) -> ModelSplit:
    """Cut a decoder on the meta device in place; its parameters keep their names and get the shapes of this rank's parts.

    Args:
        model: whole, or blocks of one.
        spec: of the whole model.
        mesh: of the layout; all ranks call this alike.
        config: with a degree above 1.
    """
    group = mesh.group(AXIS)
    assert group is not None
    rank, held = dist.get_rank(group), {n for n, _ in model.named_parameters()}
    boxes = {n: p for n, p in placements(spec, config.degree, rank).items() if n in held}
    first, sizes = vocabulary_rows(spec, config.degree)
    share = TensorShare(group, config.sequence_parallel, sizes)
    for name, box in boxes.items():
        _reshape(model, name, box.box.shape)
    model.replace_share(share)
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.attention.o_proj = RowLinear(block.attention.o_proj, share)
        block.attention.first_head = spec.num_heads // config.degree * rank
        block.mlp.down_proj = RowLinear(block.mlp.down_proj, share)
    if isinstance(model.embedding, nn.Embedding):
        model.embedding = VocabularyEmbedding(model.embedding, first[rank], share)
    return ModelSplit(boxes, _partial(spec, mesh, config, held), _copies(spec, config.degree, held))


def vocabulary_rows(spec: ModelSpec, degree: int) -> tuple[list[int], list[int]]:
    """First row and number of rows of each rank."""
    ends = [spec.vocab_size * at // degree for at in range(degree + 1)]
    return ends[:-1], [end - begin for begin, end in itertools.pairwise(ends)]


def vocabulary_part(spec: ModelSpec, mesh: Mesh) -> VocabularyPart:
    """The rows whose logits this rank has."""
    group = mesh.group(AXIS)
    if group is None:
        return VocabularyPart()
    return VocabularyPart(vocabulary_rows(spec, dist.get_world_size(group))[0][dist.get_rank(group)], group)


def _partial(spec: ModelSpec, mesh: Mesh, config: TensorConfig, held: set[str]) -> list[PartialGradients]:
    """Gradients to sum: of norms over all ranks, of key and value heads over those that hold the same."""
    group = mesh.group(AXIS)
    assert group is not None
    own = [p for p in parameters(spec) if p.name in held]
    found = []
    if names := tuple(p.name for p in own if is_partial(p, config.sequence_parallel)):
        found.append(PartialGradients(group, names))
    same_heads = subgroup(mesh, AXIS, kv_copies(spec, config.degree))
    if same_heads is not None:
        names = tuple(p.name for p in own if SHARDING[p.role].unit == "num_kv_heads")
        found.append(PartialGradients(same_heads, names))
    return found


def _copies(spec: ModelSpec, degree: int, held: set[str]) -> dict[str, int]:
    return {p.name: copies_of(p, spec, degree) for p in parameters(spec) if p.name in held}


def _reshape(model: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    prefix, _, local = name.rpartition(".")
    old = model.get_parameter(name)
    if tuple(old.shape) == shape:
        return
    if not old.is_meta:
        raise ValueError(f"{name} is on {old.device}: a model is split before it has weights")
    new = nn.Parameter(torch.empty(shape, dtype=old.dtype, device="meta"), requires_grad=old.requires_grad)
    model.get_submodule(prefix).register_parameter(local, new)
