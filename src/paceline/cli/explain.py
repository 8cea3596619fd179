"""What `--explain` prints: the resolved job with the origin of each value, and every derived value with its formula."""

from __future__ import annotations

from paceline.cli import print_document
from paceline.job.resolve import Resolved
from paceline.job.write import resolved_toml, resolved_values


def explain(resolved: Resolved, *, as_json: bool) -> int:
    """Print and start nothing."""
    if as_json:
        values = resolved_values(resolved)
        document = {
            "job": {key: {"value": value, "origin": resolved.job.origin(key)} for key, value in values.items()},
            "derivations": [{"key": d.key, "value": d.value, "formula": d.formula} for d in resolved.derivations],
            "exit": 0,
        }
        print_document("train", document)
        return 0
    print(resolved_toml(resolved))
    print("# Derived:")
    for derivation in resolved.derivations:
        print(f"#   {derivation}")
    return 0
