"""Memory of attention on each rank where a sequence is split over 1, 2 and 4 ranks, each side in processes of its own.

    python -m benchmarks.context_memory

A stack of causal attention layers over one sequence, forward and backward, in fp32. `kept` are the bytes that the forward
leaves for the backward,
counted on the tensors themselves; growth is what a rank's VmHWM rises over the resident set before its inputs are made,
with gradients, what is gathered for a moment, and Gloo's buffers. The largest rank counts. A mask over the whole sequence
would take L x L x 4 bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.launch import run_alone
from benchmarks.program import finish, parser
from benchmarks.record import Figure, say
from paceline.units import format_bytes, format_seconds

DEGREES = (1, 2, 4)
METHODS = ("gather", "alltoall")
HEADS, KV_HEADS, WIDTH, LAYERS = 8, 4, 32, 8
LENGTH = 16384
SHARE = 0.75
"""Of the degree, by which the peak of the gathering side must fall: what is gathered for a moment does not."""


def measure(method: str, degree: int, length: int) -> list[dict[str, Any]]:
    """What each rank found."""
    words = ["--method", method, "--degree", str(degree), "--length", str(length)]
    return run_alone("benchmarks.context_memory", words, degree)


def be_rank(args: argparse.Namespace) -> None:
    """One rank: attention over its part of the sequence."""
    import torch
    import torch.distributed as dist

    from paceline.model.attention import Attention, sdpa
    from paceline.parallel.context.attention import ExchangedAttention, GatheredAttention
    from paceline.workers.gloo import run_one_at_a_time

    torch.set_num_threads(1)
    run_one_at_a_time()
    dist.init_process_group(
        "gloo", init_method=f"file://{Path(args.folder) / 'store'}", rank=args.rank,
        world_size=args.degree,
    )  # fmt: skip
    group = dist.group.WORLD
    assert group is not None
    attention: Attention = sdpa
    if args.degree > 1:
        attention = GatheredAttention(group) if args.method == "gather" else ExchangedAttention(group)

    def run(held: int) -> tuple[int, float]:
        storages: dict[int, int] = {}

        def count(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        started = time.perf_counter()
        x = torch.randn(1, held, HEADS, WIDTH, generator=torch.Generator().manual_seed(args.rank)).transpose(1, 2)
        h = x.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            for _ in range(LAYERS):
                q, k, v = h * 1, h[:, :KV_HEADS] * 1, h[:, KV_HEADS:] * 1
                h = h + attention(q, k, v, None, scale=WIDTH**-0.5, dropout=None)
        h.sum().backward()  # type: ignore[no-untyped-call]
        return sum(storages.values()), time.perf_counter() - started

    run(2 * 16)
    dist.barrier()
    before = _status("VmRSS")
    kept, seconds = run(args.length // args.degree)
    found = {"kept_bytes": kept, "growth_bytes": _status("VmHWM") - before, "seconds": seconds}
    (Path(args.folder) / f"{args.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def figures_of(found: dict[str, dict[int, list[dict[str, Any]]]], length: int) -> list[Figure]:
    figures = []
    for method, by_degree in found.items():
        kept, growth = ({d: max(r[key] for r in ranks) for d, ranks in by_degree.items()}
                        for key in ("kept_bytes", "growth_bytes"))  # fmt: skip
        for degree in DEGREES[1:]:
            shown = f"{format_bytes(kept[1])} / {format_bytes(kept[degree])}"
            fell = kept[1] / kept[degree]
            name = f"{method}, {length} positions over {degree} ranks"
            figures.append(Figure(f"kept for the backward, {name}", f"1 / {degree}", f"1 / {fell:.2f}; {shown}",
                                  fell >= degree * 0.999))  # fmt: skip
            fell = growth[1] / growth[degree]
            shown = f"{format_bytes(growth[1])} / {format_bytes(growth[degree])}"
            seconds = format_seconds(max(r["seconds"] for r in by_degree[degree]))
            figures.append(Figure(f"growth of peak memory, {name}", f"<= 1 / {SHARE * degree:g}",
                                  f"1 / {fell:.2f}; {shown} in {seconds}", fell >= SHARE * degree))  # fmt: skip
    return figures


def main() -> int:
    made = parser(__doc__)
    for name in ("--method", "--folder"):
        made.add_argument(name, help=argparse.SUPPRESS)
    for name in ("--degree", "--length", "--rank"):
        made.add_argument(name, type=int, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.rank is not None:
        be_rank(args)
        return 0
    length = 1024 if args.quick else LENGTH
    found: dict[str, dict[int, list[dict[str, Any]]]] = {}
    whole = measure("gather", 1, length)
    for method in METHODS:
        found[method] = {1: whole}
        for degree in DEGREES[1:]:
            found[method][degree] = measure(method, degree, length)
            say(f"  {method} over {degree}: {format_bytes(max(r['growth_bytes'] for r in found[method][degree]))}")
    return finish("context_memory", figures_of(found, length), found, args, [])


if __name__ == "__main__":
    sys.exit(main())
