"""One folder of token shards for all examples."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which commands keep their token shards in one temporary folder."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
