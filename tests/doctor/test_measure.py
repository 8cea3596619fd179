"""The A/B: both sides run, the factor is theirs, and a setting that did nothing is told."""

from __future__ import annotations

import os

import msgspec
import pytest

from paceline.doctor import run
from paceline.doctor.measure import Measured, _measured, run_trial
from paceline.doctor.trials import Side, Trial, trials
from paceline.errors import JobError, WorkerFailed
from paceline.workers.processes import descendants
from tests.doctor.hosts import change, cpu_host, with_variables

THREADS = Trial(
    name="OMP_NUM_THREADS",
    a=Side(label="2 threads a rank", variables={"OMP_NUM_THREADS": "2"}, shows="2"),
    b=Side(label="1 a rank", variables={"OMP_NUM_THREADS": "1"}, shows="1"),
    reports="threads",
)


@pytest.mark.limit(150)
def test_both_sides_take_turns_and_show_that_the_setting_took_effect() -> None:
    before = set(descendants(os.getpid()))
    found = run_trial(THREADS, seconds=1.0)
    assert found.took_effect and found.evidence == "threads 2 against 1"
    assert found.turns >= 3 and found.a_seconds > 0 and found.b_seconds > 0
    assert found.low <= found.factor <= found.high
    assert set(descendants(os.getpid())) == before


@pytest.mark.limit(120)
def test_a_side_that_does_not_start_is_told_and_nothing_is_left() -> None:
    before = set(descendants(os.getpid()))
    side = Side(label="nope0", variables={"GLOO_SOCKET_IFNAME": "nope0"})
    with pytest.raises(JobError, match="nope0 selects no interface of this host"):
        run_trial(Trial(name="GLOO_SOCKET_IFNAME", a=side, b=THREADS.b, reports=""), seconds=1.0)
    assert set(descendants(os.getpid())) == before


def test_the_factor_is_the_median_of_pairs_of_turns() -> None:
    pairs = [(2.0, 1.0), (4.0, 2.0), (30.0, 1.0), (1.0, 1.0)]
    found = _measured(THREADS, pairs, [{"threads": 1}, {"threads": 1}])
    assert found.factor == 2.0 and (found.low, found.high) == (2.0, 2.0)
    assert found.took_effect is False and "had NO effect: threads 1 against 1" in found.describe()


def test_a_setting_that_took_effect_in_part_says_what_was_asked_for() -> None:
    """MKL takes no more threads than there are cores."""
    wide = Trial(name="OMP_NUM_THREADS", a=Side(label="64", shows="64"), b=THREADS.b, reports="threads")
    found = _measured(wide, [(1.0, 1.0)], [{"threads": 2}, {"threads": 1}])
    assert found.took_effect and found.evidence == "threads 2 against 1 (64 against 1 asked for)"


def test_a_difference_within_the_turns_own_is_not_called_one() -> None:
    pairs = [(0.9, 1.0), (1.1, 1.0), (0.8, 1.0), (1.2, 1.0)]
    assert "no difference that can be told" in _measured(THREADS, pairs, [{"threads": 2}, {"threads": 1}]).describe()


def test_what_nothing_here_reads_is_not_measured() -> None:
    host = with_variables(cpu_host(), NCCL_PROTO="LL128", OMP_WAIT_POLICY="active", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    wanted, left = trials(host)
    assert {t.name for t in wanted} >= {
        "OMP_WAIT_POLICY",
        "TORCH_DISTRIBUTED_DEBUG",
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
    }
    assert [(entry.id, entry.reason) for entry in left] == [
        ("measure NCCL_PROTO", "nothing here reads it: that takes two GPUs")
    ]
    alone = change(cpu_host(), interfaces=cpu_host().interfaces[:1])
    assert [entry.reason for entry in trials(alone)[1]] == ["there is no second interface with an address"]


def test_what_was_measured_before_a_failure_or_ctrl_c_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    good = _measured(THREADS, [(2.0, 1.0)], [{"threads": 2}, {"threads": 1}])
    outcomes = iter([WorkerFailed("the ranks with x ended in the middle"), good, KeyboardInterrupt()])

    def stands_in(trial: Trial) -> Measured:
        outcome = next(outcomes)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    names = ("a", "b", "c", "d")
    monkeypatch.setattr(run, "run_trial", stands_in)
    monkeypatch.setattr(run, "trials", lambda host: ([msgspec.structs.replace(THREADS, name=n) for n in names], []))
    report = run.measured(cpu_host(), run.Report(), lambda text: None)
    assert report.measured == (good,)
    reasons = {entry.id: entry.reason for entry in report.not_checked}
    assert reasons == {
        "measure a": "the ranks with x ended in the middle",
        "measure c": "interrupted by Ctrl-C",
        "measure d": "interrupted by Ctrl-C",
    }
