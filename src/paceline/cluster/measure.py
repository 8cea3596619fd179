"""Rates of the device under a rank, measured: what MFU is a share of."""

from __future__ import annotations

import time

import torch

SIZES = {"cpu": (512, 1024), "cuda": (8192,)}
"""Edge of the square matrices; the best rate of all sizes is the peak that this rank can reach."""

BUDGET_SECONDS = 0.1


def matmul_peak(dtype: torch.dtype, device: torch.device, budget_seconds: float = BUDGET_SECONDS) -> float:
    """Best FLOP/s of a square matrix product (2 n^3 FLOP) in `dtype` with this rank's threads.

    Measure on all ranks of a host at once: they share its memory bandwidth and, on a CPU, its power.
    """
    return max(_rate(size, dtype, device, budget_seconds / len(SIZES[device.type])) for size in SIZES[device.type])


def _rate(size: int, dtype: torch.dtype, device: torch.device, budget_seconds: float) -> float:
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(size, size, generator=generator).to(device, dtype)
    right = torch.randn(size, size, generator=generator).to(device, dtype)
    result = torch.empty(size, size, device=device, dtype=dtype)
    torch.mm(left, right, out=result)
    best = float("inf")
    started = time.perf_counter()
    while True:
        _synchronise(device)
        before = time.perf_counter()
        torch.mm(left, right, out=result)
        _synchronise(device)
        now = time.perf_counter()
        best = min(best, now - before)
        if now - started > budget_seconds:
            return 2 * size**3 / best


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
