"""What a published table of scaling efficiencies tells of the set-ups behind it.

A practitioner's guide (N. Dixit, SIVARO, "What are the basics of distributed training?", July 2026) gives tokens/s of a 7B
model of Llama's shape on 8 to 32 devices: 4,096 tokens a sequence, hybrid sharding (within a node, replicas between
nodes), 8 sequences a device and micro-batch, 4 micro-batches a step. Each row is one node's rate with what the sum of
gradients between nodes adds to a step. What that sum costs depends on four habits, and the fewest bad ones that come
within `WITHIN` of a row are named; the difference to the right set-up is what mending them gains. Imports no torch.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from paceline.cluster.catalogue import device, fabric
from paceline.model.spec import ModelSpec, parameter_count
from paceline.parallel.layout import Layout
from paceline.plan.network import Group, seconds_of
from paceline.plan.setting import Setting

WITHIN = 0.05
"""Efficiency to which a row must be met."""

SPEC = ModelSpec(
    preset="7B", num_layers=32, dim=4096, num_heads=32, num_kv_heads=32, head_dim=128, ffn_dim=11008, vocab_size=32000,
    tie_embeddings=False, max_sequence_length=4096,
)  # fmt: skip
"""The guide names no dimensions: those of Llama 2 7B."""

MICROBATCHES, MICROBATCH, LENGTH, DEVICES = 4, 8, 4096, 8

HIDDEN = 0.9
"""Share of a sum that a right set-up runs beside the last backward pass, as `plan/software` has it for our own."""


class Row(msgspec.Struct, frozen=True):
    """A line of the table. `alone`: tokens/s of one such node; the guide gives them for A100, and for H100 by its 0.93."""

    nodes: int
    device: str
    fabric: str
    tokens_per_second: float
    efficiency: float
    alone: float


ROWS = (
    Row(1, "a100-sxm-80g", "", 18_000, 1.0, 18_000),
    Row(2, "a100-sxm-80g", "roce100", 30_500, 0.85, 18_000),
    Row(2, "a100-sxm-80g", "hdr200", 34_200, 0.95, 18_000),
    Row(4, "a100-sxm-80g", "hdr200", 68_500, 0.95, 18_000),
    Row(4, "h100-sxm", "ndr400", 110_000, 0.93, 110_000 / 4 / 0.93),
)


class Habits(msgspec.Struct, frozen=True):
    """How gradients are summed between nodes; all false is the right way."""

    every_microbatch: bool = False
    fp32: bool = False
    one_card: bool = False
    exposed: bool = False

    @property
    def bad(self) -> int:
        return sum(msgspec.structs.astuple(self))

    def __str__(self) -> str:
        words = {
            "every_microbatch": "a sum after every micro-batch", "fp32": "in fp32",
            "one_card": "over one network card a node",
            "exposed": "with nothing running beside it",
        }  # fmt: skip
        told = [text for name, text in words.items() if getattr(self, name)]
        return ", ".join(told) or "one sum a step, in bf16, over a card a device, beside the backward pass"


def efficiency(row: Row, habits: Habits) -> float:
    """Of the rate of as many single nodes."""
    if row.nodes == 1:
        return 1.0
    alone = MICROBATCHES * MICROBATCH * LENGTH * DEVICES / row.alone
    return alone / (alone + sum_seconds(row, habits))


def sum_seconds(row: Row, habits: Habits) -> float:
    """Seconds that a step waits for the sums of gradients between nodes."""
    found = device(row.device)
    setting = Setting(
        name="table", spec=SPEC, device=found, nodes=row.nodes, devices_per_node=DEVICES, link=found.link,
        fabric=fabric(row.fabric + ("x1" if habits.one_card else ""), DEVICES),
        layout=Layout(dp_replicate=row.nodes, dp_shard=DEVICES), microbatch=MICROBATCH, accumulation=MICROBATCHES,
        sequence_length=LENGTH,
    )  # fmt: skip
    size = (4 if habits.fp32 else 2) * parameter_count(SPEC) / DEVICES
    once = seconds_of("all_reduce", size, SPEC.num_layers + 1, Group(row.nodes, 1), setting)
    return once * (MICROBATCHES if habits.every_microbatch else 1) * (1.0 if habits.exposed else 1 - HIDDEN)


def explain(row: Row) -> Habits | None:
    """The fewest bad habits that meet a row within `WITHIN`, the nearest of as many; None where none do."""
    meeting = [h for h in all_habits() if abs(efficiency(row, h) - row.efficiency) <= WITHIN]
    return min(meeting, key=lambda h: (h.bad, abs(efficiency(row, h) - row.efficiency)), default=None)


def all_habits() -> list[Habits]:
    return [Habits(*given) for given in itertools.product((False, True), repeat=4)]


def table() -> list[dict[str, Any]]:
    """Each row with the efficiency of a right set-up, the habits that explain it, and what mending them gains."""
    found = []
    for row in ROWS:
        right, habits = efficiency(row, Habits()), explain(row)
        best = right * row.nodes * row.alone
        found.append({
            **msgspec.structs.asdict(row), "right_efficiency": right, "habits": str(habits) if habits is not None else None,
            "explained_efficiency": None if habits is None else efficiency(row, habits),
            "mended_tokens_per_second": best, "gain": best / row.tokens_per_second - 1,
        })  # fmt: skip
    return found
