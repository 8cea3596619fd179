"""Seconds of a block's operations on one device: products, attention, what only moves memory, launches. No torch.

A product takes the longer of its operations at the rate of the device's curve and of its bytes; tiles that do not fill
the multiprocessors evenly leave some of them idle. Norms, activations and sums take the time of their bytes. The host
must launch every kernel, and a pass whose kernels are shorter than that waits for it.

Shapes: T tokens of a micro-batch on a rank, D width, F width of the MLP, t ranks that split tensors.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from paceline.cluster.device import Device, ProductType
from paceline.cluster.measured import Curve
from paceline.plan.setting import Setting, element_bytes
from paceline.plan.software import Factors, Software

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.75), (64, 64, 0.55))
"""Tiles of product kernels with the share of the best rate that each reaches: the kernel that is fastest is chosen."""

KERNEL_SECONDS = 1e-6
"""The shortest time of a kernel on an accelerator."""

UNALIGNED = 0.2
"""Rate of 16-bit products of which a side is no multiple of 8 elements, as a share of aligned ones: loads of 16 bytes
do not fit."""

RECIPE_RATES = {"rowwise": 0.6, "mx": 0.93}
"""Rates of products whose numbers are scaled by row or by block of 32, as shares of those scaled by tensor: they scale
their partial sums as well (pytorch/torchtitan, docs of float8 and async TP: 597 tokens/s against 810 on an H100)."""

BATCHED = 0.6
"""What the products of written-out attention, many small ones in a batch, reach of the rate of one large one."""

FORWARD_SCORE_BYTES = 8
DROPOUT_SCORE_BYTES = 5
BACKWARD_SCORE_BYTES = 14
"""Moved for each score of written-out attention in 16 bit: product out, softmax in and out, product in; dropout with its
mask; and their gradients."""

SHORT_SEQUENCE = 256
"""Fused attention reaches half of its rate on sequences this long: its blocks are few and their edges many."""

LOSS_BYTES = 56
"""Moved for each logit by a loss in fp32 that is not fused: widening, maximum, exponential, sum, division, and back."""

ACTIVATION_PASSES = {"gelu": (2, 3), "swiglu": (3, 5), "squared-relu": (4, 6)}
"""Elements moved for one of the MLP's width, forward and backward: one kernel each, two for a squared ReLU."""

SIXTEEN = 2
"""Bytes of an element of the residual stream."""


HALF_QUARTILE = 0.6745
"""Half the distance between the quartiles of a normal distribution, in standard deviations: what a curve's spread is."""


class Pass(NamedTuple):
    """Seconds of a block, or of the head and the loss, for one micro-batch on one rank. `idle`: of them, how long the
    device waits for the host to launch, in which it may exchange."""

    forward: float
    input_gradient: float
    weight_gradient: float
    again: float
    attention: float
    idle: float = 0.0

    @property
    def backward(self) -> float:
        return self.input_gradient + self.weight_gradient + self.again


class Rates(msgspec.Struct, frozen=True):
    """What a device reaches under a software generation, with the factors fitted to both."""

    device: Device
    software: Software
    factors: Factors

    def product(self, m: float, n: float, k: float, kind: ProductType, result_bytes: float = SIXTEEN) -> float:
        """Seconds of one product of m x k with k x n, which moves so many bytes for each number of its result."""
        flop = 2.0 * m * n * k
        width = {"fp64": 8, "fp32": 4, "fp8": 1, "fp4": 0.5}.get(kind, 2)
        moved = self.move(width * (m * k + k * n) + result_bytes * m * n)
        rate = rate_at(curve_of(self.device, kind), flop) * filled(m, n, self.device.units)
        if self.device.units and (int(k) % 8 or int(n) % 8):
            rate *= UNALIGNED
        return max(flop / rate * self.factors.matmul / self.software.products, moved)

    def move(self, size_bytes: float) -> float:
        """Seconds to read and write so many bytes in all."""
        return (
            float(size_bytes) / (self.device.memory_bytes_per_second * self.device.memory_reached) * self.factors.memory
        )

    def host(self, kernels: float) -> float:
        """Seconds in which the host launches kernels."""
        return kernels * self.software.launch_seconds * self.factors.launch


def curve_of(device: Device, kind: ProductType) -> Curve:
    """The curve of products of an element type, or of the first one that the device has."""
    products = [curve for curve in device.curves if curve.operation == "matmul"]
    return next((curve for curve in products if curve.dtype == kind), products[0])


def measured_attention(device: Device, kind: ProductType, length: int) -> float | None:
    """FLOP/s of fused attention's forward pass at a sequence length, where it was measured."""
    found = next((c for c in device.curves if c.operation == "attention" and c.dtype == kind), None)
    return None if found is None else min(rate_at(found, length), max(found.rates))


def unsteadiness(device: Device, kind: ProductType) -> float:
    """Standard deviation of a measured device's rate, as a share of it: of products of that type, the median over sizes.

    A processor that is shared with others has a large one; data sheets state none, so that a catalogue's device has 0.
    """
    spreads = curve_of(device, kind).spreads
    return statistics.median(spreads) / HALF_QUARTILE if spreads else 0.0


def rate_at(curve: Curve, flop: float) -> float:
    """FLOP/s of a product of that many operations, between the measured sizes by their logarithm."""
    sizes, rates = curve.sizes, curve.rates
    at = bisect_left(sizes, flop)
    if at == 0:
        return rates[0] * flop / sizes[0]
    if at == len(sizes):
        return rates[-1]
    share = math.log(flop / sizes[at - 1]) / math.log(sizes[at] / sizes[at - 1])
    return float(rates[at - 1] * (rates[at] / rates[at - 1]) ** share)


@lru_cache(maxsize=1 << 14)
def filled(m: float, n: float, units: int) -> float:
    """Share of its rate that a product of m x n results reaches as its tiles fill the multiprocessors unevenly."""
    if not units:
        return 1.0
    best = 0.0
    for rows, columns, share in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        # The last wave is neither lost whole nor saved whole: tiles of it begin as soon as those before them end.
        waves = (math.ceil(tiles / units) + max(1.0, tiles / units)) / 2
        best = max(best, share * m * n / (waves * units * rows * columns))
    return best


def block_pass(setting: Setting, rates: Rates) -> Pass:
    """One block, without what ranks exchange."""
    spec, t, width = setting.spec, setting.layout.tp, setting.spec.dim
    tokens = setting.microbatch * setting.sequence_length // setting.layout.cp
    kind = setting.precision
    query, key_value = spec.num_heads * spec.head_dim / t, max(1, spec.num_kv_heads / t) * spec.head_dim
    gates = 2 if spec.mlp == "swiglu" else 1
    shapes = (
        (query + 2 * key_value, width),
        (width, query),
        (gates * spec.ffn_dim / t, width),
        (width, spec.ffn_dim / t),
    )
    scaled = 1 / RECIPE_RATES.get(setting.recipe, 1.0)
    forward = sum(rates.product(tokens, n, k, kind) for n, k in shapes) * scaled
    inputs = sum(rates.product(tokens, k, n, kind) for n, k in shapes) * scaled
    weights = sum(weight_gradient(n, k, tokens, kind, rates) for n, k in shapes) * scaled
    cast = _casts(setting, rates, shapes, tokens)
    attention = _attention(setting, rates)
    moved_forward, moved_backward = _elementwise(setting, rates, tokens)
    kernels = rates.software.kernels * (0.6 if setting.compile else 1.0)
    floor = KERNEL_SECONDS * kernels if rates.device.units else 0.0
    forward += cast[0] + attention[0] + moved_forward + floor
    inputs += cast[1] + attention[1] + moved_backward + 2 * floor
    again = _again(setting, forward, attention, moved_forward, shapes, rates, tokens)
    late = max(0.0, rates.host(kernels) - forward)
    short = max(0.0, rates.host(2 * kernels) - inputs - weights)
    more = max(0.0, rates.host(kernels) * setting.recomputed_layers - again) if again else 0.0
    return Pass(forward + late, inputs + short, weights, again + more, attention[0], late + short + more)


def weight_gradient(n: float, k: float, tokens: float, kind: ProductType, rates: Rates) -> float:
    """Seconds of the gradient of n x k weights and of adding it up: in the product itself, or after it."""
    bytes_each = rates.software.accumulation_bytes
    if rates.software.fused_accumulation:
        return rates.product(n, k, tokens, kind, bytes_each)
    return rates.product(n, k, tokens, kind) + rates.move(bytes_each * n * k)


def head_pass(setting: Setting, rates: Rates) -> Pass:
    """The output head and the loss; products of 16 bit whatever the blocks' are."""
    tokens = setting.microbatch * setting.sequence_length / setting.layout.cp
    kind: ProductType = "bf16" if setting.precision in ("fp8", "fp4") else setting.precision
    part, width = setting.spec.vocab_size / setting.layout.tp, setting.spec.dim
    part = math.ceil(part / 64) * 64
    loss = rates.move(tokens * part * LOSS_BYTES / 2)
    return Pass(
        rates.product(tokens, part, width, kind) + loss,
        rates.product(tokens, width, part, kind) + loss,
        weight_gradient(part, width, tokens, kind, rates),
        0.0,
        0.0,
    )


def optimizer_seconds(weights: float, rates: Rates) -> float:
    """Seconds to update so many weights of a rank; their bytes through memory."""
    return rates.move(weights * rates.software.optimizer_bytes)


def _casts(setting: Setting, rates: Rates, shapes: Sequence[tuple[float, float]], tokens: float) -> tuple[float, float]:
    """Numbers are narrowed before products of 8 and 4 bits, as they are and turned round, forward and backward; and
    whole weights of 4 bytes by autocast, once a forward pass."""
    product_bytes, stream_bytes = element_bytes(setting)
    if product_bytes < stream_bytes and setting.zero_stage == 0:
        return rates.move((product_bytes + stream_bytes) * sum(n * k for n, k in shapes)), 0.0
    if setting.precision not in ("fp8", "fp4"):
        return 0.0, 0.0
    moved = {"rowwise": 8.0, "mx": 5.0}.get(setting.recipe, 4.0)
    inputs = tokens * sum(k for _, k in shapes) + sum(n * k for n, k in shapes) / setting.accumulation
    gradients = tokens * sum(n for n, _ in shapes)
    return rates.move(moved * inputs), rates.move(moved * gradients)


def _attention(setting: Setting, rates: Rates) -> tuple[float, float]:
    """Forward and backward seconds of attention, projections left out."""
    spec, layout = setting.spec, setting.layout
    heads, length = spec.num_heads / layout.tp, setting.sequence_length
    scores = setting.microbatch * heads * length * length / layout.cp
    sixteen: ProductType = "fp16" if "bf16" not in rates.device.peak else "bf16"
    wide = setting.precision if setting.precision in ("fp32", "fp64") else sixteen
    peak = rates.device.peak[wide]
    if setting.fused_attention:
        flop = 4 * scores * spec.head_dim / 2
        padded = spec.head_dim / (math.ceil(spec.head_dim / 64) * 64) * (0.9 if spec.head_dim <= 64 else 1.0)
        share = padded * length / (length + SHORT_SEQUENCE)
        measured = measured_attention(rates.device, wide, length)
        if measured is not None:
            there = flop / measured * rates.factors.matmul
            return there, 2.5 * there
        forward, backward = rates.software.attention_reached(rates.device.key)
        scale = rates.factors.matmul / (peak * share)
        return flop / forward * scale, 2.5 * flop / backward * scale
    rate = curve_of(rates.device, wide).rates[-1] * BATCHED / rates.factors.matmul
    padded_width = math.ceil(spec.head_dim / 32) * 32
    if spec.head_dim % 8:
        rate *= UNALIGNED
    flop = 4 * scores * padded_width
    dropped = DROPOUT_SCORE_BYTES if spec.attention_dropout else 0
    forward_seconds = flop / rate + rates.move(scores * (FORWARD_SCORE_BYTES + dropped))
    return forward_seconds, 2 * flop / rate + rates.move(scores * (BACKWARD_SCORE_BYTES + dropped))


def _elementwise(setting: Setting, rates: Rates, tokens: float) -> tuple[float, float]:
    """Forward and backward seconds of norms, residual sums, activations, rotations.

    Per token, in elements read and written: a norm 2 D, a residual sum 3 D, gelu 2 F, a gated activation 3 F, rotation
    twice queries and keys; their gradients 3 D, 3 D, 3 F, 5 F and the same.
    """
    spec, t = setting.spec, setting.layout.tp
    stream = spec.dim / (t if setting.sequence_parallel else 1)
    dropped = 1.0 * stream if spec.dropout else 0.0
    turned = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim / t
    inner = spec.ffn_dim / t
    there, back = ACTIVATION_PASSES.get(spec.mlp, (2, 3))
    product_bytes, stream_bytes = element_bytes(setting)
    forward = stream_bytes * (10 * stream + dropped) + product_bytes * (there * inner + turned)
    backward = stream_bytes * (12 * stream + dropped) + product_bytes * (back * inner + turned)
    passes = 1.0 + (rates.software.elementwise - 1.0) * (0.3 if setting.compile else 1.0)
    scale = tokens * passes
    return rates.move(scale * forward), rates.move(scale * backward)


def _again(
    setting: Setting,
    forward: float,
    attention: tuple[float, float],
    moved: float,
    shapes: Sequence[tuple[float, float]],
    rates: Rates,
    tokens: float,
) -> float:
    """Seconds of what the backward pass computes anew."""
    if setting.recompute == "none":
        return 0.0
    if setting.recompute == "full":
        return forward * setting.recomputed_layers
    if setting.recomputed == "attention":
        return attention[0] if setting.fused_attention else attention[0] * 0.8
    if setting.recomputed == "every other product":
        return moved + 0.5 * sum(rates.product(tokens, n, k, setting.precision) for n, k in shapes)
    if setting.recomputed == "mlp":
        return moved + rates.product(tokens, *shapes[2], setting.precision)
    return moved
