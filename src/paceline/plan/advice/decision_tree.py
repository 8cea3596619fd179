"""Which axes a model of this size needs: none, data alone, those of a node, or all; beside what the search chose."""

from __future__ import annotations

from paceline.plan.advice.facts import Facts
from paceline.plan.advice.line import Advice
from paceline.units import format_bytes, format_count


def line(facts: Facts) -> Advice | None:
    if facts.devices == 1:
        return None
    state, device = facts.state_bytes, facts.memory_bytes
    node = device * facts.cluster.devices_per_node
    if state < device:
        size, axes = "one device", "data parallelism alone, plain or sharded"
    elif state < node:
        size, axes = "one node", "sharding or model axes inside the node, data parallelism across nodes"
    else:
        size, axes = "several nodes", "tensor parallelism inside nodes with sharding or a pipeline across them"
    return Advice(
        "decision_tree",
        f"By its size this model takes {size}: {axes}. The search chose {facts.best.choice.layout}.",
        f"16 bytes x {format_count(facts.parameters)} parameters = {format_bytes(state)} of weights, gradients and moments, "
        f"before activations; a device has {format_bytes(device)}, a node of {facts.cluster.devices_per_node} "
        f"{format_bytes(node)}.",
        {"state_bytes": state, "device_bytes": device, "node_bytes": node, "takes": size},
        "weight, gradient and two moments of AdamW at 4 bytes each",
    )
