"""Resident memory of replicas and of each sharding stage, against what the formulas say: 100M parameters on 4 ranks.

    python -m benchmarks.sharded_memory

Growth is that of a rank's resident set over the one with everything imported; the largest rank counts. Measured are the
time between two optimizer steps, after malloc_trim, and the peak of a step (VmHWM, set back before it). AdamW in fp32, two
micro-batches of one short sequence, so that state is nearly all there is. The falls from replicas to each stage are
compared with those of `cost.py` and `memory.py`; state bytes must be equal.

What a process keeps beyond its tensors is its allocator's doing. glibc takes blocks of up to 32 MiB from its heaps, and
gathered weights come and go in such blocks among others that stay: the heaps grow to several times what is in them. So
the falls are measured with an allocator that gives every large block back (`RETURNING`), and replicas and stage 3 once
more with glibc as it comes.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.launch import resolve, run_ranks
from benchmarks.program import finish, parser
from benchmarks.record import ROOT, Figure, say
from benchmarks.text import one_document_words
from paceline.model.spec import parameter_count
from paceline.units import format_bytes, format_count

PROCS = 4
TOLERANCE = 0.05
REPLICAS = "replicas"
LAYOUTS: dict[str, list[str]] = {
    REPLICAS: [],
    **{f"stage {s}": [f"parallel.dp_shard={PROCS}", f"parallel.zero_stage={s}"] for s in (1, 2, 3)},
}
RETURNING = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "THP_MEM_ALLOC_ENABLE": "1"}
"""Blocks from 1 MiB on are mapped one by one (mallopt(3)), and torch asks for huge pages, which makes fresh ones cheap."""

SIZE = ["model.num_layers=15", "model.dim=768", "model.num_heads=12", "model.num_kv_heads=4", "model.ffn_dim=2048"]


def words_of(quick: bool) -> list[str]:
    words = [str(ROOT / "examples" / "small.toml"), *one_document_words()]
    words += ["data.sequence_length=64", "batch.global_batch=8", "batch.microbatch=1", "launch.threads=1"]
    words += ["parallel.precision=fp32", "parallel.compile=false"]
    return words + (["model.num_layers=2"] if quick else SIZE)


def largest(found: dict[str, Any], key: str) -> Any:
    return max(rank[key] for rank in found["ranks"])


def stated_rest(found: dict[str, Any]) -> int:
    return max(int(sum(rank["stated"].values())) for rank in found["ranks"])


def state_figure(name: str, found: dict[str, Any]) -> Figure:
    """State bytes per rank beside the formula's."""
    kept = [sum(rank["kept"].values()) for rank in found["ranks"]]
    equal = all(rank["kept"] == rank["stated"] for rank in found["ranks"])
    formula = [sum(rank["stated"].values()) for rank in found["ranks"]]
    shown = " ".join(f"{size:,}" for size in dict.fromkeys(kept))
    return Figure(
        f"state per rank between steps, {name}",
        "= formula",
        f"{shown} bytes; formula {' '.join(f'{size:,}' for size in dict.fromkeys(formula))}",
        equal,
    )


def growth_figures(name: str, found: dict[str, Any]) -> list[Figure]:
    rest, peak = largest(found, "rest_bytes"), largest(found, "step_peak_bytes")
    wanted_rest, wanted_peak = stated_rest(found), largest(found, "stated_peak_bytes")
    as_is, whole = largest(found, "rest_as_is_bytes"), largest(found, "peak_bytes")
    return [
        Figure(
            f"growth between steps, {name}", "",
            f"{format_bytes(rest)}, formula {format_bytes(wanted_rest)} ({rest / wanted_rest:.3f}); "
            f"before malloc_trim {format_bytes(as_is)}",
        ),
        Figure(
            f"growth at the peak of a step, {name}", "",
            f"{format_bytes(peak)}, formula {format_bytes(wanted_peak)} ({peak / wanted_peak:.3f}); "
            f"of the whole run {format_bytes(whole)}; {largest(found, 'seconds_per_step'):.1f} s a step",
        ),
    ]  # fmt: skip


def fall_figures(name: str, replicas: dict[str, Any], found: dict[str, Any]) -> list[Figure]:
    """How much less than replicas a stage takes, measured over stated."""
    pairs = {
        "between steps": (
            largest(replicas, "rest_bytes") - largest(found, "rest_bytes"),
            stated_rest(replicas) - stated_rest(found),
        ),
        "at the peak": (
            largest(replicas, "step_peak_bytes") - largest(found, "step_peak_bytes"),
            largest(replicas, "stated_peak_bytes") - largest(found, "stated_peak_bytes"),
        ),
    }
    return [
        Figure(
            f"fall from replicas to {name}, {when}",
            f"formula's within {TOLERANCE:.0%}",
            f"{format_bytes(fell)} of {format_bytes(wanted)}: {fell / wanted:.3f}",
            abs(fell / wanted - 1) <= TOLERANCE,
        )
        for when, (fell, wanted) in pairs.items()
    ]


def run(words: list[str], name: str, variables: dict[str, str]) -> dict[str, Any]:
    return run_ranks("benchmarks.resident", [*words, *LAYOUTS[name]], {"steps": 2}, PROCS, variables)


def measure(args: argparse.Namespace) -> int:
    words = words_of(args.quick)
    figures, details = [], {}
    say(f"{format_count(parameter_count(resolve(words).spec))} parameters, AdamW in fp32, {PROCS} ranks")
    for name in dict.fromkeys([REPLICAS, *([f"stage {args.stage}"] if args.stage else LAYOUTS)]):
        say(name)
        found = details[name] = run(words, name, RETURNING)
        figures += [state_figure(name, found), *growth_figures(name, found)]
        if name != REPLICAS:
            figures += fall_figures(name, details[REPLICAS], found)
    for name in () if args.stage else (REPLICAS, "stage 3"):
        say(f"{name}, glibc as it comes")
        own = f"{name}, glibc as it comes"
        details[own] = run(words, name, {})
        figures += growth_figures(own, details[own])
    return finish("sharded_memory", figures, details, args, words)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--stage", type=int, choices=(1, 2, 3), help="one stage alone, beside replicas")
    return measure(options.parse_args())


if __name__ == "__main__":
    sys.exit(main())
