"""`paceline train` on one of several hosts: the same command on each, one run, one of them keeping its directory.

Before each attempt the supervisors meet (`workers.nodes`). One of them leads: who holds the directory already, else node 0.
It opens the directory for all, keeps the records, and says what follows when an attempt has ended on every node
(`node_outcome`). A supervisor that is told to stop has the step ended and saved everywhere and leaves; the others meet again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from paceline.cluster.probe import probe_host
from paceline.errors import Interrupted, PacelineError, Stalled
from paceline.job.load import Job
from paceline.job.resolve import Resolved, procs_here
from paceline.job.write import resolved_values
from paceline.run.control import DOOR, PROCS, Control
from paceline.run.directory import RunDirectory
from paceline.run.files import write_atomic
from paceline.train.attempts import Account, attempt_of, last_step, restart_line, summary, traceback_lines
from paceline.train.elastic import JobFor, resolve_nodes
from paceline.train.local_attempt import Attempt, run_attempt, say
from paceline.train.node_directory import NodeDirectory
from paceline.train.node_outcome import GONE_SECONDS, Follows, Report, follows, gone
from paceline.train.node_talk import (
    Again,
    agree,
    broke_elsewhere,
    failed_of,
    followed,
    heard_of,
    leader_of,
    report_of,
    tell_end,
    tell_meet,
)
from paceline.train.requests import with_what_stands
from paceline.units import Procs
from paceline.workers.decide import interrupted
from paceline.workers.interrupts import Asked, Interrupts, raising
from paceline.workers.limits import Limits
from paceline.workers.nodes import TELL_SECONDS, Membership, NotHeard, Party, RunOver, StoreLost, lost_endpoint
from paceline.workers.presence import Presence, ended_key
from paceline.workers.signals import signal_name
from paceline.workers.start import Place, WorkerGroup
from paceline.workers.supervise import End, Supervision
from paceline.workers.watch import GroupResult


def supervise_nodes(
    job: Job, words: list[str], plan: Callable[[Resolved], dict[str, Any]], report: Callable[[Path], object],
    job_for: JobFor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train the job with the workers of this host and those of others.

    Args:
        job: the parsed job, the same on all hosts.
        words: the command line words that made it, which the workers parse again.
        plan: what is predicted for a resolved job, for `plan.json`.
        report: writes the run's report, on the host that kept the records.
        job_for: the job with the layout that is planned for a number of ranks, where it asks for that.

    Returns:
        The summary of `train --json`, less its schema.

    Raises:
        PacelineError: what the run came to, where that is not exit code 0.
    """
    host = probe_host()
    procs = procs_here(job, host)
    sizes = resolve_nodes(job, procs, host, job_for)
    endpoint, start = str(job.launch.rendezvous), float(job.recovery.start_timeout)
    with raising():
        say(f"paceline: meeting {_wanted(job.launch.nodes)} at {endpoint}")
        try:
            member = Membership(endpoint, job.name, job.launch.nodes or Procs(1), start)
        except Asked as asked:
            raise interrupted(asked.how, [], None) from None
        if member.serves:
            say(f"paceline: {endpoint} is served here")
        node = _Node(job, procs, sizes, words, plan, member)
        with contextlib.closing(node):
            error = node.run()
        if error is not None:
            raise error
        directory = node.shared.run or RunDirectory.attach(job.run_path, 1)
        if node.shared.leads:
            say(f"report: {report(directory.path)}")
        return summary(directory, node.resolved)


class _Node:
    """This host's supervisor, over the attempts of one command.

    Attributes:
        shared: the run's directory, as this node has it.
        resolved: the job as the present attempt runs it.
    """

    def __init__(
        self, job: Job, procs: int, sizes: dict[int, Resolved], words: list[str],
        plan: Callable[[Resolved], dict[str, Any]], member: Membership,
    ) -> None:  # fmt: skip
        self._job, self._words, self._plan, self._member = job, words, plan, member
        self._procs, self._sizes, self._endpoint = procs, sizes, str(job.launch.rendezvous)
        self.resolved = next(iter(sizes.values()))
        self.shared = NodeDirectory()
        recovery = job.recovery
        self._policy = Supervision(
            recovery.max_restarts, float(recovery.backoff), restart_stalled=recovery.on_stall != "stop"
        )
        self._limits = Limits(None if recovery.stall_timeout is None else float(recovery.stall_timeout))
        self._opened = 0
        self._party: Party | None = None

    def close(self) -> None:
        """Give the directory back, and leave the others to themselves."""
        self._member.leave()
        self.shared.release()

    def run(self) -> PacelineError | None:
        """Attempt after attempt; the error that the run ends with on this node, if any."""
        try:
            while True:
                party = self._meet()
                with contextlib.suppress(Again), self._presence(party) as presence:
                    if self.shared.open(party, presence, self.resolved):
                        return self._over(None)
                    end = self._attempt(party, presence)
                    if end is not None:
                        return self._over(end)
        except RunOver:
            say("paceline: the other nodes have ended the run; nothing is left for this one")
            return None
        except Asked as asked:
            return self._ended(interrupted(asked.how, [], None))
        except StoreLost:
            return self._ended(lost_endpoint(self._endpoint))
        except Stalled as error:
            return self._ended(error)
        except PacelineError:
            self._goodbye()
            raise

    def _ended(self, error: PacelineError, traceback: str | None = None) -> PacelineError:
        """The error of the command, once it is on record; of one that leads."""
        directory = self.shared.run
        if directory is None:
            return error
        step = last_step(directory)
        if isinstance(error, Interrupted):
            error = with_what_stands(error, self.resolved.job.checkpoint.place(directory.path), step)
        with Interrupts():
            account = Account(directory)
            if self.shared.leads:
                account.end(error, step)
            say(*account.notes, *traceback_lines(traceback))
        return error

    def _meet(self) -> Party:
        """The nodes of the next attempt, with the job as it is for so many of them.

        Raises:
            JobError: they were told of different jobs.
        """
        told = {
            "host": os.uname().nodename, "pid": os.getpid(), "address": self._member.address, "procs": self._procs,
            "leads": self.shared.leads, "serves": self._member.serves,
            "values": msgspec.to_builtins(resolved_values(next(iter(self._sizes.values()))), enc_hook=str),
        }  # fmt: skip
        self._party = party = self._member.meet(told)
        agree(party)
        self.resolved = self._sizes[party.nodes]
        names = ", ".join(str(one["host"]) for one in party.told)
        say(f"paceline: node {party.node_rank} of {party.nodes} ({names})")
        return party

    def _presence(self, party: Party) -> Presence:
        return Presence(party, self._member.waiting, lambda: lost_endpoint(self._endpoint), GONE_SECONDS)

    def _attempt(self, party: Party, presence: Presence) -> End | None:
        """One attempt; how the command ends, or None where the nodes meet again."""
        directory = self.shared.run
        assert directory is not None
        opens, self._opened = self._opened != party.nodes, party.nodes
        if opens and self.shared.leads:
            write_atomic(directory.plan_file, json.dumps(self._plan(self.resolved), indent=1))
        self._limits.next_attempt()
        result = self._run_workers(party, directory, presence, opens=opens)
        if result.error is not None and result.error.values.get("sure") is False:
            self._limits.doubt_was_costly()
        return self._conclude(party, directory, presence, result)

    def _run_workers(self, party: Party, directory: RunDirectory, presence: Presence, *, opens: bool) -> GroupResult:
        first = party.node_rank == 0
        port = self._job.launch.port if first else int(heard_of(party, presence, 0, "port"))
        place = Place(party.node_rank, party.nodes, str(party.told[0]["address"]))
        attempt = Attempt(
            self.resolved, directory, self._words, self._procs, self.shared.launched, opens=opens, place=place, port=port,
            is_leader=self.shared.leads,
        )  # fmt: skip

        def started(group: WorkerGroup) -> None:
            if first:
                party.share("port", group.port)

        control = Control(directory.path)

        def asked() -> str | None:
            if self.shared.leads and control.asked(PROCS):
                say(f"paceline: control/{PROCS} changes nothing: of several hosts each has its own {self._procs}")
                say(*filter(None, [control.done(PROCS)]))
            has_room = party.nodes < max(self._sizes)
            return f"{DOOR}: a node has come" if self.shared.leads and has_room and presence.at_the_door else None

        def check() -> None:
            directory.check_beat()
            presence.check()

        def elsewhere() -> PacelineError | None:
            return broke_elsewhere(party, presence)

        try:
            account = Account(directory)
            return run_attempt(
                attempt, account, self._limits, asked=asked, check=check, elsewhere=elsewhere, started=started
            )
        except PacelineError as error:
            if first:
                party.share_error("port", error)
            raise

    def _conclude(self, party: Party, directory: RunDirectory, presence: Presence, result: GroupResult) -> End | None:
        """Tell the others how it ended here, and do what follows."""
        leaving = None if result.signal is None else signal_name(result.signal)
        report = report_of(self._member.serves, leaving, result, directory)
        party.share(ended_key(party.node_rank), msgspec.to_builtins(report))
        if self.shared.leads:
            reports = self._reports(party, presence)
            return self._lead(party, directory, result, reports, leaving)
        if leaving is not None:
            return End(result.error or interrupted(leaving, [], None))
        leader = leader_of(party)
        try:
            heard = party.hear("next", self._longest_seconds, lambda: leader in presence.gone())
        except NotHeard:
            error = gone(leader, str(party.told[leader]["host"]))
            say(f"paceline: {error.message}; it led the run")
            self.shared.lost_leader(
                result._replace(error=error, rank=None, fault="node", evidence=None, traceback=None)
            )
            return None
        failed = failed_of(heard)
        if failed is not None:
            # Its restarts count, whichever node leads the next attempt.
            self._policy.after(failed)
        return followed(heard)

    def _reports(self, party: Party, presence: Presence) -> dict[int, Report | None]:
        """How it ended on each node; None for those that are gone."""
        reports: dict[int, Report | None] = {}
        deadline = time.monotonic() + self._longest_seconds
        for rank in range(party.nodes):
            while (told := party.heard(ended_key(rank))) is None:
                if rank in presence.gone() or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            reports[rank] = None if told is None else msgspec.convert(told, Report)
        return reports

    @property
    def _longest_seconds(self) -> float:
        """The others may still be about to stop."""
        return float(self._job.recovery.grace) + TELL_SECONDS

    def _lead(
        self, party: Party, directory: RunDirectory, result: GroupResult, reports: dict[int, Report | None],
        leaving: str | None,
    ) -> End | None:  # fmt: skip
        """Decide for all what follows, and tell them."""
        hosts = {rank: str(told["host"]) for rank, told in enumerate(party.told)}
        found = follows(reports, hosts, (self._job.launch.nodes or Procs(1)).least)
        account = Account(directory)
        if found.kind == "meet":
            tell_meet(party, 0.0)
            if leaving is not None:
                account.restart(result, found.reason, last_step(directory))
                return End(result.error or interrupted(leaving, [], None))
            say(f"paceline: {found.reason}")
            self.shared.launched = account.next_attempt(result, found.reason, last_step(directory))
            return None
        if found.kind == "failed":
            return self._after_failure(party, directory, account, result, reports, found, leaving)
        end = End(found.error)
        tell_end(party, end)
        return end

    def _after_failure(
        self, party: Party, directory: RunDirectory, account: Account, result: GroupResult,
        reports: dict[int, Report | None], found: Follows, leaving: str | None,
    ) -> End | None:  # fmt: skip
        assert found.error is not None and found.node is not None
        report = reports[found.node] or Report(host=str(party.told[found.node]["host"]), fault="node")
        everywhere = result._replace(
            error=found.error,
            rank=report.rank,
            fault=report.fault,
            evidence=report.evidence,
            traceback=report.traceback,
        )
        told = [one for one in reports.values() if one is not None]
        ended = attempt_of(result, directory)._replace(
            error=found.error, signature=report.signature, reached=max(last_step(directory), *(r.reached for r in told)),
            agreed=len(told) == len(reports) and all(one.agreed for one in told), told_to_stop=found.ends,
            traceback=report.traceback,
        )  # fmt: skip
        outcome = self._policy.after(ended)
        account.fault(everywhere, found.error, ended.reached, report.host)
        # Who was told to stop leaves, whatever the others do after the failure.
        own_end = None if leaving is None else End(result.error or interrupted(leaving, [], None))
        if isinstance(outcome, End):
            tell_end(party, outcome)
            return own_end or outcome
        say(*account.notes, *(() if outcome.again else traceback_lines(ended.traceback)))
        say(restart_line(outcome, directory.attempt + 1))
        tell_meet(party, outcome.delay_seconds, ended)
        if own_end is not None:
            account.restart(result, outcome.reason, ended.reached)
            return own_end
        time.sleep(outcome.delay_seconds)
        self.shared.launched = account.next_attempt(result, outcome.reason, ended.reached)
        return None

    def _over(self, end: End | None) -> PacelineError | None:
        """The run is over for this node."""
        error = None
        if end is not None and end.error is not None:
            error = self._ended(end.error, end.traceback)
        self._goodbye()
        return error

    def _goodbye(self) -> None:
        """Whoever serves the endpoint stays until the others have heard all that they were told."""
        party = self._party
        if party is None:
            return
        with contextlib.suppress(StoreLost):
            party.share(f"bye-{party.node_rank}", True)
            deadline = time.monotonic() + GONE_SECONDS
            while self._member.serves and time.monotonic() < deadline:
                if all(party.heard(f"bye-{rank}") for rank in range(party.nodes)):
                    break
                time.sleep(0.1)
        if self._member.serves:
            self._member.end()


def _wanted(nodes: Procs | None) -> str:
    return f"{nodes} nodes" if nodes is None or nodes.least == nodes else f"{nodes.least} to {int(nodes)} nodes"
