"""What tensor parallelism sends. Pure arithmetic; held to what ran by `tests/conformance`.

With T tokens of a micro-batch on this rank's replica, D the width, n blocks: a tensor of T x D numbers travels at 4 n + 2
places forward and at as many backward, twice per branch of a block and once each at the embedding and at the head.

    sequence parallel   each place is an all-gather or a reduce-scatter: 2 n + 1 of each forward, the mirror backward
    without             half of the places are nothing, the other half an all-reduce, which carries the bytes of both

The loss sends one number and then two per token. All of it waits: nothing else is there to compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.model.sharding import SHARDING
from paceline.model.spec import ModelSpec, parameters
from paceline.parallel.strategy import Collective, Work
from paceline.parallel.tensor.config import AXIS, TensorConfig, is_partial, kv_copies


def exchange(
    work: Work, config: TensorConfig, ranks_of_sequence: int = 1, *, embeds: bool = True, ends: bool = True
) -> list[Collective]:
    """The collectives of all forward and backward passes of an optimizer step.

    Args:
        ranks_of_sequence: degree of `cp`.
        embeds, ends: whether this rank's blocks follow the embedding, and are followed by the head and the loss.
    """
    spec, times = work.spec, work.accumulation
    tokens = work.microbatch * work.sequence_length // ranks_of_sequence
    product, stream = (tokens * spec.dim * width for width in (work.compute_bytes, work.stream_bytes))
    branches = 2 * spec.num_layers
    left = branches * product + embeds * stream
    again = _again(work)
    found = []
    if config.sequence_parallel:
        inputs, outputs = "inputs of products", "outputs of products"
        found = [
            _of("all_gather", times * (branches + ends), times * (branches + ends) * product, "forward", inputs),
            _of("reduce_scatter", times * (branches + embeds), times * left, "forward", outputs),
            _of("all_gather", times * (branches + embeds), times * left, "backward", outputs),
            _of("reduce_scatter", times * (branches + ends), times * (branches + ends) * product, "backward", inputs),
            _of("all_gather", times * again[0], times * again[0] * product, "backward", f"{inputs}, recomputed"),
            _of("reduce_scatter", times * again[1], times * again[1] * product, "backward", f"{outputs}, recomputed"),
        ]
    else:
        found = [
            _of("all_reduce", times * (branches + embeds), times * left, "forward", "outputs"),
            _of(
                "all_reduce",
                times * (branches + ends),
                times * (branches + ends) * product,
                "backward",
                "gradients of inputs",
            ),
            _of("all_reduce", times * again[1], times * again[1] * product, "backward", "outputs, recomputed"),
        ]
    return [*found, _loss(work, tokens)] if ends else found


def partial_sums(spec: ModelSpec, config: TensorConfig, held_bytes: Mapping[str, int]) -> list[Collective]:
    """Sums of the gradients that ranks have a part of each, once a step.

    Args:
        held_bytes: of this rank's part of each gradient, by name.
    """
    own = [p for p in parameters(spec) if p.name in held_bytes]
    norms = [held_bytes[p.name] for p in own if is_partial(p, config.sequence_parallel)]
    heads = [held_bytes[p.name] for p in own if SHARDING[p.role].unit == "num_kv_heads"]
    found = [Collective("all_reduce", AXIS, int(bool(norms)), sum(norms), "nothing", "gradients of norms")]
    if kv_copies(spec, config.degree) > 1:
        found.append(
            Collective("all_reduce", AXIS, 1, sum(heads), "nothing", "gradients of shared key and value heads")
        )
    return found


def _of(kind: str, count: int, size_bytes: int, when: str, what: str) -> Collective:
    return Collective(kind, AXIS, count, size_bytes, "nothing", f"{what}, {when}")  # type: ignore[arg-type]


def _loss(work: Work, tokens: int) -> Collective:
    chunks = math.ceil(tokens / work.loss_chunk_tokens) if work.loss_chunk_tokens else 1
    # A float16 loss makes each chunk's logits anew in its backward.
    anew = 2 if work.loss_chunk_tokens and work.half else 1
    count = 2 * chunks * anew * work.accumulation
    size = 3 * tokens * max(4, work.compute_bytes) * anew * work.accumulation
    return Collective("all_reduce", AXIS, count, size, "nothing", "loss")


def _again(work: Work) -> tuple[int, int]:
    """All-gathers and reduce-scatters that recomputed blocks run anew; what a block ends with is not needed again."""
    if work.recompute == "none":
        return 0, 0
    layers = work.spec.num_layers
    return 2 * layers, (2 if work.spec.dropout else 1) * layers
