"""The `[data]` section: what is read, how it becomes tokens, and what is held out. Imports no numpy and no torch."""

from typing import Annotated

import msgspec
from msgspec import Meta

from paceline.config import AUTO, Section
from paceline.units import Count

HELD_OUT = "eval"
"""Name of the eval set that `eval_fraction` holds out of the sources."""


class Source(Section, frozen=True):
    """One of several sources, as a table: `{source = "code/*.py", weight = 2}`."""

    source: Annotated[str, Meta(description="As `data.source`: stdlib, a path, a glob, or hf:<dataset>", min_length=1)]
    weight: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="Share of the samples, relative to the other sources' weights"),
    ] = None
    text_key: Annotated[str | None, Meta(description="Field that holds the text; `data.text_key` unless given")] = None


SourceSpec = str | list[str | Source]


class DataSection(Section, frozen=True):
    """What is trained on and evaluated on."""

    source: Annotated[
        SourceSpec,
        Meta(
            description="stdlib (the running Python's own standard library source); a file, folder or glob of text, "
            ".jsonl or .parquet; a folder made by `paceline data prepare`; hf:<dataset>[@config][#split]; or a list of "
            "these and of tables {source, weight, text_key}"
        ),
    ] = "stdlib"
    text_key: Annotated[
        str | None,
        Meta(description='Field that holds the text in .jsonl, .parquet and hf: sources; "auto" is text', extra=AUTO),
    ] = None
    tokenizer: Annotated[
        str,
        Meta(description="bytes (vocabulary 257), the path of a tokenizer.json, or bpe:<vocabulary>: train one"),
    ] = "bytes"
    sequence_length: Annotated[int, Meta(description="Tokens per sequence", ge=1)] = 128
    eval_fraction: Annotated[
        float, Meta(description="Share of the documents held out as the eval set `eval`; 0 for none", ge=0, le=0.5)
    ] = 0.03
    eval_sequences: Annotated[
        Count, Meta(description="Sequences evaluated at most per eval set, spread evenly over it")
    ] = Count(400)
    eval: Annotated[
        dict[str, SourceSpec], Meta(description="Further eval sets by name: name = source; all of it is evaluated on")
    ] = msgspec.field(default_factory=dict)
    cache_dir: Annotated[
        str | None,
        Meta(
            description='Where token shards are kept; "auto" is $XDG_CACHE_HOME or ~/.cache, /paceline/data', extra=AUTO
        ),
    ] = None
    workers: Annotated[
        int, Meta(description="Processes per rank that prepare batches ahead; 0 is the rank itself", ge=0, le=256)
    ] = 1

    def __post_init__(self) -> None:
        if HELD_OUT in self.eval and self.eval_fraction > 0:
            raise ValueError(
                f"eval.{HELD_OUT} has the name of the held-out set that eval_fraction = {self.eval_fraction} makes; "
                "rename it, or set data.eval_fraction = 0"
            )
        if self.eval_sequences < 1:
            raise ValueError(f"eval_sequences = {self.eval_sequences} evaluates nothing; give 1 or more")
        _check_source("source", self.source)
        for name, spec in self.eval.items():
            _check_source(f"eval.{name}", spec)
        _check_tokenizer(self.tokenizer)


def sources_of(spec: SourceSpec) -> list[Source]:
    """A source setting as a list of tables."""
    entries = [spec] if isinstance(spec, str) else spec
    return [Source(source=entry) if isinstance(entry, str) else entry for entry in entries]


def _check_source(key: str, spec: SourceSpec) -> None:
    sources = sources_of(spec)
    if not sources or not all(s.source for s in sources):
        raise ValueError(f"{key} = {spec!r} names no source")
    weighted = [s for s in sources if s.weight is not None]
    if weighted and key != "source":
        raise ValueError(f"{key}: a weight has no effect on an eval set, where each sample counts once")
    if weighted and len(weighted) != len(sources):
        without = next(s.source for s in sources if s.weight is None)
        raise ValueError(f"{key}: {without!r} has no weight and others have; give each a weight, or none")
    if len(weighted) == 1:
        raise ValueError(f"{key}: the weight of a single source has no effect")


def _check_tokenizer(name: str) -> None:
    kind, colon, size = name.partition(":")
    if kind == "bpe" and colon:
        if not size.isdigit() or not 257 <= int(size) <= 1_000_000:
            raise ValueError(f"tokenizer = {name!r}: write bpe:<vocabulary> with 257 to 1000000, for example bpe:4096")
    elif not name:
        raise ValueError("tokenizer is empty; write bytes, bpe:<vocabulary> or the path of a tokenizer.json")
