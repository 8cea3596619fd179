"""Runs `python -m paceline ...` as a user would, with a hard limit, and looks for processes that it left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.pool.pool import ROOT
from tests.pool.proc import carrying

TOKEN = "PACELINE_TEST_TOKEN"
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


class Completed(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float


class Running:
    """A command in progress; its output goes to files, so a left-over process cannot block the reader."""

    def __init__(self, command: Sequence[str], cwd: Path, env: Mapping[str, str], name: str) -> None:
        self._out, self._err = cwd / f".{name}.stdout", cwd / f".{name}.stderr"
        self.began = time.monotonic()
        self.command = list(command)
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    @property
    def stdout(self) -> str:
        return self._out.read_bytes().decode(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_bytes().decode(errors="replace")

    def signal(self, number: int) -> None:
        """Sends to the command alone, as `kill PID` does."""
        self.process.send_signal(number)

    def signal_all(self, number: int) -> None:
        """Sends to the command's process group, as a terminal's Ctrl-C does."""
        os.killpg(self.process.pid, number)

    def until(self, text: str, timeout: float = 30.0) -> None:
        """Wait until `text` stands in stdout or stderr."""
        deadline = time.monotonic() + timeout
        while text not in self.stdout + self.stderr:
            if self.process.poll() is not None and text not in self.stdout + self.stderr:
                raise AssertionError(f"ended with {self.process.returncode} before {text!r}\n{self._tail()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"no {text!r} in {timeout:.0f} s\n{self._tail()}")
            time.sleep(0.02)

    def wait(self, timeout: float = 60.0) -> Completed:
        try:
            code = self.process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{' '.join(self.command)} did not end in {timeout:.0f} s\n{self._tail()}") from None
        return Completed(code, self.stdout, self.stderr, time.monotonic() - self.began)

    def _tail(self) -> str:
        return f"stdout:\n{self.stdout[-4000:]}\nstderr:\n{self.stderr[-8000:]}"


class Launcher:
    """Starts commands in `folder`, all with one token in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex
        self._count = 0

    def __call__(
        self,
        args: Sequence[str],
        *,
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        module: str = "paceline",
        prefix: Sequence[str] = (),
    ) -> Completed:
        """`PREFIX python -m MODULE ARGS` to its end. Raises AssertionError after `timeout` seconds."""
        return self.start(args, env=env, module=module, prefix=prefix).wait(timeout)

    def start(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        module: str = "paceline",
        prefix: Sequence[str] = (),
    ) -> Running:
        """The same, in the background."""
        self._count += 1
        command = [*prefix, sys.executable, "-m", module, *map(str, args)]
        return Running(command, self.folder, self._environment(env), f"command-{self._count}")

    def _environment(self, extra: Mapping[str, str] | None) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [inherited.get("PYTHONPATH")])])
        return {**inherited, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(extra or {}), TOKEN: self.token}

    def left_over(self, grace: float = 2.0) -> dict[int, str]:
        """Processes with this launcher's token that are still there after `grace` seconds; they are killed."""
        deadline = time.monotonic() + grace
        while (found := carrying(TOKEN, self.token)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found
