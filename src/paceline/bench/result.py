"""What a measurement came to, as `--json` prints it and as `--store` keeps it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from paceline.bench.ranks import Told, command_line, kept
from paceline.bench.remarks import Remark
from paceline.errors import PacelineError


class Result(NamedTuple):
    """Rows of one measurement, what they mean, and what ended it early (None: nothing did)."""

    measurement: str
    about: dict[str, Any]
    rows: list[dict[str, Any]]
    remarks: Sequence[Remark]
    error: PacelineError | None
    date: str
    command: str

    @property
    def exit_code(self) -> int:
        return 0 if self.error is None else self.error.exit_code

    def document(self) -> dict[str, Any]:
        """The document of `bench MEASUREMENT --json`, less its schema."""
        return {
            "measurement": self.measurement, "date": self.date, "command": self.command, "complete": self.error is None,
            **self.about, "rows": self.rows, "remarks": msgspec.to_builtins(list(self.remarks)), "exit": self.exit_code,
        }  # fmt: skip


def result_of(measurement: str, told: Told, remarks: Sequence[Remark] = (), **about: Any) -> Result:
    """The result of what a rank program told: one record `about`, then rows."""
    said = next((record for record in told.records if record["kind"] == "about"), {})
    rows = [record for record in told.records if record["kind"] == "row"]
    return Result(
        measurement=measurement, about={**about, **_plain(said)}, rows=[_plain(row) for row in rows], remarks=remarks,
        error=kept(told.error, len(rows)) if told.error is not None else None, date=now(), command=command_line(),
    )  # fmt: skip


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "kind"}
