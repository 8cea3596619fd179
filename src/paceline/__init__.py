"""paceline trains one model on many devices: it plans the run, measures the machine, trains and explains it."""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, whose import `--help` cannot afford
if TYPE_CHECKING:
    from typing import Any

    from paceline.trainer import Trainer

__all__ = ["Trainer", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Loaded when asked for, and by name: commands that think need no torch.
    if name == "Trainer":
        import importlib

        return importlib.import_module("paceline.trainer").Trainer
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
