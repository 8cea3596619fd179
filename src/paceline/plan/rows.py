"""Published runs: a line of RUNS.jsonl becomes a setting and what was measured of it, or a reason why it does not.

What a line leaves out is assumed from the habits of its software generation (`plan.software`), never from the run; each
assumption is kept in words. A line that says too little, or describes what is not modelled, keeps its place with a
reason. The format is described in docs/guide/plan-against.md. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.catalogue import device, fabric
from paceline.cluster.device import Device, Link, ProductType
from paceline.errors import UsageError
from paceline.model.flop import Recompute
from paceline.model.spec import ModelSpec
from paceline.parallel.layout import Layout
from paceline.plan.conventions import published_flop_per_token
from paceline.plan.memory_rows import habits_key, measured_memory
from paceline.plan.setting import Schedule, Setting
from paceline.plan.software import Software, software, software_of

Table = Mapping[str, Any]

STANDARD_FABRICS = {"v100": "edr100", "a100": "hdr200", "h100": "ndr400", "h200": "ndr400", "h800": "ndr400",
                    "gh200": "ndr400", "b200": "ndr400", "gb200": "ndr400", "b300": "xdr800", "gb300": "xdr800"}  # fmt: skip
"""What joins the nodes of a device as its maker sells them: assumed where a run does not say."""

MOST_LAYERS, MOST_WIDTH = 10_000, 1_000_000
"""Beyond these a line has a slip in its figures."""

VOCABULARIES = {"bigscience": 250_880}
"""Of sources that give one for all their runs: BigScience's tokenizer has 250 thousand entries, padded to 250,880."""

_DEVICES = (
    (r"TPU|Trainium|Gaudi|Ascend", ""),
    (r"model not named", ""),
    (r"GB300", "gb300"), (r"GB200", "gb200"), (r"GH200", "gh200"), (r"B300", "b300-sxm"), (r"B200", "b200-sxm"),
    (r"H200", "h200-sxm"), (r"H800", "h800-sxm"),
    (r"H100.*9[56]\s?GB", "h100-sxm-96g"), (r"H100.*PCI", "h100-pcie"), (r"H100", "h100-sxm"),
    (r"A100.*PCI.*40", "a100-pcie-40g"), (r"A100.*PCI", "a100-pcie-80g"),
    (r"A100.*80\s?GB", "a100-sxm-80g"), (r"A100.*40\s?GB", "a100-sxm-40g"), (r"A100", "a100-sxm-80g"),
    (r"V100.*16", "v100-sxm-16g"), (r"V100", "v100-sxm-32g"), (r"L40S", "l40s"),
    (r"MI300X", "mi300x"), (r"MI355X", "mi355x"),
)  # fmt: skip

_PRECISIONS: tuple[tuple[str, ProductType], ...] = (
    (r"fp4", "fp4"), (r"fp8|float8", "fp8"), (r"bf16|mixed|amp", "bf16"), (r"fp16", "fp16"), (r"fp32|tf32", "fp32"),
)  # fmt: skip

_SCHEDULES: tuple[tuple[str, Schedule], ...] = (
    (r"zb-?v", "zbv"), (r"zb.*2p|zb-?h2", "zero-bubble-2p"), (r"zb|zero", "zero-bubble"), (r"dualpipe", "dualpipev"),
    (r"interleav|1f1b-i|loop", "interleaved-1f1b"), (r"gpipe", "gpipe"), (r"1f1b", "1f1b"),
)  # fmt: skip


class PublishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `setting` is None where it is not modelled, and `reason` says why.

    measured: by quantity: seconds, bytes, and 1 or 0 for `fits`. group: the same for runs that differ only in layout.
    """

    id: str
    source: str
    device: str
    quality: str
    setting: Setting | None
    measured: dict[str, float]
    reason: str | None = None
    strategy: str = ""
    group: str = ""


class _NotModelled(Exception):
    """Carries the reason."""


def read_runs(path: Path) -> list[PublishedRun]:
    """All lines of a file, in their order.

    Raises:
        UsageError: it cannot be read, or holds no line of that format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", key="--against", values={"path": str(path)}) from None
    runs = [read_run(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not runs or not any(run.source for run in runs):
        raise UsageError(
            f"{path} holds no published runs: one JSON object a line with id, source, hardware, model, parallelism, measured",
            key="--against",
            values={"path": str(path), "lines": len(runs)},
            hint="The format is described in docs/guide/plan-against.md.",
        )
    return runs


def read_run(line: str, number: int = 0) -> PublishedRun:
    """One line, whatever is wrong with it."""
    try:
        row = json.loads(line)
    except ValueError as error:
        return _unread(f"line {number}", f"is no JSON: {error}")
    if not isinstance(row, dict):
        return _unread(f"line {number}", "is no JSON object")
    try:
        return _run(row)
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        return _unread(str(row.get("id", f"line {number}")), f"has a field of another form: {error!r}", row)


def _unread(name: str, reason: str, row: Table | None = None) -> PublishedRun:
    source, quality = (str((row or {}).get(key) or "") for key in ("source", "quality"))
    return PublishedRun(id=name, source=source, device="", quality=quality, setting=None, measured={}, reason=reason)


def _run(row: Table) -> PublishedRun:
    hardware = _part(row, "hardware")
    key = device_key(str(hardware.get("gpu") or ""))
    setting, reason = None, None
    try:
        setting = setting_of_run(row)
    except _NotModelled as refused:
        reason = str(refused)
    except UsageError as error:
        reason = error.message
    return PublishedRun(
        id=str(row.get("id")),
        source=str(row.get("source") or ""),
        device=key or str(hardware.get("gpu") or "unnamed"),
        quality=str(row.get("quality") or ""),
        setting=setting,
        measured=_measured(row, setting),
        reason=reason,
        strategy=_strategy(setting) if setting else "",
        group=_group(row),
    )


def device_key(name: str) -> str | None:
    """Key of the catalogue for a device as sources write it, or None: a device without a name or without an entry."""
    found = next((key for pattern, key in _DEVICES if re.search(pattern, name, re.IGNORECASE)), "")
    return found or None


def setting_of_run(row: Table) -> Setting:
    """The setting of a line.

    Raises:
        _NotModelled: with the reason.
    """
    hardware, model, parallel = (_part(row, part) for part in ("hardware", "model", "parallelism"))
    assumed: list[str] = []
    _refuse_unmodelled(row, hardware, model, parallel)
    found = device(device_key(str(hardware.get("gpu"))) or "")
    generation = _generation(row, found, assumed)
    spec = _spec(model, generation, assumed, str(row.get("source") or ""))
    gpus = _whole(hardware, "gpus", "the number of devices is not published")
    layout, zero_stage = _layout(parallel, gpus, hardware, generation, assumed)
    nodes, per_node = _nodes(hardware, gpus)
    global_batch = _optional(row, "global_batch")
    if global_batch is None:
        global_batch = layout.dp * (_optional(row, "micro_batch") or generation.microbatch)
        assumed.append(f"{global_batch} sequences a step: not published, one micro-batch")
    microbatch, accumulation = _batches(row, global_batch, layout, generation, assumed)
    recompute, recomputed, share = _recompute(row, generation, assumed)
    precision, recipe = _precision(str(row.get("precision") or ""), found, assumed)
    first, last = _uneven(spec.num_layers, layout.pp)
    schedule, chunks = _schedule(parallel, spec.num_layers, layout.pp, assumed)
    tensor_overlap = re.search(r"(async) ?TP(?! off)|(vanilla) ?TP|async TP off", f"{row.get('id')} {row.get('notes')}", re.I)
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
        fabric=_fabric(hardware, found, per_node, assumed) if nodes > 1 else None,
        layout=layout,
        microbatch=microbatch,
        accumulation=accumulation,
        sequence_length=_whole(model, "seq_len", "the sequence length is not published"),
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
        reduce_every_microbatch=zero_stage >= 2 or generation.reduce_every_microbatch,
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
        raise _NotModelled(f"the catalogue has no device {name!r}" if name else "the device is not named")
    if model.get("moe") is not None or (parallel.get("ep") or 1) > 1:
        raise _NotModelled("experts are not modelled")
    if model.get("mla"):
        raise _NotModelled("latent attention is not modelled")
    if model.get("hybrid_mamba"):
        raise _NotModelled("state-space blocks are not modelled")
    if "lora" in str(row.get("task") or "") or "lora" in str(row.get("flops_convention") or ""):
        raise _NotModelled("low-rank adapters are not modelled: frozen weights have no gradients")
    if re.search(r"INCONSISTENT", str(row.get("notes") or "")):
        raise _NotModelled("its layout does not multiply to its devices: the line contradicts itself")


def _generation(row: Table, found: Device, assumed: list[str]) -> Software:
    shard = str(_part(row, "parallelism").get("shard") or "")
    known = software_of(str(row.get("source") or ""), str(row.get("release") or ""), shard)
    if known is not None:
        return known
    if re.match(r"zero3|fsdp|hsdp", shard):
        key = "torchtitan-2024"
    else:
        key = "megatron-2023" if (found.year or 0) < 2022 else "nemo-2024" if (found.year or 0) < 2024 else "megatron-bridge-2025"  # fmt: skip
    assumed.append(f"software {key}: no generation names the source {row.get('source')!r}, this one fits the device's years")
    return software(key)


def _spec(model: Table, generation: Software, assumed: list[str], source: str) -> ModelSpec:
    width = _whole(model, "hidden", "the width of the model is not published")
    mlp = str(model.get("mlp") or "")
    if not mlp:
        mlp = "swiglu" if re.search(r"llama|qwen|mistral", str(model.get("name") or ""), re.IGNORECASE) else "gelu"
        assumed.append(f"mlp {mlp}: not published, by the model's name")
    heads = _optional(model, "heads")
    if heads is None:
        heads = _usual_heads(width)
        assumed.append(f"{heads} heads: not published, of a width near 128")
    vocabulary = _optional(model, "vocab")
    if vocabulary is None:
        vocabulary = VOCABULARIES.get(source, generation.vocabulary)
        assumed.append(f"vocabulary {vocabulary}: not published, habit of {generation.key}")
    gated = mlp == "swiglu"
    tied = model.get("tied_embeddings")
    layers = _optional(model, "layers")
    if layers is None:
        billions = model.get("params_b")
        if billions is None:
            raise _NotModelled("the number of layers is not published")
        layers = max(1, round((float(billions) * 1e9 - vocabulary * width) / (12 * width * width)))
        assumed.append(f"{layers} layers: not published, from {billions}e9 parameters")
    if layers > MOST_LAYERS or width > MOST_WIDTH:
        raise _NotModelled(f"{layers} layers of width {width} are no model's")
    ffn = _optional(model, "ffn") or (4 * width if not gated else _refuse("the width of the MLP is not published"))
    return ModelSpec(
        preset=str(model.get("name") or "unnamed"),
        num_layers=layers,
        dim=width,
        num_heads=heads,
        num_kv_heads=_optional(model, "kv_heads") or heads,
        head_dim=_optional(model, "head_dim") or -(-width // heads),
        ffn_dim=ffn,
        vocab_size=vocabulary,
        tie_embeddings=bool(tied) if tied is not None else mlp == "gelu",
        max_sequence_length=_whole(model, "seq_len", "the sequence length is not published"),
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


def _refuse(reason: str) -> int:
    raise _NotModelled(reason)


def _layout(
    parallel: Table, gpus: int, hardware: Table, generation: Software, assumed: list[str]
) -> tuple[Layout, int]:
    shard = str(parallel.get("shard") or "")
    degrees = {axis: _optional(parallel, axis) for axis in ("tp", "pp", "cp")}
    missing = [axis for axis, degree in degrees.items() if degree is None]
    if "tp" in missing or "pp" in missing:
        raise _NotModelled(f"the layout is not published: {', '.join(missing)}")
    tp, pp, cp = degrees["tp"] or 1, degrees["pp"] or 1, degrees["cp"] or 1
    dp = _optional(parallel, "dp") or gpus // (tp * pp * cp)
    if dp * tp * pp * cp != gpus:
        raise _NotModelled(f"dp {dp} x tp {tp} x pp {pp} x cp {cp} does not multiply to {gpus} devices")
    stage, sharded = _sharding(shard, dp, parallel, hardware, generation, assumed)
    return Layout(dp_replicate=dp // sharded, dp_shard=sharded, cp=cp, tp=tp, pp=pp), stage


def _sharding(
    shard: str, dp: int, parallel: Table, hardware: Table, generation: Software, assumed: list[str]
) -> tuple[int, int]:
    """The stage of sharding and over how many data ranks."""
    per_node = _optional(hardware, "gpus_per_node") or 8
    stage = generation.zero_stage
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
    degree = _optional(parallel, "shard_degree")
    if degree is None and re.match(r"hsdp|fsdp\+dp", shard):
        degree = min(dp, per_node)
        assumed.append(f"shards of {degree}: not published, inside a node")
    degree = degree or dp
    return stage, degree if dp % degree == 0 else dp


def _nodes(hardware: Table, gpus: int) -> tuple[int, int]:
    """Nodes and devices a node. The nodes of an NVL72 domain, joined by NVLink, count as one."""
    per_node = _optional(hardware, "gpus_per_node") or 8
    if "NVL72" in str(hardware.get("intra_node") or ""):
        per_node = max(d for d in range(1, 73) if gpus % d == 0)
    per_node = min(per_node, gpus)
    return -(-gpus // per_node), per_node


def _fabric(hardware: Table, found: Device, per_node: int, assumed: list[str]) -> Link:
    words = str(hardware.get("inter_node") or "")
    kind = "opa" if "Omni-Path" in words else "roce" if re.search(r"roce", words, re.IGNORECASE) else ""
    kind = kind or ("efa" if "EFA" in words else "eth" if re.search(r"ethernet|tcp", words, re.IGNORECASE) else "ib")
    like = {"opa": "opa100", "roce": "roce400", "efa": "efa-p5", "eth": "eth100", "ib": "ndr400"}[kind]
    rate = hardware.get("inter_node_GBps_per_gpu")
    counted = re.search(r"(\d+)\s?x [^0-9]*(\d+)\s?Gb", words)
    rate = rate or None
    if rate is None and counted is not None:
        rate = int(counted[1]) * int(counted[2]) / 8 / per_node
    if rate is None:
        prefix = found.key.split("-")[0]
        key = STANDARD_FABRICS.get(prefix, "ndr400")
        rate = fabric(key, per_node).bytes_per_second / 1e9
        assumed.append(f"{rate:g} GB/s a device between nodes: not published, {key} as sold with {prefix}")
    shape = fabric(like, per_node)
    return msgspec.structs.replace(shape, name=f"{rate:g} GB/s a device like {like}", bytes_per_second=float(rate) * 1e9)


def _batches(
    row: Table, global_batch: int, layout: Layout, generation: Software, assumed: list[str]
) -> tuple[int, int]:
    microbatch = _optional(row, "micro_batch")
    if microbatch is None:
        microbatch = generation.microbatch
        assumed.append(f"micro-batch {microbatch}: not published, habit of {generation.key}")
    per_rank = global_batch / layout.dp
    microbatch = max(1, min(microbatch, int(per_rank)))
    accumulation = max(1, round(per_rank / microbatch))
    if accumulation * microbatch * layout.dp != global_batch:
        assumed.append(f"{accumulation} micro-batches: {global_batch} sequences do not divide by {layout.dp} x {microbatch}")
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
        raise _NotModelled(f"{found.name} has no products of {kind}")
    recipe = "rowwise" if "rowwise" in said else "mx" if re.search(r"mx", said) else ""
    return kind, recipe


def _uneven(layers: int, ranks: int) -> tuple[int, int]:
    """Blocks fewer on the first and on the last stage, where the embedding and the head take a block's place."""
    if layers % ranks == 0:
        return 0, 0
    return (1, 1) if (layers + 2) % ranks == 0 else (0, 1) if (layers + 1) % ranks == 0 else (0, 0)


def _schedule(parallel: Table, layers: int, ranks: int, assumed: list[str]) -> tuple[Schedule, int]:
    said = str(parallel.get("schedule") or "").lower()
    chunks = _optional(parallel, "vpp") or 1
    if ranks == 1:
        return "1f1b", 1
    schedule: Schedule = next((name for pattern, name in _SCHEDULES if re.search(pattern, said)), "1f1b")
    if chunks > 1 and schedule == "1f1b":
        schedule = "interleaved-1f1b"
    if schedule == "interleaved-1f1b" and _optional(parallel, "vpp") is None:
        chunks = max(1, -(-layers // ranks))
        assumed.append(f"{chunks} stages a rank: not published, a block a stage")
    if not said:
        assumed.append(f"schedule {schedule}: not published")
    if chunks * ranks > layers + 2 * ranks:
        raise _NotModelled(f"{chunks} x {ranks} stages are more than {layers} layers fill")
    if schedule == "interleaved-1f1b" and chunks == 1:
        schedule = "1f1b"
    return schedule, chunks if schedule == "interleaved-1f1b" else 1


def _measured(row: Table, setting: Setting | None) -> dict[str, float]:
    measured = _part(row, "measured")
    found = measured_memory(measured, str(row.get("source") or ""))
    seconds = step_seconds(row, setting)
    return {"step_seconds": seconds, **found} if seconds else found


def step_seconds(row: Table, setting: Setting | None) -> float | None:
    """Seconds of a step: as published, else from samples or tokens per second, else from TFLOP/s by their convention."""
    measured = _part(row, "measured")
    gpus, batch = _part(row, "hardware").get("gpus"), row.get("global_batch")
    if measured.get("step_time_s"):
        return float(measured["step_time_s"]) if batch else None
    length = _part(row, "model").get("seq_len")
    if not gpus or not batch or not length:
        return None
    tokens = float(batch) * float(length)
    for key, whole in (
        ("tokens_per_s_per_gpu", tokens / float(gpus)),
        ("tokens_per_s", tokens),
        ("samples_per_s", float(batch)),
        ("samples_per_s_per_gpu", float(batch) / float(gpus)),
    ):
        if measured.get(key):
            return whole / float(measured[key])
    rate, convention = measured.get("tflops_per_gpu"), str(row.get("flops_convention") or "")
    if not rate or setting is None:
        return None
    spec = setting.spec
    per_token = published_flop_per_token(convention, spec, int(length), setting.recompute)
    return per_token * tokens / float(gpus) / (float(rate) * 1e12) if per_token else None


def _group(row: Table) -> str:
    """What makes runs comparable: all but the layout, the micro-batch and recomputation."""
    model, hardware = _part(row, "model"), _part(row, "hardware")
    same = [row.get(key) for key in ("source", "release", "task", "precision", "global_batch")]
    same += [hardware.get(key) for key in ("gpu", "gpus", "gpus_per_node")]
    same += [model.get(key) for key in ("name", "layers", "hidden", "heads", "ffn", "seq_len")]
    return "|".join(map(str, same))


def _strategy(setting: Setting) -> str:
    layout = setting.layout
    data = {0: "dp", 1: "zero1", 2: "zero2", 3: "fsdp"}[setting.zero_stage]
    names = [data] if layout.dp > 1 else []
    names += [axis for axis in ("cp", "tp", "pp") if getattr(layout, axis) > 1]
    return "+".join(names) or "one device"


def _part(row: Table, name: str) -> Table:
    part = row.get(name)
    return part if isinstance(part, dict) else {}


def _optional(table: Table, key: str) -> int | None:
    value = table.get(key)
    if value is None or isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return None
    return int(value)


def _whole(table: Table, key: str, reason: str) -> int:
    value = _optional(table, key)
    if value is None:
        raise _NotModelled(reason)
    return value
