"""Running out of memory is told with the parts of what was needed and the cheapest change."""

from __future__ import annotations

import pytest
import torch

from paceline.cluster.probe import Host
from paceline.errors import OutOfMemory
from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job
from paceline.train.out_of_memory import explain_out_of_memory

HOST = Host("test", "cpu", 0, "cpu", 2**34, 2, 2**34, True, None)


def resolved(*words: str) -> Resolved:
    return resolve_job(load_job(None, words), 2, HOST)


def test_the_allocator_s_own_failure_is_explained() -> None:
    with pytest.raises(OutOfMemory) as error, explain_out_of_memory(resolved("batch.global_batch=24")):
        torch.empty(2**50)
    text = str(error.value)
    assert "out of memory" in text and "activations" in text and "parameters" in text
    assert "batch.microbatch=6 (now 12)" in text  # activations outweigh the state of this small model
    assert error.value.values["total_bytes"] > 0


def test_where_state_is_most_of_it_the_change_is_another() -> None:
    with (
        pytest.raises(OutOfMemory) as error,
        explain_out_of_memory(resolved("model.preset=gpt2", "batch.global_batch=2")),
    ):
        raise MemoryError
    assert "weights, gradients and moments" in str(error.value)


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="shapes"), explain_out_of_memory(resolved()):
        raise RuntimeError("shapes do not match")
