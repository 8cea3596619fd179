"""A temporary folder that goes with its owner, however that one ends, and whether or not anything is left to remove it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SHELL = "/bin/sh"
# The shell is left behind on purpose, with nobody for a parent: what kills the owner with all its descendants must not
# reach it. The owner's end closes the pipe; the workers, killed in the same moment, may still write for a little.
_REMOVE = """
exec 3<&0 </dev/null
(
    trap '' INT TERM HUP
    read -r line <&3
    for pause in 0 0.1 0.1 0.3 0.5 1 2; do
        sleep $pause
        rm -rf -- "$0" && [ ! -e "$0" ] && exit
    done
) 2>/dev/null &
"""


class OwnedFolder:
    """A new folder under the system's temporary one, removed by `close` or soon after the end of this process.

    Attributes:
        path: of the folder.
    """

    def __init__(self, prefix: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        ours, self._held = os.pipe()
        try:
            # Without a shell the folder is left behind by an owner that is killed, and by no other.
            with contextlib.suppress(OSError):
                subprocess.run(
                    [_SHELL, "-c", _REMOVE, str(self.path)], stdin=ours, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, cwd="/", start_new_session=True, check=False,
                )  # fmt: skip
        finally:
            os.close(ours)

    def close(self) -> None:
        """Remove it. Closing twice is harmless."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
