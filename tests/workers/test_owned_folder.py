"""A folder that goes with its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.workers.owned_folder import OwnedFolder
from paceline.workers.processes import kill_all

OWNER = """
import subprocess, sys, time
from paceline.workers.owned_folder import OwnedFolder
folder = OwnedFolder("paceline-test-")
(folder.path / "held").write_text("x")
print(folder.path, flush=True)
if sys.argv[1] == "raises":
    raise SystemExit(3)
time.sleep(60)
"""


def gone(path: Path, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not path.exists()


def test_it_goes_when_it_is_closed() -> None:
    folder = OwnedFolder("paceline-test-")
    (folder.path / "file").write_text("x")
    folder.close()
    assert not folder.path.exists()
    folder.close()


# R22
@pytest.mark.parametrize("how", ["raises", "SIGTERM", "SIGKILL", "with all its descendants"])
def test_it_goes_with_an_owner_that_does_not_close_it(how: str) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, how], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    path = Path(owner.stdout.readline().strip())
    assert how == "raises" or path.is_dir()
    if how == "with all its descendants":
        assert kill_all(owner) == 1
    elif how != "raises":
        os.kill(owner.pid, getattr(signal, how))
    owner.wait(10)
    owner.stdout.close()
    assert gone(path)
