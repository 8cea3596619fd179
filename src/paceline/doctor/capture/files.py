"""Small files of the kernel, and commands that answer quickly or not at all."""

from __future__ import annotations

import subprocess
from pathlib import Path

COMMAND_SECONDS = 5.0


class NotThere(Exception):
    """A probe has nothing to say; the text is the reason."""


def text(path: Path | str, default: str = "") -> str:
    """Content of a file without its last newline, or `default` where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return default


def number(path: Path | str) -> int | None:
    """A whole number in a file, or None."""
    content = text(path)
    return int(content) if content.lstrip("-").isdigit() else None


def folders(path: Path | str) -> list[Path]:
    """What a folder holds, by name; nothing where it is not there."""
    try:
        return sorted(Path(path).iterdir())
    except OSError:
        return []


def printed(words: list[str], seconds: float = COMMAND_SECONDS) -> str:
    """What a command prints.

    Raises:
        NotThere: it is not installed, fails, or does not answer in time.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError:
        raise NotThere(f"{words[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise NotThere(f"{words[0]} did not answer within {seconds:g} s") from None
    except OSError as error:
        raise NotThere(f"{words[0]}: {error.strerror}") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NotThere(f"{words[0]} failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout
