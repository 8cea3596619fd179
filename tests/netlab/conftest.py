"""One lab of four hosts in two racks for all tests of this folder: its crew's start costs seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.netlab.lab import Lab, refusal


@pytest.fixture(scope="package")
def lab() -> Iterator[Lab]:
    """Two racks of two hosts; a test sets the links that it needs, and `put_right` takes that away."""
    if (reason := refusal()) is not None:
        pytest.fail(reason, pytrace=False)
    with Lab((2, 2)) as lab:
        yield lab


@pytest.fixture
def put_right(lab: Lab) -> Iterator[Lab]:
    """The lab, with all links as fast as the machine is and sound before and after the test."""
    lab.put_right()
    yield lab
    lab.put_right()
