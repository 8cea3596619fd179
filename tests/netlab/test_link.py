"""A link that goes down under a run: nobody is told of it, so that only a watchdog can say which one it was."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable

import pytest

from paceline.workers import heartbeat
from paceline.workers.limits import Limits
from paceline.workers.look import page_path
from paceline.workers.start import WorkerGroup, start
from paceline.workers.watch import watch
from paceline.workers.watchdog import Stall
from tests.netlab.lab import Host, Lab

RANKS = 3
LEARNED_STEPS = 60


def cut_later(lab: Lab, host: Host, group: WorkerGroup, cut_at: list[float]) -> None:
    """Once there are steps to learn from."""
    path, deadline = page_path(group.folder, 0), time.monotonic() + 60.0
    while time.monotonic() < deadline:
        beat = heartbeat.read(path)
        if beat is not None and beat.step >= LEARNED_STEPS:
            break
        time.sleep(0.05)
    lab.cut(host)
    cut_at.append(time.monotonic())


# R15
@pytest.mark.limit(150)
def test_a_link_that_is_down_is_named_with_the_host_behind_it(netlab: Callable[..., Lab]) -> None:
    lab = netlab((RANKS,))
    lost = 2
    words = [*(host.namespace for host in lab.hosts), lab.hosts[0].address]
    group = start(words, procs=RANKS, run_id="lab", module="tests.netlab.stalling")
    cut_at, warned, printed = list[float](), list[tuple[float, Stall]](), io.StringIO()
    thread = threading.Thread(target=cut_later, args=(lab, lab.hosts[lost], group, cut_at))
    thread.start()
    result = watch(
        group, limits=Limits(), out=printed, warn=lambda stall: warned.append((time.monotonic(), stall))
    )  # fmt: skip
    thread.join()
    assert cut_at and result.fault == "link" and result.rank == lost, f"{result.error}\n{printed.getvalue()[-4000:]}"
    assert result.exit_code == 76 and lab.hosts[lost].address in str(result.error), result.error
    seconds, first = warned[0][0] - cut_at[0], warned[0][1].finding
    assert first.kind == "link" and seconds < 6.0, (seconds, first)
