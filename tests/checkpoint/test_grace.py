"""The grace chain: its formula, its inputs, and when a start is refused."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.checkpoint.grace import Measured, chain, check, lead_of, measured, percentile
from paceline.errors import JobError


def record(kind: str, seconds: float = 0.0, attempt: int = 1, step: int = 1, state: str = "durable") -> dict[str, Any]:
    return {"kind": kind, "attempt": attempt, "step": step, "seconds": seconds, "state": state}


def test_first_steps_and_failed_saves_do_not_count_and_eval_sets_of_a_step_add_up() -> None:
    records = [
        record("run_started"), record("step", 60.0), record("step", 1.0), record("step", 2.0),
        record("eval", 3.0, step=3), record("eval", 4.0, step=3), record("checkpoint", 5.0),
        record("checkpoint", 99.0, state="failed"), record("run_started", attempt=2), record("step", 50.0),
    ]  # fmt: skip
    assert measured(records) == Measured(save=5.0, step=2.0, evaluation=7.0)
    assert measured([]) == Measured()


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile(range(1, 1001)) == 990
    assert percentile([3.0, 1.0]) == 3.0 and percentile([]) == 0.0


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, None),
        ({"TORCHELASTIC_RUN_ID": "x"}, 30.0),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, 120.0),
        ({"TORCHELASTIC_RUN_ID": "x", "SBATCH_SIGNAL": "B:USR1@20"}, 20.0),
        ({"SBATCH_SIGNAL": "USR1"}, None),
        ({"TERMINATION_GRACE_PERIOD_SECONDS": "45", "SBATCH_SIGNAL": "TERM@90"}, 45.0),
    ],
)
def test_the_shortest_lead_counts(environment: dict[str, str], seconds: float | None) -> None:
    assert lead_of(environment)[0] == seconds


def test_a_save_that_does_not_fit_is_refused_with_the_numbers_and_the_mend() -> None:  # R20
    took = Measured(save=20.0, step=2.0)
    assert chain(took, 32.0, {}).need == 32.0 and chain(took, 32.0, {}).holds
    with pytest.raises(
        JobError, match=r"a step 2.00 s \+ a save 20.0 s x 1.5 = 32.0 s, and recovery.grace leaves 30.0 s"
    ) as no:
        check(took, 30.0, {})
    assert no.value.key == "recovery.grace" and "recovery.grace=32s" in str(no.value.hint)
    with pytest.raises(JobError, match=r"torchrun's default leaves 30\.0 s"):
        check(took, 60.0, {"TORCHELASTIC_RUN_ID": "x"})
    assert check(Measured(), 30.0, {}) == [], "nothing is known of a fresh run"


def test_what_may_not_fit_is_a_warning() -> None:
    (text,) = check(Measured(save=10.0, step=1.0, evaluation=20.0), 30.0, {})
    assert "a signal during an evaluation may cost the last steps" in text
    (text,) = check(Measured(save=1.0), 60.0, {"TORCHELASTIC_RUN_ID": "x"})
    assert "recovery.grace is 1m 00s, but torchrun's default leaves 30.0 s" in text and "=60" in text
