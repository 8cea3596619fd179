"""One rank of `paceline bench compute`: rates of its device while the devices of all ranks work.

Rows are measured in rounds, all of them in each: a processor that is shared with others is fast and slow by turns of seconds,
and a row that had its time at once would show one of them.

Letters: n edge of a square matrix, L positions, H heads, D width of a head, B sequences.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from paceline.bench.calls import TYPES
from paceline.bench.rank import Rank, Timer, joined
from paceline.bench.rows import spread_of
from paceline.units import GiB, MiB

MATMUL_EDGES = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
ATTENTION_LENGTHS = {"cpu": (128, 256, 512, 1024, 2048), "cuda": (512, 1024, 2048, 4096, 8192, 16384)}
ATTENTION_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Tokens of one call, as sequences of each length: short ones come in larger batches, as in training."""

HEADS = {"cpu": 4, "cuda": 16}
HEAD_WIDTH = {"cpu": 64, "cuda": 128}
COPIED_BYTES = {"cpu": 128 * MiB, "cuda": 2 * GiB}
"""Far above any cache."""

ROUNDS = 8
"""At least so many, also where fewer agree: they may all have fallen into one of a machine's moods."""

DTYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "bf16", "fp16")}


class Case(NamedTuple):
    """One operation, type and size; `flop` or `moved_bytes` of a call."""

    operation: str
    dtype: str
    size: int
    call: Callable[[], None]
    flop: float = 0.0
    moved_bytes: int = 0


def program(rank: Rank) -> None:
    """Tell a row per operation, type and size; after each round anew, so that an interrupted one leaves its rows."""
    device = rank.world.device
    dtypes = list(rank.options.get("dtypes") or DTYPES[device.type])
    rank.tell({"kind": "about", "device": _name(device), "torch": torch.__version__, "ranks": rank.world.world_size,
               "threads": torch.get_num_threads()})  # fmt: skip
    iterations, longest = rank.options["iterations"], rank.options["seconds"]
    timed = [
        (case, Timer(case.call, device, warmup=3, iterations=iterations, seconds=longest))
        for case in _cases(dtypes, device)
    ]
    rounds = 0
    while unsettled := [(case, timer) for case, timer in timed if rounds < ROUNDS or not timer.settled]:
        rounds += 1
        for case, timer in unsettled:
            timer.round()
            _tell(rank, case, timer)


def _cases(dtypes: Sequence[str], device: torch.device) -> Iterator[Case]:
    kind = device.type
    for dtype in dtypes:
        # Operands of all sizes lie in the same memory: sizes take turns, and the largest alone fills gigabytes.
        pool = torch.randn(3, max(MATMUL_EDGES[kind]) ** 2, generator=torch.Generator().manual_seed(0))
        pool = pool.to(device, TYPES[dtype])
        for n in MATMUL_EDGES[kind]:
            yield Case("matmul", dtype, n, _matmul(n, pool), flop=2 * n**3)
    for dtype in dtypes:
        for length in ATTENTION_LENGTHS[kind]:
            call, flop = _attention(length, TYPES[dtype], device)
            yield Case("attention", dtype, length, call, flop=flop)
    size = COPIED_BYTES[kind] // 2
    yield Case("copy", "bytes", 2 * size, _copy(size, device), moved_bytes=2 * size)
    yield Case("launch", "fp32", 1, _launch(device))


def _tell(rank: Rank, case: Case, timer: Timer) -> None:
    seconds = statistics.median(timer.samples)
    rank.tell(
        {"kind": "row", "operation": case.operation, "dtype": case.dtype, "size": case.size, "time_us": seconds * 1e6,
         "spread": spread_of(timer.samples), "trials": len(timer.samples),
         "flop_per_second": case.flop / seconds if case.flop else None,
         "bytes_per_second": case.moved_bytes / seconds if case.moved_bytes else None}
    )  # fmt: skip


def _matmul(n: int, pool: torch.Tensor) -> Callable[[], None]:
    left, right, result = (one[: n * n].view(n, n) for one in pool)

    def call() -> None:
        torch.mm(left, right, out=result)

    return call


def _attention(length: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], None], float]:
    """Causal attention forward, and its FLOP: two products, of which the masked half is not computed."""
    kind = device.type
    heads, width = HEADS[kind], HEAD_WIDTH[kind]
    sequences = max(1, ATTENTION_TOKENS[kind] // length)
    generator = torch.Generator().manual_seed(0)
    q_BHLD, k_BHLD, v_BHLD = (
        torch.randn(sequences, heads, length, width, generator=generator).to(device, dtype) for _ in range(3)
    )

    def call() -> None:
        with torch.no_grad():
            F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=True)

    return call, 2.0 * sequences * heads * length * length * width


def _copy(size_bytes: int, device: torch.device) -> Callable[[], None]:
    source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: _done(target.copy_(source))


def _launch(device: torch.device) -> Callable[[], None]:
    """The smallest operation: what each launch costs at least, whatever it computes."""
    one = torch.zeros(1, device=device)
    return lambda: _done(one.add_(1.0))


def _done(_: torch.Tensor) -> None:
    """A call's result that nobody needs."""


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def main() -> None:
    with joined() as rank:
        program(rank)


if __name__ == "__main__":
    main()
