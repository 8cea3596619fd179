"""The `[model]` section: a catalogue preset, and any architecture key that should differ from it."""

from typing import Annotated, Literal

from msgspec import Meta

from paceline.config import Section

_KEYS_OF_TYPE = {
    "linear": (),
    "llama3": ("original_max_sequence_length", "low_frequency_factor", "high_frequency_factor"),
    "yarn": ("original_max_sequence_length", "beta_fast", "beta_slow", "attention_factor"),
}


class RopeScaling(Section, frozen=True):
    """How rotary frequencies are stretched for sequences longer than those of the original training.

    Raises ValueError for a key that its type does not use, and for a missing `original_max_sequence_length`.
    """

    type: Annotated[
        Literal["linear", "llama3", "yarn"],
        Meta(description="linear: every frequency; llama3: low frequencies, by wavelength; yarn: by turns"),
    ]
    factor: Annotated[float, Meta(description="how many times longer sequences become", ge=1.0)]
    original_max_sequence_length: Annotated[
        int | None, Meta(description="llama3, yarn: sequence length of the original training, in tokens")
    ] = None
    low_frequency_factor: Annotated[
        float | None, Meta(description="llama3: wavelengths above original length / this are stretched in full (1)")
    ] = None
    high_frequency_factor: Annotated[
        float | None, Meta(description="llama3: wavelengths below original length / this stay as they are (4)")
    ] = None
    beta_fast: Annotated[
        float | None, Meta(description="yarn: frequencies with more turns in the original length stay (32)")
    ] = None
    beta_slow: Annotated[
        float | None, Meta(description="yarn: frequencies with fewer turns are stretched in full (1)")
    ] = None
    attention_factor: Annotated[
        float | None, Meta(description="yarn: factor on the rotary tables (0.1 ln(factor) + 1)")
    ] = None

    def __post_init__(self) -> None:
        used = _KEYS_OF_TYPE[self.type]
        for key in {k for keys in _KEYS_OF_TYPE.values() for k in keys} - set(used):
            if getattr(self, key) is not None:
                raise ValueError(f"rope_scaling.{key} has no effect with type {self.type!r}")
        if "original_max_sequence_length" in used and not self.original_max_sequence_length:
            raise ValueError(f"rope_scaling.type {self.type!r} needs rope_scaling.original_max_sequence_length")
        for key in used:
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise ValueError(f"rope_scaling.{key} = {value} is not above 0")


class ModelSection(Section, frozen=True):
    """What is trained. Every key left out comes from the preset.

    `num_kv_heads` and `head_dim` follow from `num_heads` and `dim` where the preset does not name them.
    """

    preset: Annotated[str, Meta(description="a model of the catalogue, whose keys the ones below replace")] = "tiny"
    num_layers: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="transformer blocks")] = None
    dim: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="width of the residual stream")] = None
    num_heads: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="query heads")] = None
    num_kv_heads: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="key and value heads; divides num_heads")
    ] = None
    head_dim: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="width of one head")] = None
    ffn_dim: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="inner width of the feed-forward layer")] = (
        None
    )
    vocab_size: Annotated[
        Annotated[int, Meta(ge=2)] | None, Meta(description="rows of the embedding, padding included")
    ] = None
    tie_embeddings: Annotated[bool | None, Meta(description="output head uses the embedding's weight")] = None
    rope_theta: Annotated[Annotated[float, Meta(gt=1.0)] | None, Meta(description="base of the rotary frequencies")] = (
        None
    )
    rope_scaling: Annotated[RopeScaling | None, Meta(description="stretching of the rotary frequencies")] = None
    norm: Annotated[Literal["rmsnorm", "layernorm"] | None, Meta(description="normalisation before each branch")] = None
    norm_eps: Annotated[
        Annotated[float, Meta(gt=0.0)] | None, Meta(description="added to the variance before the root")
    ] = None
    mlp: Annotated[Literal["swiglu", "gelu"] | None, Meta(description="feed-forward layer: gated, or plain")] = None
    positions: Annotated[
        Literal["rope", "learned"] | None, Meta(description="rotary positions, or a learned table")
    ] = None
    qk_norm: Annotated[bool | None, Meta(description="RMSNorm on each query and key head")] = None
    qkv_bias: Annotated[bool | None, Meta(description="bias on the query, key and value layers")] = None
    bias: Annotated[bool | None, Meta(description="bias on every linear layer and norm but the head (GPT-2)")] = None
    dropout: Annotated[
        Annotated[float, Meta(ge=0.0, lt=1.0)] | None,
        Meta(description="share of each branch's output that is dropped in training"),
    ] = None
    attention_dropout: Annotated[
        Annotated[float, Meta(ge=0.0, lt=1.0)] | None,
        Meta(description="share of attention weights that is dropped in training"),
    ] = None
    max_sequence_length: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="longest sequence the model takes")
    ] = None
