"""Fixtures and hooks of every test: the pool of ranks, the command launcher, the hard limit."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.netlab.lab import Lab, refusal
from tests.pool.launch import Launcher
from tests.pool.limit import DEFAULT_SECONDS, limited
from tests.pool.pool import Pool

_pools: list[Pool] = []
_stderr = os.fdopen(os.dup(2), "w")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"limit(seconds): hard limit of the test, {DEFAULT_SECONDS:g} s unless given")
    # Files of one name in several folders (tests/model/test_config.py, tests/data/test_config.py) need it.
    config.option.importmode = "importlib"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"netlab", "lab"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("netlab")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("limit")
    with limited(float(marker.args[0]) if marker else DEFAULT_SECONDS, _stderr, _rank_stacks):
        return (yield)


def _rank_stacks() -> str:
    texts = [text for pool in _pools for text in pool.stacks()]
    return "".join(f"\npool worker {rank}:\n{text}" for rank, text in enumerate(texts))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes kept for the session: `pool.run(function, world_size, *args, timeout=30)`."""
    pool = Pool()
    _pools.append(pool)
    yield pool
    _pools.remove(pool)
    pool.close()


@pytest.fixture(scope="module")
def netlab() -> Iterator[Callable[..., Lab]]:
    """`netlab(racks=(2, 2), mbit=100, uplink_mbit=50)` makes a lab of several hosts, which goes with the module."""
    if (reason := refusal()) is not None:
        pytest.fail(reason, pytrace=False)
    with contextlib.ExitStack() as labs:
        yield lambda *args, **options: labs.enter_context(Lab(*args, **options))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """`launch(["train", "job.toml"], timeout=60)` runs the command in `tmp_path`; no process may be left afterwards."""
    launcher = Launcher(tmp_path)
    yield launcher
    left = launcher.left_over()
    assert not left, f"processes left over: {left}"


if sys.platform != "linux":
    collect_ignore_glob = ["faults/*"]
