"""Makes a lab in which a process runs, tells both, and dies without cleaning up: `python -m tests.netlab.left_behind`."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.netlab.lab import Lab


def main() -> None:
    lab = Lab((1,))
    # Without what ends it with this process: the worst that can be left.
    sleeper = subprocess.Popen(["ip", "netns", "exec", lab.hosts[0].namespace, "sleep", "300"])
    print(lab.switch, lab.hosts[0].namespace, sleeper.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
