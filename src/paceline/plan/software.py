"""Software generations: what a framework of some years did by habit, and what was fitted to runs of it. No torch.

One TOML file a generation in `software/`, named by its key. What a published run does not say is taken from the habits
of its generation; a constant is fitted to terms of a device and a generation, never to a run.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec

from paceline.model.flop import Recompute

FOLDER = Path(__file__).parent / "software"

OWN = "paceline"
"""The generation of this product's own runs."""


class Runs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published runs of a generation: their source, releases `since` up to but not including `before`, and the
    beginnings of what they say of sharding and of their device's key, where one source had several frameworks."""

    source: str
    since: str = ""
    before: str = ""
    shard: str = ""
    device: str = ""


class Hidden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of an exchange that run beside eligible compute: gradients and weights of the data ranks as far as there
    is compute to hide them, the rest as shares of their time."""

    gradients: float = 0.0
    weights: float = 0.0
    tensor: float = 0.0
    pipeline: float = 0.0
    context: float = 0.0


class Factors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Factors on the seconds of terms: products, memory, launches, exchanges."""

    matmul: float = 1.0
    memory: float = 1.0
    launch: float = 1.0
    network: float = 1.0


class Fitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Factors fitted to `rows` published runs on a device (`benchmarks/fit_planner.py`), at most one for 15 of them.

    without: the same, fitted without the runs of one source; what is left out of it had no other source to be fitted to.
    """

    device: str
    rows: int
    sources: tuple[str, ...]
    factors: Factors
    without: dict[str, Factors] = {}


class Software(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation.

    sequence_parallel: where tensors are split. dropout: of training. recompute, zero_stage, vocabulary, microbatch: what
    is assumed where a run does not say; the vocabulary before its padding. interleaved: stages of a block each, where a
        run does not say its schedule. cut_for_pipeline: where a run does not say its micro-batch, a rank's sequences are cut
        into as many as the pipeline has ranks.
    gradient_bytes, weight_bytes: of an element on the wire between data ranks.
    kernels: launches of one block's forward pass; a backward pass has twice as many.
    launch_seconds: the host's work for one of them; blocks whose kernels are shorter wait for it.
    step_seconds: what a step needs once, whatever its size.
    products: share of the device's rate that products keep: some search for the fastest kernel of each shape, others take
        what a rule of thumb says, with data layouts as they come.
    elementwise: bytes that norms, activations and sums move, over those of kernels that fuse all they can.
    accumulation_bytes: moved for one weight and micro-batch to add up its gradient; `fused_accumulation`: by the product
        itself. one_card: rings of all data ranks leave a node through one network card, as older software's did.
    optimizer_bytes: moved for one weight that a rank updates.
    attention: by the beginning of a device's key, the shares of the peak that fused attention's forward and backward
        products reach at a head width of 128; the longest match counts.
    """

    key: str = ""
    name: str
    framework: str
    years: tuple[int, int]
    source: str
    runs: tuple[Runs, ...] = ()
    fused_attention: bool = True
    sequence_parallel: bool = True
    dropout: float = 0.0
    recompute: Recompute = "none"
    zero_stage: Literal[0, 1, 2, 3] = 1
    vocabulary: int = 50257
    microbatch: int = 1
    interleaved: bool = False
    cut_for_pipeline: bool = False
    gradient_bytes: int = 2
    weight_bytes: int = 2
    reduce_every_microbatch: bool = False
    hidden: Hidden = Hidden()
    kernels: int = 30
    launch_seconds: float = 8e-6
    step_seconds: float = 5e-3
    products: float = 1.0
    elementwise: float = 1.0
    accumulation_bytes: float = 8.0
    fused_accumulation: bool = False
    one_card: bool = False
    optimizer_bytes: float = 34.0
    attention: dict[str, tuple[float, float]] = {}
    fitted: tuple[Fitted, ...] = ()

    def attention_reached(self, device_key: str) -> tuple[float, float]:
        """Shares of the peak that fused attention reaches, forward and backward."""
        matching = [key for key in self.attention if device_key.startswith(key)]
        return self.attention[max(matching, key=len)] if matching else (0.4, 0.33)

    def fitted_to(self, device_key: str) -> Fitted | None:
        """What was fitted to runs on a device."""
        return next((fit for fit in self.fitted if fit.device == device_key), None)


@cache
def software(key: str) -> Software:
    """A generation by its key.

    Raises:
        KeyError: there is none.
    """
    path = FOLDER / f"{key}.toml"
    if not path.is_file():
        raise KeyError(f"no software generation {key!r}: {', '.join(software_names())}")
    return msgspec.convert({"key": key, **_read(path)}, Software)


@cache
def generation_on(key: str, device_kind: str) -> Software:
    """A generation on a kind of device: a processor that computes does not exchange meanwhile, whose threads wait for it.

    Raises:
        KeyError: there is none.
    """
    found = software(key)
    return msgspec.structs.replace(found, hidden=Hidden()) if device_kind == "cpu" else found


@cache
def software_names() -> tuple[str, ...]:
    """Keys of all generations, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def software_of(source: str, release: str, shard: str, device_key: str = "") -> Software | None:
    """The generation that a published run was made with, the oldest where its release is not published, or None where no
    file names its source."""
    best: tuple[tuple[int, int], Software] | None = None
    for key in software_names():
        for runs in software(key).runs:
            if runs.source != source or not shard.startswith(runs.shard) or not device_key.startswith(runs.device):
                continue
            if release and ((runs.since and release < runs.since) or (runs.before and release >= runs.before)):
                continue
            fit = (len(runs.shard) + len(runs.device), -software(key).years[0])
            if best is None or fit > best[0]:
                best = (fit, software(key))
    return best[1] if best else None


def _read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))
