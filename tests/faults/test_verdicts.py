"""Stalls of real ranks over Gloo, each named for what it is: a drawn handful here, all kinds many times under `soak`."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import verdicts

SEED = random.randrange(1 << 30)
HANDFUL = random.Random(SEED).sample(["loader", "gil-idle", "mismatched", "size", "asleep"], 1)


# R12, R13: what is certain is named and ended within 3 s and a look, a doubtful kind named by then.
@pytest.mark.limit(100)
@pytest.mark.parametrize("kind", ["stopped", "skipped", *HANDFUL])
def test_a_stall_is_named_by_rank_and_kind(kind: str, tmp_path: Path) -> None:
    rank = random.Random(f"{SEED} {kind}").randrange(verdicts.RANKS)
    print(f"seed {SEED}: {kind} on rank {rank}")
    one, result, printed = verdicts.trial(kind, rank, tmp_path)
    assert one.right, f"{one}\n{result.error}\n{printed[-4000:]}"
    assert result.error is not None and f"rank {rank}" in result.error.message
    if result.exit_code == 76:
        assert f"paceline: stalled: rank {rank} of 3" in (result.traceback or "")
        assert (result.evidence or "").startswith(f"rank {rank}:")
        assert all(f"rank {other}:" in (result.evidence or "") for other in range(verdicts.RANKS))


@pytest.mark.soak
@pytest.mark.limit(7200)
def test_each_kind_is_named_twenty_times_of_twenty(tmp_path: Path) -> None:
    trials = [
        verdicts.trial(kind, rank, tmp_path)[0] for kind, rank in verdicts.drawn(20, list(verdicts.EXPECTED), SEED)
    ]
    print(f"seed {SEED}\n{verdicts.matrix(trials)}")
    right = Counter(trial.kind for trial in trials if trial.right)
    assert [right[kind] for kind in ("stopped", "skipped", "asleep", "loader")] == [20] * 4, verdicts.matrix(trials)
    assert sum(right.values()) >= 0.9 * len(trials), verdicts.matrix(trials)


# R14
@pytest.mark.soak
@pytest.mark.limit(2400)
def test_thirty_minutes_of_sound_running_are_not_ended(tmp_path: Path) -> None:
    ended, suspected = verdicts.sound(1800.0, tmp_path)
    assert ended == 0, suspected
