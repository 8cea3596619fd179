"""Why what was not chosen was not: each reason once, with the number of those that it holds for and an example.

Thousands of choices share a reason. A layout that a rule refuses is counted as one; of layouts that run, each way to run
them is. The numbers add up: to all layouts, and to all choices. Imports no torch, and numpy only where arrays come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from paceline.parallel.layout import Layout
from paceline.plan.setting import StepTime
from paceline.plan.space import Choice
from paceline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from paceline.plan.search import Pool


class Rejected(msgspec.Struct):
    """A reason, for how many `of` what it holds, and one of them."""

    reason: str
    count: int
    of: Literal["layouts", "choices"]
    layout: dict[str, Any]
    example: str

    def to_record(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


class Rejections:
    """The reasons so far."""

    def __init__(self) -> None:
        self._found: dict[str, Rejected] = {}
        self.layouts = 0

    def listed(self) -> list[Rejected]:
        """Layouts first, then choices, the most frequent reason first."""
        return sorted(self._found.values(), key=lambda r: (r.of == "choices", -r.count))

    def layout(self, reason: str, layout: Layout) -> None:
        """A layout that a rule refuses."""
        self.layouts += 1
        self._add("layouts", reason, 1, layout.to_record(), str(layout))

    def refused(self, reason: str, choice: Choice) -> None:
        """A choice that the job itself refuses."""
        self._add("choices", reason, 1, choice.to_record(), str(choice))

    def misfit(self, choice: Choice, needed_bytes: int, limit_bytes: int, available_bytes: int) -> None:
        """A choice that needs more memory than there is, counted exactly."""
        told = f"{choice}: {format_bytes(needed_bytes)}"
        self._add("choices", _too_large(limit_bytes, available_bytes), 1, choice.to_record(), told)

    def schedule(self, pool: Pool, indices: Any) -> None:
        """Choices whose schedule does not take their number of micro-batches, or their recomputation."""
        if len(indices):
            self._example(
                "the schedule does not take so many micro-batches, or the recomputation", pool, indices, indices[0]
            )

    def memory(self, pool: Pool, indices: Any, limit_bytes: int, available_bytes: int) -> None:
        """Choices that need more memory than there is by the parts that can be told in advance."""
        if len(indices):
            least = indices[int(pool.memory[indices].argmin())]
            choice = pool.choice(int(least))
            told = f"{choice}: at least {format_bytes(float(pool.memory[least]))}"
            self._add("choices", _too_large(limit_bytes, available_bytes), len(indices), choice.to_record(), told)

    def slower(
        self, pool: Pool, order: Any, best_seconds: float, steps: Mapping[Choice, StepTime], without: set[Choice]
    ) -> None:
        """Choices that fit as far as is known and are slower: by their prediction, or already by their bound."""
        predicted = {c: s.seconds for c, s in steps.items() if c not in without}
        if predicted:
            nearest = min(predicted, key=lambda c: predicted[c])
            reason = (
                f"predicted to take at least {format_seconds(predicted[nearest])} a step; the chosen one takes "
                + (format_seconds(best_seconds))
            )
            self._add("choices", reason, len(predicted), nearest.to_record(), str(nearest))
        unseen = len(order) - len(steps)
        if unseen > 0:
            index = next(i for i in order if pool.choice(int(i)) not in steps)
            reason = (
                f"takes at least {format_seconds(float(pool.seconds[index]))} a step by arithmetic and traffic alone; "
                "those shown take less"
            )
            choice = pool.choice(int(index))
            self._add("choices", reason, unseen, choice.to_record(), str(choice))

    def _example(self, reason: str, pool: Pool, indices: Any, index: Any) -> None:
        choice = pool.choice(int(index))
        self._add("choices", reason, len(indices), choice.to_record(), str(choice))

    def _add(
        self, of: Literal["layouts", "choices"], reason: str, count: int, layout: dict[str, Any], example: str
    ) -> None:
        known = self._found.get(reason)
        if known is None:
            self._found[reason] = Rejected(reason, count, of, layout, example)
        else:
            known.count += count


def _too_large(limit_bytes: int, available_bytes: int) -> str:
    whole = format_bytes(available_bytes)
    if limit_bytes >= available_bytes:
        return f"needs more than the {whole} of a rank"
    return f"needs more than {format_bytes(limit_bytes)} of a rank's {whole}: beyond, running out is likelier than 5%"
