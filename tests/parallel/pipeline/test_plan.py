"""What a job with a pipeline becomes before anything starts: its stages, their memory, what is refused with what would do."""

from __future__ import annotations

import json
import math

import msgspec
import pytest

from paceline.cluster.probe import Host
from paceline.errors import JobError
from paceline.job.load import load_job
from paceline.job.resolve import Resolved, resolve_job
from paceline.model.config import ModelSection
from paceline.model.spec import parameter_count, parameters, resolve
from paceline.parallel.memory import stage_memories
from paceline.plan.fixed import describe, fixed_plan
from tests.pool.launch import Launcher

HOST = Host("test", "cpu", 0, "cpu", 2**36, 4, 2**36, True, None)
BIG = ("model.preset=llama3-8b", "batch.global_batch=64", "data.sequence_length=8192", "batch.microbatch=1")


def resolved(ranks: int, *words: str) -> Resolved:
    return resolve_job(load_job(None, ["batch.global_batch=24", "data.sequence_length=128", *words]), ranks, HOST)


def refused(ranks: int, *words: str) -> JobError:
    with pytest.raises(JobError) as raised:
        resolved(ranks, *words)
    return raised.value


def test_defaults_of_a_pipeline_are_derived_and_said() -> None:
    job = resolved(2, "parallel.pp=2", "model.num_layers=6")
    assert (job.pipeline.schedule, job.pipeline.stages_per_rank, sum(job.pipeline.layers)) == ("1f1b", 1, 6)
    assert job.batch.accumulation >= 8, "so many that the bubble is below a fifth of the step"
    said = {d.key: str(d) for d in job.derivations}["parallel.pp_layers"]
    assert f"= {job.pipeline.layers[0]} {job.pipeline.layers[1]} " in said
    assert f"{job.batch.accumulation} micro-batches" in said


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zero-bubble"])
@pytest.mark.parametrize("batch", [6, 7, 9, 12, 14, 22])
def test_a_derived_micro_batch_is_one_that_the_schedule_takes(schedule: str, batch: int) -> None:
    job = resolved(4, "parallel.pp=4", "model.num_layers=8", f"parallel.pp_schedule={schedule}",
                   f"batch.global_batch={batch}")  # fmt: skip
    assert job.batch.accumulation % max(1, job.batch.accumulation // 4) == 0
    said = {d.key: str(d) for d in job.derivations}["batch.microbatch"]
    assert ("the schedule takes none below" in said) == (batch in (9, 14, 22))


def test_given_stages_are_taken_as_they_are() -> None:
    job = resolved(2, "parallel.pp=2", "model.num_layers=6", "parallel.pp_layers=[4, 2]")
    assert job.pipeline.layers == (4, 2)


def test_stages_hold_every_parameter_once_and_a_tied_table_twice() -> None:
    for tied in (False, True):
        job = resolved(4, "parallel.pp=4", "model.num_layers=5", f"model.tie_embeddings={str(tied).lower()}",
                       "parallel.precision=fp32")  # fmt: skip
        held = sum(stage.parameters_bytes for stage in job.stages)
        twice = job.spec.vocab_size * job.spec.dim if tied else 0
        assert held == 4 * (parameter_count(job.spec) + twice)


def test_moments_and_gradients_follow_the_parameters_of_each_stage() -> None:
    job = resolved(4, "parallel.pp=4", "model.num_layers=7", "model.tie_embeddings=false", "parallel.precision=fp32")
    for rank, stage in enumerate(job.stages):
        blocks = {block for s in job.pipeline.stages_of(rank) for block in job.pipeline.blocks_of(s)}
        own = sum(math.prod(p.shape) for p in parameters(job.spec) if p.layer in blocks)
        own += sum(math.prod(p.shape) for p in parameters(job.spec) if p.layer is None
                   and (rank == 0 if p.role in ("embedding", "position_embedding") else rank == 3))  # fmt: skip
        assert stage.parameters_bytes == stage.gradients_bytes == 4 * own
        assert stage.moments_bytes == pytest.approx(8 * own, rel=1e-3)


def test_the_heaviest_stage_decides_whether_a_job_fits() -> None:
    job = resolved(4, *BIG, "parallel.pp=4")
    totals = [stage.total_bytes for stage in job.stages]
    assert len(set(totals)) > 1 and job.memory.total_bytes == max(totals) == totals[job.heaviest]
    between = (max(totals) + sorted(totals)[-2]) // 2
    assert not msgspec.structs.replace(job, memory_available_bytes=between).fits
    assert msgspec.structs.replace(job, memory_available_bytes=max(totals)).fits


def test_the_first_rank_keeps_most_micro_batches_under_1f1b_and_all_under_gpipe() -> None:
    kept = {}
    for schedule in ("1f1b", "gpipe"):
        job = resolved(4, *BIG, "parallel.pp=4", f"parallel.pp_schedule={schedule}", "parallel.pp_layers=[8, 8, 8, 8]")
        kept[schedule] = [stage.activations_bytes for stage in job.stages]
    assert kept["1f1b"][0] > kept["1f1b"][1] > kept["1f1b"][2]
    # 4 and 3 micro-batches of 8 blocks, but for tables that each micro-batch has once.
    assert kept["1f1b"][0] / kept["1f1b"][1] == pytest.approx(4 / 3, rel=0.02)
    assert kept["gpipe"][0] / kept["1f1b"][0] == pytest.approx(64 / 4, rel=0.02)


def test_under_pipeline_and_shards_weights_stay_gathered_and_gradients_whole() -> None:
    job = resolved(4, *BIG, "parallel.pp=2", "parallel.dp_shard=2", "parallel.precision=fp32")
    assert job.fsdp.zero_stage == 1
    for stage in job.stages:
        # docs/math/pipeline.md: all units of the rank and the buffer of the largest one.
        assert 2 * stage.parameters_bytes < stage.gathered_bytes < 2.6 * stage.parameters_bytes
        assert stage.gradients_bytes == 2 * stage.parameters_bytes


def test_plan_fixed_shows_each_stage_and_the_heaviest_one() -> None:
    job = resolved(4, *BIG, "parallel.pp=4")
    document = fixed_plan(job, "4x cpu")
    memory = document["chosen"]["memory"]
    assert [entry["total_bytes"] for entry in memory["stages"]] == [stage.total_bytes for stage in job.stages]
    assert memory["heaviest"] == job.heaviest
    text = describe(job, document)
    assert f"on rank {job.heaviest} of pp, which needs most" in text
    assert all(f"stages of rank {rank} of pp:" in text for rank in range(4))
    kinds = {(c["kind"], c["axis"]) for c in document["chosen"]["collectives"]}
    assert ("send_recv", "pp") in kinds


def test_what_a_stage_keeps_is_what_its_own_statement_says() -> None:
    """`stage_memories` against the memory of each stage by itself."""
    job = resolved(4, "parallel.pp=4", "model.num_layers=8", "parallel.pp_schedule=zbv", "parallel.precision=fp32")
    again = stage_memories(
        job.spec, job.layout, job.batch, job.job.optimizer, job.ddp, job.fsdp, pipeline=job.pipeline,
        sequence_length=128, precision="fp32", device_kind="cpu", transforms=job.transforms,
    )  # fmt: skip
    assert tuple(again) == job.stages


REFUSED = [
    # heads, kv heads, ffn, vocabulary
    (3, ["parallel.tp=3"], "parallel.tp", "4 query heads cannot be split over 3 ranks", "1, 2, 4"),
    (6, ["parallel.tp=6", "model.num_heads=12", "model.num_kv_heads=4", "model.head_dim=8"], "parallel.tp",
     "4 key and value heads cannot be split over 6 ranks", "1, 2, 4, 12"),
    (4, ["parallel.tp=4", "model.ffn_dim=390"], "parallel.tp", "390 numbers of the feed-forward layer", "1, 2"),
    (4, ["parallel.tp=4", "model.vocab_size=3"], "parallel.tp", "3 rows of the vocabulary", "1, 2"),
    # sequence
    (4, ["parallel.cp=4", "data.sequence_length=100"], "data.sequence_length", "100 tokens does not divide into the 8", "96"),
    (2, ["parallel.tp=2", "parallel.sequence_parallel=true", "data.sequence_length=127"], "parallel.sequence_parallel",
     "127 positions do not divide", "data.sequence_length=128"),
    (3, ["parallel.cp=3", "parallel.cp_method=alltoall", "data.sequence_length=96"], "parallel.cp_method",
     "cannot be handed out to cp = 3 ranks", "parallel.cp_method=gather"),
    # layers, stages
    (8, ["parallel.pp=8", "model.num_layers=4"], "parallel.pp", "8 stages, and the model has 4 blocks", "at most 4"),
    (2, ["parallel.pp=2", "model.num_layers=3", "parallel.pp_schedule=interleaved-1f1b"], "parallel.pp",
     "2 ranks x 2 stages = 4 stages", "at most 1"),
    (2, ["parallel.pp=2", "parallel.pp_layers=[1, 1]", "model.num_layers=4"], "parallel.pp_layers", "4 in all", "Remove it"),
    (2, ["parallel.pp=2", "parallel.pp_stages_per_rank=2"], "parallel.pp_stages_per_rank", "1f1b runs one stage", "to 1"),
    # micro-batches
    (2, ["parallel.pp=2", "batch.microbatch=5"], "batch.microbatch", "5 does not divide the 24 sequences", "1 or 2 or 3"),
    (4, ["parallel.pp=4", "model.num_layers=4", "batch.microbatch=12"], "batch.microbatch",
     "at least as many micro-batches as stages, 4, and there are 2", "1 or 2 or 3 or 4 or 6"),
    (4, ["parallel.pp=4", "model.num_layers=8", "batch.microbatch=2", "batch.global_batch=18",
         "parallel.pp_schedule=interleaved-1f1b"],
     "batch.microbatch", "takes 9 micro-batches in 2 rounds", "micro-batches of the 18 sequences"),
    (4, ["parallel.pp=4", "model.num_layers=4", "batch.global_batch=3"], "batch.microbatch", "and there are 3",
     "Raise batch.global_batch"),
    # what belongs to other layouts
    (4, ["parallel.pp=2", "parallel.dp_shard=2", "parallel.zero_stage=3"], "parallel.zero_stage", "weights anew", "=1"),
    (4, ["parallel.pp=2", "parallel.dp_shard=2", "parallel.reduce_every=microbatch"], "parallel.reduce_every", "once a step",
     "Remove it"),
    (2, ["parallel.pp_schedule=gpipe"], "parallel.pp_schedule", "no effect with pp = 1", "Remove it"),
    (2, ["parallel.pp=2", "parallel.pp_schedule=zero-bubble", "parallel.parameter_dtype=bf16", "parallel.precision=bf16"],
     "parallel.parameter_dtype", "zero-bubble runs it in two", "parallel.pp_schedule to 1f1b"),
    *((2, ["parallel.pp=2", "parallel.pp_schedule=zbv", f"parallel.recompute={kind}"], "parallel.recompute",
       "computed again in each part of the backward, and zbv", "parallel.recompute=none") for kind in ("full", "selective")),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "words", "key", "numbers", "hint"), REFUSED)
def test_what_does_not_divide_is_refused_with_numbers_and_what_would_do(
    ranks: int, words: list[str], key: str, numbers: str, hint: str
) -> None:
    error = refused(ranks, *words)
    assert error.key == key
    assert numbers in str(error) and hint in str(error.hint)


@pytest.mark.parametrize("preset", ["tiny", "small", "llama3-8b"])
def test_what_a_refusal_offers_is_taken(preset: str) -> None:
    """Every micro-batch that is named resolves."""
    layers = resolve(ModelSection(preset=preset)).num_layers
    words = (f"model.preset={preset}", "batch.global_batch=16", f"parallel.pp={min(4, layers)}")
    valid = refused(min(4, layers), *words, "batch.microbatch=16").values["valid_microbatches"]
    assert valid
    for microbatches in valid:
        assert (
            resolved(min(4, layers), *words, f"batch.microbatch={16 // microbatches}").batch.accumulation
            == microbatches
        )


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["parallel.pp=8", "model.num_layers=4"], ["8 stages", "4 blocks", "at most 4"]),
        (["parallel.pp=8", "model.num_layers=8", "batch.global_batch=16", "batch.microbatch=4"],
         ["stages, 8, and there are 4", "batch.microbatch"]),
        (["parallel.tp=8", "model.num_heads=4"], ["4 query heads", "8 ranks", "1, 2, 4"]),
        (["parallel.cp=8", "data.sequence_length=120"], ["120 tokens", "16 chunks", "112 or 128"]),
        (["parallel.cuda_graphs=true"], ["parallel.cuda_graphs", "hooks of the backward"]),
        (["parallel.precision=fp8"], ["parallel.precision", "torchao"]),
    ],
)  # fmt: skip
def test_plan_fixed_refuses_as_train_does(launch: Launcher, words: list[str], texts: list[str]) -> None:
    done = launch(["plan", "--fixed", "--cluster", "1x8xh100-sxm", "batch.global_batch=32", *words, "--json"])
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 78 and "Traceback" not in done.stderr
    for text in texts:
        assert text in f"{error['key']} {error['reason']} {error['next']}"
