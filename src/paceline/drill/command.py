"""`paceline` as a trial needs it: in a network of its own, or without one of its protections.

PACELINE_DRILL='{"kind": "slow-link", ...}' python -m paceline.drill.command train JOB.toml
"""

from __future__ import annotations

import importlib
import sys

from paceline.drill import acts, weaken
from paceline.drill.order import from_environment


def main() -> int:
    order = from_environment()
    if order is not None:
        if order.kind == "slow-link":
            acts.in_own_network()
        weaken.in_supervisor(order.without)
    # By name: verbs and the nouns below them do not know the command line.
    return int(importlib.import_module("paceline.cli").main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
