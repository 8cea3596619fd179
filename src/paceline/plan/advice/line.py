"""A line of advice: what to do, with the arithmetic of this very job. No torch."""

from __future__ import annotations

from typing import Any

import msgspec


class Advice(msgspec.Struct, frozen=True):
    """What `rule` says of a job: `says` the advice, `arithmetic` its numbers in words, `values` the same for programs,
    `source` who found it."""

    rule: str
    says: str
    arithmetic: str
    values: dict[str, Any]
    source: str

    def to_record(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)
