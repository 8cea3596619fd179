"""Predicts the seconds of one optimizer step from a setting alone.

    step = pipeline(stages of blocks, head and loss; exchanges that nothing hides) + data exchange left over
           + optimizer + what a step needs once, and on top the slowest of many ranks

Each block is played once per kind of stage; stages are put together by the closed form of their schedule, which tests
hold to `parallel.pipeline.player`. Derivations in docs/math/step-time.md. Imports no torch.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from paceline.plan.compute import Pass, Rates, block_pass, head_pass, optimizer_seconds, unsteadiness
from paceline.plan.exchanges import DataExchange, context_seconds, data_seconds, tensor_seconds
from paceline.plan.network import send_seconds
from paceline.plan.setting import Setting, StepTime, element_bytes
from paceline.plan.software import Factors, Software, generation_on, software
from paceline.plan.verdict import Z90

CONTENTION = 0.2
"""Products run slower by this share of the time in which a collective runs beside them: it takes multiprocessors and
memory bandwidth (Calculon charges 0.15 of the multiprocessors over NVLink, Echo, arXiv 2412.12487, measures 0.38)."""

STRAGGLING = 0.004
"""What a step of 16-bit products loses by waiting for its slowest rank, for each doubling of the ranks: DGX Cloud's H100
runs lose 2.2% from 128 to 2048 devices. Shorter products lose as many seconds, a larger share."""

SHORTER = 1.4
"""Share of it in products of 8 and 4 bits over that of 16 bits."""

PRIOR_SPREAD = (0.92, 1.13)
CALIBRATED_SPREAD = (0.925, 1.11)
"""P10 and P90 of measured steps over predicted ones, of the published runs in tests/golden."""

NO_FACTORS = Factors()


class Stage(NamedTuple):
    """Seconds of one micro-batch in one stage: products and the like, and exchanges that nothing hides."""

    forward: float
    input_gradient: float
    weight_gradient: float
    exposed: float

    @property
    def total(self) -> float:
        return self.forward + self.input_gradient + self.weight_gradient + self.exposed


def predict_step(setting: Setting, calibrated: bool = False) -> StepTime:
    """Seconds of one optimizer step with its parts.

    Args:
        calibrated: with the factors fitted to runs of this device and software generation; else from the catalogue alone.
    """
    fitted = software(setting.software).fitted_to(setting.device.key) if calibrated else None
    return step_with(setting, fitted.factors if fitted else None)


def step_with(setting: Setting, factors: Factors | None) -> StepTime:
    """Seconds of one optimizer step with factors on its terms; None: from the catalogue alone."""
    generation = generation_on(setting.software, setting.device.kind)
    rates = Rates(setting.device, generation, factors or NO_FACTORS)
    block, head = block_pass(setting, rates), head_pass(setting, rates)
    network = rates.factors.network
    detail: dict[str, float] = {}
    exposed, unit = _block_exchanges(setting, generation, block, network, detail)
    stages = stages_of(setting, block, head, exposed)
    together = pipeline_seconds(setting, stages) + _sends(setting, generation, stages, network)
    slowest = max(range(len(stages)), key=lambda i: stages[i].total)
    blocks = blocks_of(setting)[slowest]
    left = _data_left(setting, generation, unit, block, blocks, network)
    optimizer = _optimizer(setting, rates, blocks)
    mean = _mean(stages)
    m = setting.accumulation
    computing = m * (mean.forward + mean.input_gradient + mean.weight_gradient)
    sigma = unsteadiness(setting.device, setting.precision)
    waiting = (straggling(setting) + sigma * slowest_of(setting.layout.world_size)) * computing
    parts = {
        "data_wait": 0.0,
        "forward": m * mean.forward,
        "backward": m * (mean.input_gradient + mean.weight_gradient),
        "bubble": together - m * mean.total,
        "reduce_exposed": m * mean.exposed + left,
        "optimizer": optimizer,
        "telemetry": 0.0,
        "other": waiting + generation.step_seconds,
    }
    total = sum(parts.values())
    low, high = widened(CALIBRATED_SPREAD if factors else PRIOR_SPREAD, sigma * computing / total)
    detail |= {
        "attention_forward": m * block.attention * setting.spec.num_layers / setting.layout.pp,
        "recomputed": m * block.again * setting.spec.num_layers / setting.layout.pp,
        "head": m * (head.forward + head.backward) / setting.layout.pp,
        "data_left": left,
    }
    return StepTime(total, total * low, total * high, parts, detail)


def straggling(setting: Setting) -> float:
    """What waiting for the slowest rank adds to a step, as a share of its arithmetic."""
    shorter = SHORTER if setting.precision in ("fp8", "fp4") else 1.0
    return STRAGGLING * shorter * math.log2(setting.layout.world_size)


def slowest_of(ranks: int) -> float:
    """By how many standard deviations the slowest of so many equal ranks is behind their mean: Blom's approximation of
    the expected largest of normal draws, at most 5% above it."""
    return 0.0 if ranks == 1 else statistics.NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


def widened(spread: tuple[float, float], sigma: float) -> tuple[float, float]:
    """P10 and P90 as shares of a prediction, of a machine whose rate has besides a deviation of `sigma`, as a share."""
    more = Z90 * sigma
    low, high = (math.hypot(math.log(edge), more) for edge in spread)
    return math.exp(-low), math.exp(high)


def blocks_of(setting: Setting) -> list[int]:
    """Blocks of each rank of the pipeline; as even as they go, fewer where the setting says so."""
    return spread(setting.spec.num_layers, setting.layout.pp, setting.first_layers, setting.last_layers)


def spread(num_layers: int, ranks: int, first_layers: int, last_layers: int) -> list[int]:
    """Blocks of each rank, as even as they go with so many fewer on the first and on the last."""
    whole = num_layers + first_layers + last_layers
    blocks = [whole // ranks + (1 if rank < whole % ranks else 0) for rank in range(ranks)]
    blocks[0] -= first_layers
    blocks[-1] -= last_layers
    return blocks


def stages_of(setting: Setting, block: Pass, head: Pass, exposed: float) -> list[Stage]:
    """What each rank of the pipeline does for one micro-batch; the last one the head and the loss as well."""
    found = [
        Stage(n * block.forward, n * (block.input_gradient + block.again), n * block.weight_gradient, n * exposed)
        for n in blocks_of(setting)
    ]
    last = found[-1]
    found[-1] = Stage(
        last.forward + head.forward,
        last.input_gradient + head.input_gradient,
        last.weight_gradient + head.weight_gradient,
        last.exposed,
    )
    return found


def pipeline_seconds(setting: Setting, stages: list[Stage]) -> float:
    """Seconds of all micro-batches through all stages, transfers left out."""
    m, ranks = setting.accumulation, setting.layout.pp
    slowest = max(stage.total for stage in stages)
    others = sum(stage.total for stage in stages) - slowest
    if setting.schedule == "zero-bubble-2p":
        return m * slowest + 0.1 * others
    if setting.schedule in ("zero-bubble", "zbv", "dualpipev"):
        mean = _mean(stages)
        wait = max(0.1 * mean.total, mean.total - 2 * mean.weight_gradient)
        return m * slowest + (ranks - 1) * wait * (0.5 if setting.schedule != "zero-bubble" else 1.0)
    if setting.schedule == "1f1b":
        return _one_forward_one_backward(m, stages)
    return m * slowest + others / setting.stages_per_rank


def _one_forward_one_backward(microbatches: int, stages: list[Stage]) -> float:
    """The longest way through a step: up to a stage and back from it, all micro-batches on that stage, and what it waits
    for the stages behind it while its own first forwards, one for each of them, do not fill that time."""
    longest, before = 0.0, 0.0
    after = sum(stage.total for stage in stages)
    for behind, stage in zip(reversed(range(len(stages))), stages, strict=True):
        after -= stage.total
        forward = stage.forward + stage.exposed / 3
        wait = max(0.0, after - behind * forward) if microbatches > 1 else after
        longest = max(longest, microbatches * stage.total + before + wait)
        before += stage.total
    return longest


def _block_exchanges(
    setting: Setting, generation: Software, block: Pass, factor: float, detail: dict[str, float]
) -> tuple[float, DataExchange]:
    """Seconds of one block and micro-batch that wait for an exchange, and the exchange of its weights and gradients."""
    hidden = generation.hidden
    tensor, context = tensor_seconds(setting, factor), context_seconds(setting, factor)
    share = {None: hidden.tensor, True: max(hidden.tensor, 0.5), False: 0.0}[setting.tensor_overlap]
    exposed, beside = _hide(sum(tensor), share)
    exposed = max(0.0, exposed - block.idle)
    waits, more = _hide(sum(context), hidden.context)
    unit = data_seconds(block_weights(setting), setting, generation, factor)
    compute = (block.forward, block.backward)
    if setting.zero_stage >= 2:
        for took, eligible in ((unit.gather, compute[0]), (unit.regather, compute[1])):
            left = took - min(took, eligible) * hidden.weights
            waits, more = waits + left, more + took - left
    if setting.zero_stage >= 1 and setting.reduce_every_microbatch:
        spare = max(0.0, compute[1] - unit.regather * hidden.weights)
        left = unit.reduce - min(unit.reduce, spare) * hidden.gradients
        waits, more = waits + left, more + unit.reduce - left
    blocks = setting.spec.num_layers / setting.layout.pp * setting.accumulation
    detail |= {
        "tensor_exchange": sum(tensor) * blocks,
        "context_exchange": sum(context) * blocks,
        "weights_exchange": (unit.gather + unit.regather) * blocks,
        "gradients_exchange": unit.reduce * blocks,
        "hidden": (beside + more) * blocks,
    }
    return exposed + waits + CONTENTION * (beside + more), unit


def _hide(took: float, share: float) -> tuple[float, float]:
    """What is left of an exchange, and what runs beside products."""
    return took * (1 - share), took * share


def _data_left(
    setting: Setting, generation: Software, unit: DataExchange, block: Pass, blocks: int, factor: float
) -> float:
    """Seconds of the exchange between data ranks that a step waits for once: at its end and at its beginning."""
    hidden = generation.hidden
    outer = data_seconds(outer_weights(setting), setting, generation, factor)
    chunks = setting.stages_per_rank
    at_once = outer.gather + unit.gather if setting.zero_stage >= 2 else unit.gather
    if setting.zero_stage >= 1 and setting.reduce_every_microbatch:
        return at_once + outer.reduce
    reduces = blocks * unit.reduce + outer.reduce
    gathers = blocks * unit.gather + outer.gather
    # The last micro-batch's backward pass hides the sums; where stages are interleaved, a stage is through while as many
    # micro-batches as there are ranks still run in each of the others.
    rounds = (1 + min(setting.accumulation, setting.layout.pp) * (chunks - 1)) / chunks
    eligible = blocks * block.backward * rounds
    left = reduces - min(reduces, eligible) * hidden.gradients
    if setting.zero_stage >= 2:
        return at_once + left + CONTENTION * (reduces - left)
    left += gathers - min(gathers, blocks * block.forward * rounds) * hidden.weights
    return left + CONTENTION * (reduces + gathers - left)


def _sends(setting: Setting, generation: Software, stages: list[Stage], factor: float) -> float:
    """Seconds in which the pipeline waits for what stages send each other."""
    layout = setting.layout
    if layout.pp == 1:
        return 0.0
    elements = setting.microbatch * setting.sequence_length / layout.cp * setting.spec.dim
    across = layout.world_size // layout.pp >= setting.devices_per_node and setting.nodes > 1
    once = send_seconds(element_bytes(setting)[1] * elements / layout.tp, across, setting, factor)
    chunks = setting.stages_per_rank
    filling = 2 * (layout.pp - 1) * once
    running = 2 * setting.accumulation * chunks * once * (1 - generation.hidden.pipeline)
    return filling + running


def block_weights(setting: Setting) -> float:
    """Weights of one block on one rank of its tensors."""
    spec = setting.spec
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    gates = 3 if spec.mlp == "swiglu" else 2
    return (spec.dim * (2 * query + 2 * key_value) + gates * spec.dim * spec.ffn_dim) / setting.layout.tp + 2 * spec.dim


def outer_weights(setting: Setting) -> float:
    """Weights outside of blocks on the rank that has most of them."""
    spec, layout = setting.spec, setting.layout
    tables = 1 if spec.tie_embeddings or layout.pp > 1 else 2
    return tables * spec.vocab_size * spec.dim / layout.tp


def _optimizer(setting: Setting, rates: Rates, blocks: int) -> float:
    weights = blocks * block_weights(setting) + outer_weights(setting)
    return optimizer_seconds(weights / (setting.layout.shards if setting.zero_stage else 1), rates)


def _mean(stages: list[Stage]) -> Stage:
    return Stage(*(sum(values) / len(stages) for values in zip(*stages, strict=True)))
