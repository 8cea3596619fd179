"""The setting of a published run, with what was assumed where its line says nothing. Imports no torch.

Assumptions are habits of the run's software generation (`plan.software`), never of the run; each is kept in words.
"""

from __future__ import annotations

import re

from paceline.cluster.catalogue import device
from paceline.cluster.device import Device, ProductType
from paceline.model.flop import Recompute
from paceline.model.spec import ModelSpec
from paceline.parallel.layout import Layout
from paceline.plan.memory_rows import habits_key
from paceline.plan.row_fields import NotModelled, Table, optional, part, refuse, whole
from paceline.plan.row_machine import device_key, fabric_of, nodes_of
from paceline.plan.setting import Schedule, Setting
from paceline.plan.software import Software, software, software_of

MOST_LAYERS, MOST_WIDTH = 10_000, 1_000_000
"""Beyond these a line has a slip in its figures."""

VOCABULARIES = {"bigscience": 250_880}
"""Of sources that give one for all their runs: BigScience's tokenizer has 250 thousand entries, padded to 250,880."""

_PRECISIONS: tuple[tuple[str, ProductType], ...] = (
    (r"fp4", "fp4"), (r"fp8|float8", "fp8"), (r"bf16|mixed|amp", "bf16"), (r"fp16", "fp16"), (r"fp32|tf32", "fp32"),
)  # fmt: skip

_SCHEDULES: tuple[tuple[str, Schedule], ...] = (
    (r"zb-?v", "zbv"), (r"zb.*2p|zb-?h2", "zero-bubble-2p"), (r"zb|zero", "zero-bubble"), (r"dualpipe", "dualpipev"),
    (r"interleav|1f1b-i|loop", "interleaved-1f1b"), (r"gpipe", "gpipe"), (r"1f1b", "1f1b"),
)  # fmt: skip


def setting_of_run(row: Table) -> Setting:
    """The setting of a line.

    Raises:
        NotModelled: with the reason.
    """
    hardware, model, parallel = (part(row, name) for name in ("hardware", "model", "parallelism"))
    assumed: list[str] = []
    _refuse_unmodelled(row, hardware, model, parallel)
    found = device(device_key(str(hardware.get("gpu"))) or "")
    generation = _generation(row, found, assumed)
    spec = _spec(model, generation, assumed, str(row.get("source") or ""))
    gpus = whole(hardware, "gpus", "the number of devices is not published")
    layout, zero_stage = _layout(parallel, gpus, hardware, generation, assumed)
    nodes, per_node = nodes_of(hardware, gpus)
    global_batch = optional(row, "global_batch")
    if global_batch is None:
        global_batch = layout.dp * (optional(row, "micro_batch") or generation.microbatch)
        assumed.append(f"{global_batch} sequences a step: not published, one micro-batch")
    microbatch, accumulation = _batches(row, global_batch, layout, generation, assumed)
    recompute, recomputed, share = _recompute(row, generation, assumed)
    precision, recipe = _precision(str(row.get("precision") or ""), found, assumed)
    first, last = _uneven(spec.num_layers, layout.pp)
    schedule, chunks = _schedule(parallel, spec.num_layers, layout.pp, generation, assumed)
    tensor_overlap = re.search(
        r"(async) ?TP(?! off)|(vanilla) ?TP|async TP off", f"{row.get('id')} {row.get('notes')}", re.I
    )
    sequence_parallel = parallel.get("sp")
    if sequence_parallel is None and layout.tp > 1:
        sequence_parallel = generation.sequence_parallel
        assumed.append(f"sequence parallel {'on' if sequence_parallel else 'off'}: habit of {generation.key}")
    return Setting(
        name=str(row.get("id")),
        spec=spec,
        device=found,
        nodes=nodes,
        devices_per_node=per_node,
        link=found.link,
        fabric=fabric_of(hardware, found, per_node, assumed) if nodes > 1 else None,
        layout=layout,
        microbatch=microbatch,
        accumulation=accumulation,
        sequence_length=whole(model, "seq_len", "the sequence length is not published"),
        precision=precision,
        recompute=recompute,
        zero_stage=zero_stage,  # type: ignore[arg-type]
        schedule=schedule,
        stages_per_rank=chunks,
        first_layers=first,
        last_layers=last,
        sequence_parallel=bool(sequence_parallel) and layout.tp > 1,
        context_method="ring",
        fused_attention=generation.fused_attention or "flash" in str(row.get("recompute")),
        compile=bool(row.get("compile")),
        reduce_every_microbatch=layout.pp == 1 and (zero_stage >= 2 or generation.reduce_every_microbatch),
        recipe=recipe,  # type: ignore[arg-type]
        recomputed=recomputed,  # type: ignore[arg-type]
        recomputed_layers=share,
        gradient_bytes=2 if "PURE" in str(row.get("precision")) else 0,
        tensor_overlap=bool(tensor_overlap[1]) if tensor_overlap else None,
        software=generation.key,
        memory_habits=habits_key(row),
        assumed=tuple(assumed),
    )


def _refuse_unmodelled(row: Table, hardware: Table, model: Table, parallel: Table) -> None:
    name = str(hardware.get("gpu") or "")
    if device_key(name) is None:
        raise NotModelled(f"the catalogue has no device {name!r}" if name else "the device is not named")
    if model.get("moe") is not None or (parallel.get("ep") or 1) > 1:
        raise NotModelled("experts are not modelled")
    if model.get("mla"):
        raise NotModelled("latent attention is not modelled")
    if model.get("hybrid_mamba"):
        raise NotModelled("state-space blocks are not modelled")
    if "lora" in str(row.get("task") or "") or "lora" in str(row.get("flops_convention") or ""):
        raise NotModelled("low-rank adapters are not modelled: frozen weights have no gradients")
    if re.search(r"INCONSISTENT", str(row.get("notes") or "")):
        raise NotModelled("its layout does not multiply to its devices: the line contradicts itself")


def _generation(row: Table, found: Device, assumed: list[str]) -> Software:
    shard = str(part(row, "parallelism").get("shard") or "")
    known = software_of(str(row.get("source") or ""), str(row.get("release") or ""), shard, found.key)
    if known is not None:
        return known
    if re.match(r"zero3|fsdp|hsdp", shard):
        key = "torchtitan-2024"
    else:
        year = found.year or 0
        key = "megatron-2023" if year < 2022 else "nemo-2024" if year < 2024 else "megatron-bridge-2025"
    assumed.append(
        f"software {key}: no generation names the source {row.get('source')!r}, this one fits the device's years"
    )
    return software(key)


def _spec(model: Table, generation: Software, assumed: list[str], source: str) -> ModelSpec:
    width = whole(model, "hidden", "the width of the model is not published")
    mlp = str(model.get("mlp") or "")
    if not mlp:
        mlp = "swiglu" if re.search(r"llama|qwen|mistral", str(model.get("name") or ""), re.IGNORECASE) else "gelu"
        assumed.append(f"mlp {mlp}: not published, by the model's name")
    heads = optional(model, "heads")
    if heads is None:
        heads = _usual_heads(width)
        assumed.append(f"{heads} heads: not published, of a width near 128")
    vocabulary = optional(model, "vocab")
    if vocabulary is None:
        vocabulary = VOCABULARIES.get(source, generation.vocabulary)
        assumed.append(f"vocabulary {vocabulary}: not published, habit of {generation.key}")
    gated = mlp == "swiglu"
    tied = model.get("tied_embeddings")
    layers = optional(model, "layers")
    if layers is None:
        billions = model.get("params_b")
        if billions is None:
            raise NotModelled("the number of layers is not published")
        layers = max(1, round((float(billions) * 1e9 - vocabulary * width) / (12 * width * width)))
        assumed.append(f"{layers} layers: not published, from {billions}e9 parameters")
    if layers > MOST_LAYERS or width > MOST_WIDTH:
        refuse(f"{layers} layers of width {width} are no model's")
    ffn = optional(model, "ffn") or (4 * width if not gated else refuse("the width of the MLP is not published"))
    return ModelSpec(
        preset=str(model.get("name") or "unnamed"),
        num_layers=layers,
        dim=width,
        num_heads=heads,
        num_kv_heads=optional(model, "kv_heads") or heads,
        head_dim=optional(model, "head_dim") or -(-width // heads),
        ffn_dim=ffn,
        vocab_size=vocabulary,
        tie_embeddings=bool(tied) if tied is not None else mlp == "gelu",
        max_sequence_length=whole(model, "seq_len", "the sequence length is not published"),
        norm=str(model.get("norm") or ("rmsnorm" if gated else "layernorm")),
        mlp=mlp,
        positions="rope" if gated else "none" if "alibi" in str(model.get("pos")) else "learned",
        bias=not gated,
        dropout=generation.dropout,
        attention_dropout=0.0 if generation.fused_attention else generation.dropout,
    )


def _usual_heads(width: int) -> int:
    """Heads of equal width, a multiple of 8 as near to 128 as the model's width allows."""
    widths = [w for w in range(64, 257, 8) if width % w == 0]
    return width // min(widths, key=lambda w: abs(w - 128)) if widths else max(1, round(width / 128))


def _layout(
    parallel: Table, gpus: int, hardware: Table, generation: Software, assumed: list[str]
) -> tuple[Layout, int]:
    shard = str(parallel.get("shard") or "")
    degrees = {axis: optional(parallel, axis) for axis in ("tp", "pp", "cp")}
    missing = [axis for axis, degree in degrees.items() if degree is None]
    if "tp" in missing or "pp" in missing:
        raise NotModelled(f"the layout is not published: {', '.join(missing)}")
    tp, pp, cp = degrees["tp"] or 1, degrees["pp"] or 1, degrees["cp"] or 1
    dp = optional(parallel, "dp") or gpus // (tp * pp * cp)
    if dp * tp * pp * cp != gpus:
        raise NotModelled(f"dp {dp} x tp {tp} x pp {pp} x cp {cp} does not multiply to {gpus} devices")
    stage, sharded = _sharding(shard, dp, parallel, hardware, generation, assumed)
    if stage > 1 and pp > 1:
        assumed.append("weights gathered once a step: stages of a pipeline keep them over all micro-batches")
        stage = 1
    return Layout(dp_replicate=dp // sharded, dp_shard=sharded, cp=cp, tp=tp, pp=pp), stage


def _sharding(
    shard: str, dp: int, parallel: Table, hardware: Table, generation: Software, assumed: list[str]
) -> tuple[int, int]:
    """The stage of sharding and over how many data ranks."""
    per_node = optional(hardware, "gpus_per_node") or 8
    stage: int = generation.zero_stage
    match = re.match(r"zero-?([123])", shard)
    if match:
        stage = int(match[1])
    elif re.match(r"fsdp|hsdp", shard):
        stage = 3
    elif shard == "none":
        stage = 0
    else:
        assumed.append(f"sharding stage {stage}: not published, habit of {generation.key}")
    if stage == 0 or dp == 1:
        return stage, 1
    degree = optional(parallel, "shard_degree")
    if degree is None and re.match(r"hsdp|fsdp\+dp", shard):
        degree = min(dp, per_node)
        assumed.append(f"shards of {degree}: not published, inside a node")
    degree = degree or dp
    return stage, degree if dp % degree == 0 else dp


def _batches(
    row: Table, global_batch: int, layout: Layout, generation: Software, assumed: list[str]
) -> tuple[int, int]:
    microbatch = optional(row, "micro_batch")
    if microbatch is None:
        cut = global_batch // layout.dp // layout.pp if generation.cut_for_pipeline and layout.pp > 1 else 0
        microbatch = cut or generation.microbatch
        assumed.append(f"micro-batch {microbatch}: not published, habit of {generation.key}")
    per_rank = global_batch / layout.dp
    microbatch = max(1, min(microbatch, int(per_rank)))
    accumulation = max(1, round(per_rank / microbatch))
    if accumulation * microbatch * layout.dp != global_batch:
        assumed.append(
            f"{accumulation} micro-batches: {global_batch} sequences do not divide by {layout.dp} x {microbatch}"
        )
    return microbatch, accumulation


def _recompute(row: Table, generation: Software, assumed: list[str]) -> tuple[Recompute, str, float]:
    """What is recomputed; of selective recomputation what it computes anew; of full one the share of blocks."""
    said = row.get("recompute")
    if said is None:
        assumed.append(f"recompute {generation.recompute}: not published, habit of {generation.key}")
        return generation.recompute, "elementwise", 1.0
    said = str(said)
    if said.startswith("none"):
        return "none", "elementwise", 1.0
    if said.startswith("full"):
        return "full", "elementwise", 1.0
    if "layer)" in said:
        return "full", "elementwise", 0.5
    if "op)" in said:
        return "selective", "every other product", 1.0
    if "mlp" in said:
        return "selective", "mlp", 1.0
    if "attn" in said or not generation.fused_attention:
        return "selective", "attention", 1.0
    if said == "selective":
        assumed.append("selective recomputation of every other product: which is not published")
        return "selective", "every other product", 1.0
    return "selective", "elementwise", 1.0


def _precision(said: str, found: Device, assumed: list[str]) -> tuple[ProductType, str]:
    kind: ProductType = next((kind for pattern, kind in _PRECISIONS if re.search(pattern, said)), "bf16")
    if not said:
        assumed.append("products in bf16: not published")
    if kind == "bf16" and "bf16" not in found.peak:
        kind = "fp16"
    if kind not in found.peak:
        raise NotModelled(f"{found.name} has no products of {kind}")
    recipe = "rowwise" if "rowwise" in said else "mx" if re.search(r"mx", said) else ""
    return kind, recipe


def _uneven(layers: int, ranks: int) -> tuple[int, int]:
    """Blocks fewer on the first and on the last stage, where the embedding and the head take a block's place."""
    if layers % ranks == 0:
        return 0, 0
    return (1, 1) if (layers + 2) % ranks == 0 else (0, 1) if (layers + 1) % ranks == 0 else (0, 0)


def _schedule(
    parallel: Table, layers: int, ranks: int, generation: Software, assumed: list[str]
) -> tuple[Schedule, int]:
    said = str(parallel.get("schedule") or ("interleaved" if generation.interleaved else "")).lower()
    chunks = optional(parallel, "vpp") or 1
    if ranks == 1:
        return "1f1b", 1
    schedule: Schedule = next((name for pattern, name in _SCHEDULES if re.search(pattern, said)), "1f1b")
    if chunks > 1 and schedule == "1f1b":
        schedule = "interleaved-1f1b"
    if schedule == "interleaved-1f1b" and optional(parallel, "vpp") is None:
        chunks = max(1, -(-layers // ranks))
        assumed.append(f"{chunks} stages a rank: not published, a block a stage")
    if not said:
        assumed.append(f"schedule {schedule}: not published, habit of {generation.key}")
    if chunks * ranks > layers + 2 * ranks:
        refuse(f"{chunks} x {ranks} stages are more than {layers} layers fill")
    if schedule == "interleaved-1f1b" and chunks == 1:
        schedule = "1f1b"
    return schedule, chunks if schedule == "interleaved-1f1b" else 1
