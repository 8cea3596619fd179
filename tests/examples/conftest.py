"""What all examples share: a folder of token shards, and one thread a rank."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for commands: shards in a temporary folder, and no threads that wait for each other on a busy machine."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}
