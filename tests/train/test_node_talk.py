"""What a leader tells of a failed attempt is what every other node counts, for the one that leads next."""

from __future__ import annotations

import json
from typing import Any

from paceline.errors import NoProgress, WorkerFailed
from paceline.train.node_talk import failed_of, followed, tell_meet
from paceline.workers.supervise import Attempt, End, Restart, Supervision


class Said:
    """A party that keeps what is shared, as JSON as the store does."""

    def share(self, key: str, value: Any) -> None:
        self.heard = json.loads(json.dumps({key: value}))


def heard_of(failed: Attempt | None) -> dict[str, Any]:
    party: Any = Said()
    tell_meet(party, 0.0, failed)
    heard: dict[str, Any] = party.heard["next"]
    return heard


def test_restarts_count_on_every_node() -> None:
    leader, follower = Supervision(max_restarts=3), Supervision(max_restarts=3)
    crash = Attempt(
        WorkerFailed("rank 1 died", values={"rank": 1}), signature="died", start=5, reached=7, traceback="T"
    )
    for _ in range(2):
        assert isinstance(leader.after(crash), Restart)
        heard = heard_of(crash)
        assert followed(heard) is None
        told = failed_of(heard)
        assert told is not None and told._replace(error=None) == crash._replace(error=None)
        follower.after(told)
    # The leader is lost; the third failure ends the run with the first one's traceback, as it would have there.
    end = follower.after(crash)
    assert isinstance(end, End) and isinstance(end.error, NoProgress) and end.traceback == "T"
    assert "the first failure was: rank 1 died" in end.error.message


def test_a_meeting_without_a_failure_counts_nothing() -> None:
    assert failed_of(heard_of(None)) is None
