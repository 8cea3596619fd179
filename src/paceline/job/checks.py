"""No setting is accepted that has no effect: rules over what the user set, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from paceline.cluster.probe import Host
from paceline.data.config import HELD_OUT
from paceline.errors import JobError
from paceline.parallel.batch import BatchPlan
from paceline.parallel.config import ParallelSection
from paceline.parallel.layout import Layout


class _Rule(NamedTuple):
    """`key` has no effect where `when(values)` holds."""

    key: str
    when: Callable[[dict[str, Any]], bool]
    reason: str
    hint: str


def _without_restarts(key: str, value: str) -> Callable[[dict[str, Any]], bool]:
    """Whether `key` asks for a restart that `max_restarts` rules out."""
    return lambda v: v["recovery.max_restarts"] == 0 and v[key] == value


def _is_several(nodes: Any) -> bool:
    return nodes is not None and int(nodes) > 1


def _is_range(procs: Any) -> bool:
    return procs is not None and procs.least < procs


_RULES = (
    *(
        _Rule(
            f"optimizer.{key}",
            lambda v: v["optimizer.name"] != "adamw",
            "belongs to adamw and has no effect on {optimizer.name}",
            "Remove it, or set optimizer.name=adamw.",
        )
        for key in ("betas", "eps")
    ),
    _Rule(
        "optimizer.momentum",
        lambda v: v["optimizer.name"] != "sgd",
        "belongs to sgd and has no effect on {optimizer.name}",
        "Remove it, or set optimizer.name=sgd; adamw's first moment is betas[0].",
    ),
    _Rule(
        "optimizer.lr_reference_batch",
        lambda v: v["optimizer.lr_scaling"] == "none",
        "has no effect with lr_scaling = none",
        'Set optimizer.lr_scaling to "linear", "sqrt" or "auto", or remove it.',
    ),
    _Rule(
        "optimizer.decay_steps",
        lambda v: v["optimizer.schedule"] != "wsd",
        "has no effect on the schedule {optimizer.schedule}",
        "Remove it, or set optimizer.schedule=wsd.",
    ),
    _Rule(
        "optimizer.min_lr_ratio",
        lambda v: v["optimizer.schedule"] == "constant",
        "has no effect on a constant schedule",
        "Remove it, or choose a schedule that decays.",
    ),
    _Rule(
        "parallel.reduce_dtype",
        lambda v: v["parallel.precision"] == "fp64" and v["parallel.reduce_dtype"] == "fp32",
        "has no effect with precision = fp64, whose gradients travel as they are",
        "Remove it, or set parallel.reduce_dtype=bf16.",
    ),
    _Rule(
        "parallel.offload_dir",
        lambda v: v["parallel.offload"] != "disk",
        "has no effect with offload = {parallel.offload}",
        "Remove it, or set parallel.offload=disk.",
    ),
    _Rule(
        "parallel.offload",
        lambda v: v["parallel.offload"] != "none" and v["optimizer.name"] != "adamw",
        "moves the moments of adamw; {optimizer.name} has none",
        "Remove it, or set optimizer.name=adamw.",
    ),
    _Rule(
        "checkpoint.keep_best",
        lambda v: v["checkpoint.keep_best"] > 0 and v["run.eval_every"] == 0,
        "has no effect with run.eval_every = 0, which evaluates after the last step only",
        "Set run.eval_every, or remove it.",
    ),
    _Rule(
        "checkpoint.keep_best",
        lambda v: v["checkpoint.keep_best"] > 0 and not _eval_sets(v),
        "has no effect without an eval set",
        "Hold data out with data.eval_fraction, name some with data.eval (evals of a Trainer), or remove it.",
    ),
    _Rule(
        "optimizer.max_bad_steps",
        lambda v: v["optimizer.bad_step"] == "stop",
        "has no effect with bad_step = stop, which ends the run at the first one",
        "Remove it, or set optimizer.bad_step=skip.",
    ),
    _Rule(
        "recovery.backoff",
        lambda v: v["recovery.max_restarts"] < 2,
        "has no effect with max_restarts = {recovery.max_restarts}: the first restart follows at once",
        "Remove it, or set recovery.max_restarts to 2 or more.",
    ),
    *(
        _Rule(
            f"recovery.{key}",
            _without_restarts(f"recovery.{key}", value),
            f"{value} has no effect with max_restarts = 0, which never starts again",
            "Remove it, or set recovery.max_restarts to 1 or more.",
        )
        for key, value in (("on_stall", "restart"), ("on_straggler", "restart-without"))
    ),
    _Rule(
        "recovery.on_straggler",
        lambda v: v["recovery.on_straggler"] == "restart-without" and not _is_range(v["launch.procs_per_node"]),
        "restart-without has no effect without a range of ranks: there is no number to go down to",
        "Remove it, or give a range such as --procs 1:4.",
    ),
)


def _check_nodes(held: dict[str, Any], is_set: Callable[[str], bool]) -> None:
    """Refuse several hosts without a place to meet, and two ranges at once."""
    nodes, procs, place = (held.get(f"launch.{key}") for key in ("nodes", "procs_per_node", "rendezvous"))
    if _is_several(nodes) and place is None:
        raise JobError(
            f"{nodes} hosts need a place to meet",
            key="launch.rendezvous",
            values={"nodes": str(nodes)},
            hint="Set launch.rendezvous=HOST:PORT, the same on all hosts, such as node0:29400.",
        )
    if _is_several(nodes) and _is_range(procs):
        raise JobError(
            f"a range of processes per host ({procs}) and several hosts ({nodes}) do not go together",
            key="launch.procs_per_node",
            values={"procs": str(procs), "nodes": str(nodes)},
            hint=f"Give one number, such as launch.procs_per_node={int(procs or 1)}, and the range in launch.nodes.",
        )
    if is_set("launch.rendezvous") and place is not None and nodes is None:
        raise JobError(
            "has no effect on one host",
            key="launch.rendezvous",
            values={"rendezvous": place},
            hint="Remove it, or say how many hosts there are with launch.nodes.",
        )


def _eval_sets(values: dict[str, Any]) -> list[str]:
    return [*([HELD_OUT] if values["data.eval_fraction"] else []), *values["data.eval"]]


def without_effect(values: Iterable[tuple[str, Any]]) -> set[str]:
    """Keys that have no effect beside the other values, whoever set them."""
    held = dict(values)
    return {rule.key for rule in _RULES if rule.when(held)}


def check_effects(values: Iterable[tuple[str, Any]], is_set: Callable[[str], bool]) -> None:
    """Refuse what the user set without effect.

    Raises:
        JobError: the first such key, with the reason.
    """
    held = dict(values)
    for rule in _RULES:
        if is_set(rule.key) and rule.when(held):
            reason = rule.reason
            for key, value in held.items():
                reason = reason.replace("{" + key + "}", str(value))
            raise JobError(reason, key=rule.key, values={rule.key: held[rule.key]}, hint=rule.hint)
    _check_best_of(held)
    _check_nodes(held, is_set)


def _check_best_of(held: dict[str, Any]) -> None:
    """Refuse a name that is no eval set, and several sets without a name."""
    chosen, names = held["checkpoint.best_of"], _eval_sets(held)
    if not held["checkpoint.keep_best"] or chosen in names or (chosen is None and len(names) == 1):
        return
    listed = ", ".join(names)
    raise JobError(
        f"{chosen!r} is no eval set; there are {listed}"
        if chosen is not None
        else f"keep_best = {held['checkpoint.keep_best']} needs the name of one of the eval sets {listed}",
        key="checkpoint.best_of",
        values={"best_of": chosen, "evals": names},
        hint=f"Set checkpoint.best_of={names[0]}.",
    )


def check_compiler(compile_it: bool | None, host: Host) -> None:
    """Refuse compilation where nothing can compile.

    Raises:
        JobError: `parallel.compile` is true and no C++ compiler is on the path (triton needs one too).
    """
    if compile_it and host.compiler is None:
        raise JobError(
            "true needs a C++ compiler and none is on the path",
            key="parallel.compile",
            hint="Install g++ (Debian: apt-get install g++), or set parallel.compile=false.",
        )


def check_reduction(parallel: ParallelSection, layout: Layout, batch: BatchPlan, is_set: Callable[[str], bool]) -> None:
    """Refuse what the user set about sharding and reduction where the layout gives it no effect.

    Raises:
        JobError: the first such key, with the reason.
    """
    held = {"dp_replicate": layout.dp_replicate, "dp_shard": layout.dp_shard, "accumulation": batch.accumulation}

    def refuse(key: str, reason: str, hint: str) -> None:
        value = getattr(parallel, key)
        raise JobError(reason, key=f"parallel.{key}", values={key: value, **held}, hint=hint)

    ranks = "one rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    if is_set("parallel.zero_stage") and parallel.zero_stage is not None and layout.dp_shard == 1:
        remedy = "remove it" if layout.world_size == 1 else f"set parallel.dp_shard={layout.dp_replicate}, or remove it"
        refuse(
            "zero_stage",
            f"stage {parallel.zero_stage} has no effect with dp_shard = 1: nothing is split over {ranks}",
            f"Start several ranks with --procs and parallel.dp_shard=-1, or {remedy}."
            if layout.world_size == 1
            else f"{remedy[0].upper()}{remedy[1:]}.",
        )
    for key in ("reduce_every", "reduce_dtype", "bucket_bytes", "overlap"):
        if layout.dp * layout.cp == 1 and is_set(f"parallel.{key}") and getattr(parallel, key) not in ("auto", None):
            refuse(key, "has no effect on one data rank, which reduces nothing", "Remove it, or start several ranks.")
    if is_set("parallel.reduce_every") and parallel.reduce_every == "microbatch" and layout.dp_shard == 1:
        refuse(
            "reduce_every",
            f"microbatch would send {batch.accumulation} times the bytes for nothing: with dp_shard = 1 every rank keeps "
            "whole gradients",
            "Set parallel.reduce_every=step, or split them with parallel.dp_shard.",
        )
    if layout.dp_shard == 1:
        return
    for key in ("bucket_bytes", "overlap"):
        if is_set(f"parallel.{key}") and getattr(parallel, key) is not None:
            refuse(
                key,
                f"belongs to replicas and has no effect with dp_shard = {layout.dp_shard}: each block is reduced by itself",
                "Remove it, or set parallel.dp_shard=1.",
            )
    stage_one = parallel.zero_stage == 1 and parallel.reduce_every == "auto"
    if parallel.reduce_dtype == "bf16" and batch.accumulation > 1 and (stage_one or parallel.reduce_every == "step"):
        refuse(
            "reduce_dtype",
            f"bf16 with one reduction per step would add up {batch.accumulation} whole gradients in bf16",
            "Set parallel.reduce_every=microbatch, or parallel.reduce_dtype=fp32.",
        )
