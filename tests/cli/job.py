"""A job that trains in a second, for tests of whole commands."""

from __future__ import annotations

SMALL = [
    "model.num_layers=1", "model.dim=32", "model.num_heads=2", "model.ffn_dim=32", "data.sequence_length=32",
    "data.source=text.txt", "data.eval_fraction=0.1", "data.cache_dir=cache", "data.eval_sequences=8", "batch.global_batch=8",
    "optimizer.warmup_steps=2", "run.log_every=5",
]  # fmt: skip
TEXT = "the quick brown fox jumps over the lazy dog, and the dog does not mind at all.\n" * 4000
