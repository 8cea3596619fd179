"""What a save costs: time blocked, time to durable, slower steps meanwhile, memory; against torch.distributed.checkpoint.

    python -m benchmarks.checkpoint_save

100M parameters with AdamW on two ranks, replicated (each rank stages its half) and sharded by rows. Each round saves with
paceline, copies a rank's part once (warm, both ranks at once), and saves the same tensors with `dcp.save`, its files synced
and not. The first save, which allocates the staging buffer, is apart. Checkpoints go to --folder, by default in .cache.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.launch import resolve, run_ranks
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, SCRATCH, Figure, say
from benchmarks.text import one_document_words
from paceline.model.spec import parameter_count
from paceline.units import format_bytes, format_count, format_seconds

CASES = {"replicated": ["parallel.dp_replicate=2"], "sharded": ["parallel.dp_shard=2"]}
LARGE = ["model.num_layers=16", "model.dim=704", "model.ffn_dim=2048", "model.num_heads=11", "model.num_kv_heads=11"]
SMALL = ["model.num_layers=2", "model.dim=64", "model.ffn_dim=128", "model.num_heads=2", "model.num_kv_heads=2"]


def words_of(case: str, quick: bool) -> list[str]:
    words = [str(ROOT / "examples" / "small.toml"), *one_document_words(), *CASES[case], "data.sequence_length=64"]
    words += ["batch.global_batch=2", "batch.microbatch=1", "launch.threads=1", "parallel.compile=false"]
    return words + (SMALL if quick else LARGE)


def figures_of(case: str, found: dict[str, Any]) -> list[Figure]:
    median = statistics.median
    blocked, durable = (median(pair[k] for pair in found["saves"]) for k in (0, 1))
    memcpy, synced, unsynced = (median(found[key]) for key in ("memcpy", "synced", "unsynced"))
    checked, unchecked = (median(pair[1] for pair in found[key]) for key in ("checked", "unchecked"))
    blocks = [median(pair[0] for pair in found[key]) for key in ("checked", "unchecked")]
    alone, beside = found["training"]["alone"], [s for s, flying in found["training"]["beside"] if flying]
    grown = max(after - before for before, after in found["memory"])
    part = max(found["part_bytes"])
    shown = format_seconds
    return [
        Figure(f"blocked by a save over one warm memcpy, {case}", "<= 1.3",
               f"{blocked / memcpy:.2f}; {shown(blocked)} / {shown(memcpy)} for {format_bytes(part)} a rank; "
               f"first save {shown(found['first_blocked'])}", blocked <= 1.3 * memcpy),
        Figure(f"blocked over dcp.save with synced files, {case}", "< 3%",
               f"{blocked / synced:.1%}; {shown(synced)}; the memcpy alone {memcpy / synced:.1%}",
               blocked < 0.03 * synced),
        Figure(f"blocked over dcp.save without sync, {case}", "< 8%",
               f"{blocked / unsynced:.1%}; {shown(unsynced)}; the memcpy alone {memcpy / unsynced:.1%}",
               blocked < 0.08 * unsynced),
        Figure(f"time to durable over dcp.save with synced files, {case}", "<= 1.2",
               f"{durable / synced:.2f}; {shown(durable)} / {shown(synced)}", durable <= 1.2 * synced),
        Figure(f"step time while writing over without, {case}", "",
               f"{statistics.mean(beside) / median(alone):.2f}; {shown(statistics.mean(beside))} / {shown(median(alone))}; "
               f"durable after {shown(median(found['training']['durable']))}, "
               f"blocked {shown(median(found['training']['blocked'][1:] or [0.0]))}"),
        Figure(f"growth of a rank's memory after the second save, {case}", "none",
               f"{format_bytes(max(grown, 0))} over {len(found['saves']) + 2} saves", grown < part / 20),
        Figure(f"checksums' share of a save, {case}", "<= 10%",
               f"{1 - unchecked / checked:.1%}; {shown(checked)} with, {shown(unchecked)} without; "
               f"blocked {shown(blocks[0])} and {shown(blocks[1])}", 1 - unchecked / checked <= 0.1),
    ]  # fmt: skip


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, default=SCRATCH, help="on the disk to be measured")
    options.add_argument("--rounds", type=int, default=5)
    args = options.parse_args()
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    for case in CASES:
        words = words_of(case, args.quick)
        parameters = parameter_count(resolve(words).spec)
        say(f"{case}, {format_count(parameters)} parameters")
        args.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="saves-", dir=args.folder) as folder:
            given = {
                "rounds": 2 if args.quick else args.rounds,
                "memcpys": 5,
                "steps": 4 if args.quick else 12,
                "steps_per_save": 2 if args.quick else 4,
                "folder": folder,
            }
            found = run_ranks("benchmarks.checkpoint_rank", words, given)
        figures += figures_of(f"{case}, {format_count(parameters)} parameters", found)
        details[case] = found
    return finish("checkpoint-save", figures, details, args, [json.dumps(words_of(case, args.quick)) for case in CASES])


if __name__ == "__main__":
    sys.exit(main())
