"""What context parallelism sends, and what it holds for a moment. Pure arithmetic.

With B sequences of L positions, H query heads, G key and value heads of width K in elements of E bytes, on a rank of tp
its share of the heads, each block of each micro-batch runs over cp

    gather      all-gather of keys and values, forward                2 B L G K E   (in calls of at most GATHER_BYTES)
                the same, before the backward of attention            2 B L G K E   (what it gathered was not kept)
                reduce-scatter of their gradients                     2 B L G K E
    alltoall    all-to-all of queries, keys and values, forward       B (L / cp) (H + 2 G') K E   with G' = max(G, cp)
                all-to-all of attention's output, forward             B (L / cp) H K E
                both again for their gradients

and the forward's part once more where a block is recomputed. Attention with dropout, which is written out, keeps what it
gathered. Weights are whole on every rank of cp: they are replicated, or sharded over cp too, by the data strategies.
"""

from __future__ import annotations

from paceline.parallel.context.config import AXIS, ContextConfig, exchanged_kv_heads, heads_at_once
from paceline.parallel.layout import Layout
from paceline.parallel.strategy import Collective, Work


def exchange(work: Work, layout: Layout, config: ContextConfig) -> list[Collective]:
    """Collectives over cp of one optimizer step on a rank. None of them overlaps: attention waits for each."""
    if layout.cp == 1:
        return []
    blocks = work.spec.num_layers * work.accumulation
    runs = blocks if work.recompute == "none" else 2 * blocks
    if config.method == "alltoall":
        size = sum(_exchanged_bytes(work, layout))
        return [
            Collective("all_to_all", AXIS, 2 * runs, runs * size, "nothing", "heads for positions, and back"),
            Collective("all_to_all", AXIS, 2 * blocks, blocks * size, "nothing", "their gradients"),
        ]
    size, calls = gathered_bytes(work, layout), gather_calls(work, layout)
    again = 0 if work.spec.attention_dropout else blocks
    return [
        Collective("all_gather", AXIS, calls * runs, runs * size, "nothing", "keys and values, forward"),
        Collective("all_gather", AXIS, calls * again, again * size, "nothing", "keys and values, backward"),
        Collective("reduce_scatter", AXIS, calls * blocks, blocks * size, "nothing", "gradients of keys and values"),
    ]


def gathered_bytes(work: Work, layout: Layout) -> int:
    """Keys and values of one block over the whole sequence, on every rank."""
    _, kv_heads = heads_of(work, layout)
    return 2 * work.microbatch * work.sequence_length * kv_heads * work.spec.head_dim * work.compute_bytes


def gather_calls(work: Work, layout: Layout) -> int:
    """Calls that gather the keys and values of one block, some heads at a time; all at once where attention drops."""
    _, kv_heads = heads_of(work, layout)
    if work.spec.attention_dropout:
        return 1
    lengths = (work.microbatch, work.sequence_length, work.spec.head_dim, work.compute_bytes)
    return -(-kv_heads // heads_at_once(kv_heads, *lengths))


def transient_bytes(work: Work, layout: Layout, config: ContextConfig) -> int:
    """What one block's attention holds at once for a moment, beyond what is kept: in its backward, all keys and values,
    their gradients, and these in the order in which they are sent; or what is exchanged, before and after."""
    if layout.cp == 1:
        return 0
    if config.method == "alltoall":
        return 2 * _exchanged_bytes(work, layout)[0]
    return -(-3 * gathered_bytes(work, layout) // gather_calls(work, layout))


def kept_twice_bytes(work: Work, layout: Layout, config: ContextConfig) -> int:
    """What selective recomputation keeps of attention on a rank beyond its output: that is put together from two parts,
    before a chunk and inside it, and both of them are kept."""
    if layout.cp == 1 or config.method == "alltoall" or work.recompute != "selective" or work.spec.attention_dropout:
        return 0
    heads, _ = heads_of(work, layout)
    tokens = work.microbatch * work.sequence_length // layout.cp
    numbers = work.spec.head_dim * work.compute_bytes + max(4, work.compute_bytes)
    return work.spec.num_layers * tokens * heads * numbers


def heads_of(work: Work, layout: Layout) -> tuple[int, int]:
    """Query heads, and key and value heads, of a rank of tp; the latter are held by several where they are too few."""
    return work.spec.num_heads // layout.tp, max(1, work.spec.num_kv_heads // layout.tp)


def _exchanged_bytes(work: Work, layout: Layout) -> tuple[int, int]:
    """Queries with keys and values, and the output alone."""
    heads, kv_heads = heads_of(work, layout)
    head_bytes = work.microbatch * (work.sequence_length // layout.cp) * work.spec.head_dim * work.compute_bytes
    return (heads + 2 * exchanged_kv_heads(kv_heads, layout.cp)) * head_bytes, heads * head_bytes
