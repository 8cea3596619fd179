"""What a run does about a slow rank while it goes on: a record, a line, and the policy. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from paceline.errors import DiskFull
from paceline.parallel.layout import Layout
from paceline.run.control import ask_procs
from paceline.run.directory import RunDirectory
from paceline.run.records import Straggler
from paceline.telemetry.straggler_watch import StragglerWatch


@contextlib.contextmanager
def stragglers_watched(
    directory: RunDirectory,
    layout: Layout,
    say: Callable[[str], object],
    policy: str = "report",
) -> Iterator[None]:
    """Inside, each straggler of the attempt is recorded and said.

    Args:
        policy: `recovery.on_straggler`; `restart-without` asks once for one rank fewer, of a run that may have fewer.
    """
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(directory.writer("stragglers"))

        def told(found: Straggler) -> None:
            with contextlib.suppress(DiskFull):
                writer.write(found)
            say(f"paceline: {described(found)}")
            if policy == "restart-without" and found.rank is not None and layout.world_size > 1:
                ask_procs(directory.path, layout.world_size - 1, found.rank)

        stack.enter_context(StragglerWatch(directory.path, directory.attempt, alike(layout), told))
        yield


def alike(layout: Layout) -> list[list[int]]:
    """Ranks that do the same work: those of one stage of the pipeline."""
    stages: dict[int, list[int]] = {}
    for rank in range(layout.world_size):
        stages.setdefault(layout.coordinates(rank)["pp"], []).append(rank)
    return list(stages.values())


def described(found: Straggler) -> str:
    """One sentence."""
    if found.rank is None:
        return f"the network is slow since step {found.step}: {found.evidence}"
    who = f"rank {found.rank} on {found.host}"
    if found.cause == "link":
        return f"the link of {who} is slow (step {found.step}): {found.evidence}"
    return (
        f"{who} is slow for its {found.cause}, {found.ratio:.2f} times its peers (step {found.step}): {found.evidence}"
    )
