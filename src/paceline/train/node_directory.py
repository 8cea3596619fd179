"""The run directory of several nodes: one of them holds it and keeps its records, the others see it.

Who holds it already leads, else node 0; where the leader is gone, the next one waits for its lease to expire.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.errors import JobError, PacelineError, RunHeld
from paceline.job.resolve import Resolved
from paceline.run.directory import RunDirectory
from paceline.run.lease import EXPIRES_SECONDS
from paceline.train.attempts import Account, last_step
from paceline.train.local_attempt import say
from paceline.train.node_talk import Again, heard_of, leader_of
from paceline.train.shared_run import not_shared, open_run
from paceline.workers.nodes import TELL_SECONDS, Party
from paceline.workers.presence import Presence
from paceline.workers.watch import GroupResult

SEEN_SECONDS = 10.0
"""A directory that another host has made appears here after a while: file systems between hosts keep what they have seen."""


class NodeDirectory:
    """The directory as one node has it, over the attempts of its command.

    Attributes:
        run: the directory, once it is known; held where this node leads.
        leads: whether this node holds it.
        launched: when the present attempt was begun, in seconds since the epoch.
    """

    def __init__(self) -> None:
        self.run: RunDirectory | None = None
        self.leads = False
        self.launched = time.time()
        self._untold: GroupResult | None = None
        self._met: set[tuple[str, int]] = set()
        """Host and process of every supervisor that took part."""

    def release(self) -> None:
        if self.run is not None:
            self.run.release()

    def lost_leader(self, result: GroupResult) -> None:
        """The end of an attempt whose leader is gone: for the records, by the one that leads after it."""
        self._untold = result

    def open(self, party: Party, presence: Presence, resolved: Resolved) -> bool:
        """Have the run's directory: opened here for all, or as another node has it. Whether the run is done already.

        Raises:
            PacelineError: what one of the nodes has found, on all of them.
        """
        self._met |= {(one["host"], one["pid"]) for one in party.told}
        leader = leader_of(party)
        is_ours = leader == party.node_rank
        try:
            run = self._hold(party, presence, resolved) if is_ours else self._attach(party, leader, presence)
        except Again:
            if is_ours:
                party.share("run", {"again": True})
            raise
        except PacelineError as error:
            party.share_error(f"ready-{party.node_rank}", error)
            raise
        party.share(f"ready-{party.node_rank}", True)
        for rank in range(party.nodes):
            heard_of(party, presence, rank, f"ready-{rank}")
        self.launched = float(run["launched"])
        return bool(run["finished"])

    def _hold(self, party: Party, presence: Presence, resolved: Resolved) -> dict[str, Any]:
        try:
            if not self.leads:
                self.run = self._take(presence, resolved)
                self.leads = self.run.finished is None
                say(*self.run.notes)
                self._tell_of_the_leader(self.run)
        except PacelineError as error:
            party.share_error("run", error)
            raise
        directory = self.run
        assert directory is not None
        if directory.finished is not None:
            say(f"{directory.path}: this run is done ({directory.finished['steps']} steps); nothing to do")
        told = {
            "path": str(directory.path.resolve()), "attempt": directory.attempt, "launched": self.launched,
            "finished": directory.finished is not None,
        }  # fmt: skip
        party.share("run", told)
        return told

    def _tell_of_the_leader(self, directory: RunDirectory) -> None:
        lost, self._untold = self._untold, None
        if lost is not None and lost.error is not None and self.leads:
            Account(directory).fault(lost, lost.error, last_step(directory), str(lost.error.values["host"]))

    def _take(self, presence: Presence, resolved: Resolved) -> RunDirectory:
        """The directory, waited for where a node that took part held it and is gone: its lease expires."""
        before = None if self.run is None else self.run.path
        deadline, said = time.monotonic() + EXPIRES_SECONDS + 10.0, False
        while True:
            try:
                return open_run(resolved, before)
            except RunHeld as held:
                holder = (str(held.values["host"]), int(held.values["pid"]))
                if holder not in self._met or time.monotonic() > deadline:
                    raise
                if not said:
                    say(f"paceline: {held.message}; waiting for its lease to expire")
                said = True
                if presence.at_the_door:
                    raise Again from None
                time.sleep(1.0)

    def _attach(self, party: Party, leader: int, presence: Presence) -> dict[str, Any]:
        # It may have to wait for the lease of one that is gone.
        run = heard_of(party, presence, leader, "run", EXPIRES_SECONDS + TELL_SECONDS)
        if run.get("again"):
            raise Again
        if self.leads and self.run is not None:
            # It had been cut off, and the others went on: theirs is the run.
            self.run.release()
            self.leads = False
        deadline = time.monotonic() + SEEN_SECONDS
        while True:
            try:
                self.run = RunDirectory.attach(Path(run["path"]), int(run["attempt"]))
                return dict(run)
            except JobError:
                if time.monotonic() > deadline:
                    raise not_shared(f"node {party.node_rank}", run["path"], f"node {leader}") from None
            time.sleep(0.2)
