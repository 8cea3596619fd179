"""From what is seen of all ranks of a host to the rank that holds up the others, and why: pure functions of a `Snapshot`.

Ranks that wait for others are consequences: those in a collective, and those at a barrier of the host. The cause is who
does not wait; where all wait, who waits in another collective than the rest; where all wait in the same one, a link.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from paceline.workers.durations import Section
from paceline.workers.limits import Doubt
from paceline.workers.recorder import Entry, Seen
from paceline.workers.sample import GONE, Connection, Helper, Sample
from paceline.workers.stacks import main_thread

Kind = Literal[
    "stopped", "dead", "gil", "spinning", "missing-collective", "mismatched-collective", "loader", "link", "storage", "slow"
]  # fmt: skip
PULSE_SILENT_SECONDS = 1.2
"""Six periods: a thread that wakes five times a second is late on a busy machine, not that late."""
BUSY_SHARE = 0.1
"""Of one processor: what waits uses none, and what works gets its share even where many ranks share few processors."""
_HABIT = 4
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_NAMED_HELPERS = ("loader worker", "checkpoint writer")
_OWN_WAITS = "/paceline/parallel/"
_COMMUNICATION = ("torch/distributed/", "workers/barrier.py")
_OF_ANY_SIZE = ("scatter", "gather", "all_to_all", "alltoall", "send", "recv")
_LIBRARY = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>", "importlib")


class RankView(NamedTuple):
    """One rank at one moment. `silent_seconds` leave out what it was allowed; `waiting`: at a barrier of the host.

    `pulse_age` is None where there is no pulse (yet); `stack` are the Python stacks of all threads, the main one last.
    """

    rank: int
    step: int
    phase: str
    section: Section
    silent_seconds: float
    waiting: bool
    sample: Sample
    pulse_age: float | None = None
    stack: str = ""
    seen: Seen | None = None
    helpers: tuple[Helper, ...] = ()
    unacknowledged: tuple[Connection, ...] = ()
    addresses: frozenset[str] = frozenset()


class Snapshot(NamedTuple):
    """The ranks of a host at two moments, `seconds` apart."""

    host: str
    ranks: Mapping[int, RankView]
    before: Mapping[int, RankView]
    seconds: float


class Finding(NamedTuple):
    """Who holds up the others, and how that shows. `waits_for`: the collective that the others are in, and who they are."""

    kind: Kind
    ranks: tuple[int, ...]
    doubt: Doubt
    said: str
    waits_for: Entry | None = None
    waiting: tuple[int, ...] = ()


def find(snapshot: Snapshot) -> Finding:
    """The first cause of a silence of all ranks."""
    ranks = snapshot.ranks
    if stopped := [rank for rank, view in ranks.items() if view.sample.state == "T"]:
        said = f"{_processes(stopped, ranks)} stopped (state T): a signal STOP or a debugger holds it"
        return _with_waiting(snapshot, Finding("stopped", tuple(stopped), "none", said))
    if mismatched := _mismatch({rank: view.seen for rank, view in ranks.items() if view.seen is not None}):
        return mismatched
    if not (behind := _behind(snapshot)):
        return _all_wait(snapshot)
    found = sorted((_alone(rank, snapshot) for rank in behind), key=lambda finding: _ORDER[finding.kind])
    # Among several that do not wait, what is idle is behind what works: it is what will not change.
    same = tuple(sorted(finding.ranks[0] for finding in found if finding.kind == found[0].kind))
    return _with_waiting(snapshot, found[0]._replace(ranks=same))


def _behind(snapshot: Snapshot) -> list[int]:
    """The ranks that do not wait and that others wait for; without a word of the engine those least far."""
    ranks = snapshot.ranks
    free = [rank for rank, view in ranks.items() if not waits(view)]
    if any(view.seen is not None and view.seen.running for view in ranks.values()):
        votes = _votes(ranks)
        free = [rank for rank in free if rank in votes or ranks[rank].seen is None]
        # A rank that has ended is to blame where no other one is.
        return [rank for rank in free if ranks[rank].sample.state != GONE] or free
    if len(free) < len(ranks):
        return free
    least = min(view.step for view in ranks.values())
    late = [rank for rank in free if ranks[rank].step == least]
    busy = [rank for rank in late if _alone(rank, snapshot).kind != "missing-collective"]
    return busy or (late if len(late) < len(free) else [max(late, key=lambda rank: ranks[rank].silent_seconds)])


_FIRST: tuple[Kind, ...] = (
    "dead", "stopped", "gil", "loader", "storage", "missing-collective", "spinning", "slow"
)  # fmt: skip
_ORDER: Mapping[Kind, int] = {kind: place for place, kind in enumerate(_FIRST)}


def waits(view: RankView) -> bool:
    """Whether a rank waits for others: at a barrier of the host, or its main thread is in a collective."""
    if view.waiting:
        return True
    frames = main_frames(view.stack)
    if frames and any(part in frames[0][0] for part in _COMMUNICATION):
        return True
    # Waiting for an operation that was started before is native code without a frame of its own; sends and receives of a
    # pipeline are not recorded.
    running = bool(view.seen is not None and view.seen.running) or bool(frames and _OWN_WAITS in frames[0][0])
    return running and (not frames or not view.sample.waits_in or "futex" in view.sample.waits_in)


def _alone(rank: int, snapshot: Snapshot) -> Finding:
    """What keeps a rank that waits for no other rank."""
    view, before = snapshot.ranks[rank], snapshot.before.get(rank)
    share = _share(view, before, snapshot.seconds)
    at = _place_of(view)
    if view.sample.state in ("Z", "X", GONE):
        return Finding("dead", (rank,), "none", f"its process has ended (state {view.sample.state})")
    if view.pulse_age is not None and view.pulse_age > PULSE_SILENT_SECONDS and view.sample.main_state != "D":
        share += _beside(view, before, snapshot.seconds)
        burns = f"its process uses {share:.0%} of a processor" if share >= BUSY_SHARE else "its process is idle"
        said = f"holds the interpreter's lock{at}: no other thread of it has run for {view.pulse_age:.1f} s, {burns}"
        return Finding("gil", (rank,), "busy" if share >= BUSY_SHARE else "asleep", said)
    if view.section == "data":
        return _loader(rank, view, before, snapshot.seconds)
    if view.section == "save" or "D" in (view.sample.state, view.sample.main_state):
        return _storage(rank, view, before)
    if share >= BUSY_SHARE or (before is not None and view.sample.main_state == before.sample.main_state == "R"):
        if before is not None and _function(before) == _function(view):
            said = f"works{at} without an end: {share:.0%} of a processor, always in the same function"
            return Finding("spinning", (rank,), "busy", said)
        return Finding("slow", (rank,), "works", f"works{at}: {share:.0%} of a processor, and its stack changes")
    if _beside(view, before, snapshot.seconds) >= BUSY_SHARE:
        return Finding("slow", (rank,), "works", f"waits{at} for a process of its own that works")
    if before is not None and before.stack and view.stack and main_thread(before.stack) != main_thread(view.stack):
        return Finding("slow", (rank,), "works", f"is idle{at}, but its stack changes")
    waits_in = f", in the kernel in {view.sample.waits_in}" if view.sample.waits_in else ""
    return Finding("missing-collective", (rank,), "asleep", f"does nothing{at}{waits_in}")


def _loader(rank: int, view: RankView, before: RankView | None, seconds: float) -> Finding:
    """A rank that has no batch: which of its loader workers makes none, and where that stands."""
    loaders = [helper for helper in view.helpers if helper.name.startswith("loader")]
    if not loaders:
        share = _share(view, before, seconds)
        doubt: Doubt = "busy" if share >= BUSY_SHARE else _idle_doubt(view.sample)
        return Finding("loader", (rank,), doubt, f"makes its batch itself and is not done{_place_of(view)}")
    named = _at_work(loaders) or loaders
    said = "; ".join(_helper_text(helper) for helper in named[:2])
    old = {h.sample.pid: h.sample.cpu_seconds for h in before.helpers} if before is not None else {}
    used = max((h.sample.cpu_seconds - old.get(h.sample.pid, 0.0)) / max(seconds, 0.1) for h in named) if old else 0.0
    doubts: list[Doubt] = ["busy"] if used >= BUSY_SHARE else [_idle_doubt(helper.sample) for helper in named]
    return Finding("loader", (rank,), "storage" if "storage" in doubts else doubts[0], f"waits for data: {said}")


def _at_work(loaders: Sequence[Helper]) -> list[Helper]:
    """The loader workers that are at a batch or stopped; those without work wait for a request."""
    return [
        h for h in loaders if h.sample.state == "T" or (h.stack and " in wait_for\n" not in main_thread(h.stack) + "\n")
    ]


def _storage(rank: int, view: RankView, before: RankView | None) -> Finding:
    writers = "; ".join(_helper_text(helper) for helper in view.helpers if helper.name == "checkpoint writer")
    said = f"waits for a write to end{_place_of(view)}" + (f": {writers}" if writers else "")
    return Finding("storage", (rank,), "storage", said)


def _idle_doubt(sample: Sample) -> Doubt:
    """An idle process that waits for a disk or an answer of the network may well go on."""
    words = ("nfs", "fuse", "io_schedule", "folio", "page", "sk_wait", "tcp", "inet", "unix_stream_read", "pipe")
    asleep = sample.state != "D" and not any(word in sample.waits_in for word in words)
    return "asleep" if asleep else "storage"


def _all_wait(snapshot: Snapshot) -> Finding:
    """No rank is free: some wait in one collective and some in another, or none gets through."""
    ranks = snapshot.ranks
    if all(view.waiting for view in ranks.values()):
        phases = ", ".join(sorted({view.phase for view in ranks.values()}))
        return Finding("storage", tuple(sorted(ranks)), "storage", f"all ranks wait on the host: {phases}")
    blocked = _votes(ranks)
    if not blocked or _lost(ranks):
        # A link that broke within a collective leaves ranks that are through with it, and wait in the next.
        return _link(snapshot)
    most = max(blocked.values())
    behind = sorted(rank for rank, count in blocked.items() if count == most)
    if len(behind) > 1:
        behind = [rank for rank in behind if _breaks_habit(ranks[rank].seen)] or behind
    view = ranks[behind[0]]
    running = view.seen.running if view.seen is not None else []
    instead = f"waits in {running[-1]} instead" if running else f"is in {view.phase!r} instead"
    said = f"{instead}{_place_of(view)}"
    return _with_waiting(snapshot, Finding("missing-collective", tuple(behind), "none", said))


def _votes(ranks: Mapping[int, RankView]) -> Counter[int]:
    """By rank: how many ranks wait in a collective that it has not entered."""
    votes: Counter[int] = Counter()
    for rank, view in ranks.items():
        for entry in view.seen.running if view.seen is not None else ():
            members = view.seen.members.get(entry.group, tuple(ranks)) if view.seen is not None else ()
            for other in members:
                seen = ranks[other].seen if other in ranks else None
                if other != rank and seen is not None and seen.last_number(entry.group) < entry.number:
                    votes[other] += 1
    return votes


def _link(snapshot: Snapshot) -> Finding:
    """All are in the same collective, nobody is stopped, and it does not end."""
    ranks = snapshot.ranks
    lost = _lost(ranks)
    told = [
        f"rank {rank}{_at(ranks[rank])} to {'another host' if peer is None else f'rank {peer}'} ({address})"
        for rank, peer, address in sorted(lost, key=str)
    ]
    ends = Counter(end for rank, peer, _ in lost for end in (rank, peer) if end is not None)
    most = max(ends.values(), default=0)
    names = tuple(sorted(rank for rank, count in ends.items() if count == most)) or tuple(sorted(ranks))
    if told:
        return _with_waiting(
            snapshot, Finding("link", names, "busy", f"what is sent is not acknowledged: {', '.join(told)}")
        )
    said = "all ranks have entered the same collective, none is stopped, and it does not end"
    return _with_waiting(snapshot, Finding("link", names, "busy", said))


def _lost(ranks: Mapping[int, RankView]) -> set[tuple[int, int | None, str]]:
    """Connections that a peer does not answer: sender, the rank at the other end if it is known, and its address."""
    homes = {address: rank for rank, view in ranks.items() for address in view.addresses}
    return {
        (rank, homes.get(connection.address), connection.address)
        for rank, view in ranks.items()
        for connection in view.unacknowledged
        if homes.get(connection.address) != rank
    }


def _at(view: RankView) -> str:
    """Where a rank's connections begin; nothing where they stay on the host."""
    outward = sorted(address for address in view.addresses if not address.startswith("127."))
    return f" ({', '.join(outward)})" if outward else ""


def _mismatch(seen: Mapping[int, Seen]) -> Finding | None:
    """Ranks that entered different collectives as the same number of a group."""
    at: dict[tuple[str, int], dict[int, Entry]] = {}
    for rank, one in seen.items():
        for entry in one.entries:
            at.setdefault((entry.group, entry.number), {})[rank] = entry
    for _, entries in sorted(at.items(), key=lambda item: item[0][1]):
        running = any(entry.running for entry in entries.values())
        signatures = Counter(entry.signature[1:] for entry in entries.values())
        if len(signatures) > 1 and running and not _may_differ(entries.values()):
            return _who_differs(entries, signatures, seen)
    return None


def _may_differ(entries: Iterable[Entry]) -> bool:
    """Collectives whose sizes are not the same on all ranks by design."""
    ops = {entry.op for entry in entries}
    return len(ops) == 1 and any(word in next(iter(ops)) for word in _OF_ANY_SIZE)


def _who_differs(
    entries: Mapping[int, Entry], signatures: Counter[tuple[str, str]], seen: Mapping[int, Seen]
) -> Finding:
    breakers = [rank for rank in entries if _breaks_habit(seen[rank])]
    few = min(signatures.values())
    minority = [rank for rank, entry in entries.items() if signatures[entry.signature[1:]] == few]
    ranks = minority if few < max(signatures.values()) else breakers or list(entries)
    others = [rank for rank in entries if rank not in ranks]
    its, theirs = entries[ranks[0]], entries[others[0]] if others else None
    said = f"entered {its}" + (f", where the others entered {theirs.op} (sizes {theirs.sizes})" if theirs else "")
    if theirs is None:
        said = "; ".join(f"rank {rank} entered {entry}" for rank, entry in sorted(entries.items()))
    return Finding("mismatched-collective", tuple(sorted(ranks)), "none", said, theirs, tuple(sorted(others)))


def mismatch_at_end(seen: Mapping[int, Seen], unknown: Iterable[int], *, certain: bool) -> Finding | None:
    """Which ranks entered other collectives than the rest, where an error of the engine has ended some.

    Args:
        seen: what each rank had entered, of those that could tell.
        unknown: ranks that have ended and told nothing.
        certain: whether the engine says that there was a mismatch; without it only what `seen` shows counts.
    """
    ended = {
        rank: one._replace(entries=tuple(e._replace(running=True) for e in one.entries)) for rank, one in seen.items()
    }
    if (found := _mismatch(ended)) is not None:
        return found
    if not certain or not seen:
        return None
    breakers = sorted(rank for rank in seen if _breaks_habit(seen[rank]))
    ranks = tuple(breakers or sorted(unknown))
    if not ranks:
        return None
    others = tuple(sorted(rank for rank in seen if rank not in ranks))
    last = seen[others[0]].entries[-1] if others and seen[others[0]].entries else None
    said = f"entered {seen[ranks[0]].entries[-1]}" if breakers else "entered another collective than the others"
    return Finding("mismatched-collective", ranks, "none", said, last, others)


def _breaks_habit(seen: Seen | None) -> bool:
    """Whether the last collective of a rank is another one than its own sequence so far would have it."""
    if seen is None:
        return False
    made = [entry.signature for entry in seen.entries]
    for length in range(min(_HABIT, len(made) - 2), 0, -1):
        context = made[-1 - length : -1]
        for start in range(len(made) - 2 - length, -1, -1):
            if made[start : start + length] == context:
                return made[start + length] != made[-1]
    return False


def _with_waiting(snapshot: Snapshot, finding: Finding) -> Finding:
    """With what the other ranks wait in."""
    others = {rank: view for rank, view in snapshot.ranks.items() if rank not in finding.ranks}
    source = others or snapshot.ranks
    running = [(entry, rank) for rank, view in source.items() if view.seen for entry in view.seen.running]
    if not running:
        return finding._replace(waiting=tuple(sorted(others)))
    # The first one that cannot end holds up those behind it.
    first = next((e for e, _ in running if _unentered(e, finding.ranks, snapshot.ranks)), running[0][0])
    return finding._replace(waits_for=first, waiting=tuple(sorted(others)))


def _unentered(entry: Entry, ranks: Sequence[int], views: Mapping[int, RankView]) -> bool:
    seen = [views[rank].seen for rank in ranks if rank in views]
    return any(one is not None and one.last_number(entry.group) < entry.number for one in seen)


def main_frames(stacks: str) -> list[tuple[str, int, str]]:
    """File, line and function of the main thread's frames, the innermost first."""
    return [(file, int(line), name) for file, line, name in _FRAME.findall(main_thread(stacks))]


def source_line(stacks: str) -> str | None:
    """`file:line in function` of the innermost frame of the main thread outside of installed packages."""
    frames = main_frames(stacks)
    own = [f for f in frames if not any(part in f[0] for part in _LIBRARY)]
    beyond = [f for f in own if "/paceline/workers/" not in f[0]]
    return next((f"{file}:{line} in {name}" for file, line, name in [*beyond, *own, *frames]), None)


def _place_of(view: RankView) -> str:
    line = source_line(view.stack)
    return f" at {line}" if line else ""


def _function(view: RankView) -> tuple[str, str] | None:
    frames = main_frames(view.stack)
    return (frames[0][0], frames[0][2]) if frames else None


def _share(view: RankView, before: RankView | None, seconds: float) -> float:
    """Processors that a rank's main thread has used since."""
    if before is None or seconds <= 0:
        return 0.0
    main = view.sample.main_cpu_seconds - before.sample.main_cpu_seconds
    return max(0.0, main / seconds)


def _beside(view: RankView, before: RankView | None, seconds: float) -> float:
    """Processors that its other threads and the processes below it have used since: a compiler, but no loader or writer."""
    if before is None or seconds <= 0:
        return 0.0
    old = {helper.sample.pid: helper.sample.cpu_seconds for helper in before.helpers}
    threads = view.sample.cpu_seconds - before.sample.cpu_seconds
    threads -= view.sample.main_cpu_seconds - before.sample.main_cpu_seconds
    others = [helper for helper in view.helpers if not helper.name.startswith(_NAMED_HELPERS)]
    used = sum(h.sample.cpu_seconds - old.get(h.sample.pid, h.sample.cpu_seconds) for h in others)
    return max(0.0, (threads + used) / seconds)


def _helper_text(helper: Helper) -> str:
    state = {"T": "is stopped", "D": "waits for a disk", "R": "works", "Z": "has ended"}.get(
        helper.sample.state, "sleeps"
    )
    line = source_line(helper.stack)
    waits_in = f" in the kernel in {helper.sample.waits_in}" if helper.sample.waits_in else ""
    return f"{helper.name} (process {helper.sample.pid}) {state}{f' at {line}' if line else waits_in}"


def _processes(ranks: Sequence[int], views: Mapping[int, RankView]) -> str:
    pids = [str(views[rank].sample.pid) for rank in ranks]
    return f"its process {pids[0]} is" if len(pids) == 1 else f"their processes {', '.join(pids)} are"
