"""What the checks weigh of a job is what the job derives on those hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.checkpoint.space import checkpoint_bytes
from paceline.config import Setting
from paceline.data.shared import shared_memory_need
from paceline.doctor.weigh import facts_of
from paceline.job.load import Job, job_of_settings
from paceline.job.resolve import resolve_here
from tests.doctor.hosts import change, cpu_host, h100_host


def _job(**values: object) -> Job:
    return job_of_settings({key.replace("__", "."): Setting(value, "test") for key, value in values.items()})


def test_the_facts_are_those_that_a_run_derives() -> None:
    job = _job(launch__procs_per_node=2, batch__global_batch=24, optimizer__lr=3e-3, run__steps=700)
    facts, resolved = facts_of(job, [cpu_host()]), resolve_here(job)
    assert (facts.world_size, facts.local_ranks, facts.global_batch, facts.data_ranks) == (2, 2, 24, 2)
    assert (facts.microbatch, facts.accumulation) == (resolved.batch.microbatch, resolved.batch.accumulation)
    assert facts.checkpoint == checkpoint_bytes(resolved.spec, job.optimizer)
    per_rank = 12 * 128 * 16
    assert facts.shared_memory == shared_memory_need(batch_bytes=per_rank, workers=1, prefetch=2, ranks=1)


def test_captured_hosts_give_their_devices_not_this_machine_s() -> None:
    job = _job(model__preset="llama3.2-1b", batch__global_batch=64, data__sequence_length=2048)
    facts = facts_of(job, [h100_host("node1"), h100_host("node2")])
    assert (facts.world_size, facts.local_ranks, facts.on_cpu) == (16, 8, False)
    assert facts.memory_available == 80 * 2**30 and 10**9 < facts.parameters < 2 * 10**9


def test_a_job_that_cannot_be_derived_says_why_and_what_would_do() -> None:
    facts = facts_of(_job(batch__global_batch=7), [cpu_host()])
    assert facts.key == "batch.global_batch" and "do not divide" in facts.problem and facts.hint


def test_the_longest_save_of_an_earlier_attempt_is_known(tmp_path: Path) -> None:
    records = tmp_path / "mine" / "records"
    records.mkdir(parents=True)
    rows = [("durable", 3.0), ("durable", 7.5), ("failed", 99.0)]
    lines = [{"kind": "checkpoint", "time": 1.0, "attempt": 1, "step": 5, "state": s, "seconds": t} for s, t in rows]
    (records / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert facts_of(_job(run__name="mine", run__dir=str(tmp_path)), [cpu_host()]).saved == 7.5
    assert facts_of(_job(run__name="other", run__dir=str(tmp_path)), [cpu_host()]).saved is None


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [({}, 30.0), ({"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "20"}, 20.0)],
)
def test_the_grace_is_the_job_s_or_less_where_the_launcher_leaves_less(
    environment: dict[str, str], seconds: float
) -> None:
    assert facts_of(_job(), [change(cpu_host(), environment=environment)]).grace == seconds
