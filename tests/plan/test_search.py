"""The search against trying everything: it finds the same, its bounds are bounds, and its counts add up."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from paceline.cluster.spec import Cluster
from paceline.errors import JobError, PacelineError
from paceline.job.load import Job
from paceline.parallel.layout import Layout
from paceline.plan.search import FRONT_STEP, OOM_CHANCE, Search, careful_limit, front_of, search, simplest_first
from paceline.plan.setting_of import setting_of
from paceline.plan.space import Choice, Limits, divisors, fault, held_by, layouts, recomputes, styles
from paceline.plan.verdict import oom_probability
from paceline.plan.weigh import Scale, Weighed
from tests.plan.places import cluster, job

MB = 2**20
BIG = ("model.preset=llama3-8b", "batch.global_batch=64", "data.sequence_length=4096")
CASES = {
    "four H100": (("model.num_layers=4",), "1x4xh100-sxm", None),
    "two nodes": (("model.num_layers=3", "batch.global_batch=12"), "2x2xh100-sxm:ndr400", None),
    "little memory": (("model.num_layers=4", "batch.global_batch=16"), "1x4xh100-sxm", 670 * MB),
    "kept degree": (("parallel.tp=2", "model.num_layers=4"), "1x4xh100-sxm", None),
    "three ranks": (("batch.global_batch=6", "model.num_layers=3"), "1x3xh100-sxm", None),
}


def everything(task: Job, place: Cluster) -> Iterator[Choice]:
    """Every choice, one after the other, refused by nothing but the job itself."""
    scale = Scale(task, place)
    limits, held = Limits.of(scale.base.spec, task), held_by(task)
    for layout in layouts(place.devices):
        if limits.global_batch % layout.dp or any(getattr(layout, a) != d for a, d in held.degrees.items()):
            continue
        for style in styles(layout, limits, held):
            for size, again in itertools.product(
                divisors(limits.global_batch // layout.dp), recomputes(style, layout.pp > 1, held)
            ):
                yield Choice(layout, style, size, again)


def brute_force(task: Job, place: Cluster) -> list[Weighed]:
    scale = Scale(task, place)
    weighed = [w for c in everything(task, place) if isinstance(w := scale.weigh(c), Weighed)]
    limit = careful_limit(place.host.device_memory_bytes, place.host.device_kind)
    return [w for w in weighed if w.memory_bytes <= limit]


@pytest.mark.parametrize("name", CASES)
def test_the_search_finds_what_trying_everything_finds(name: str) -> None:
    words, text, memory = CASES[name]
    task, place = job(*words), cluster(text, memory)
    found, tried = search(task, place), brute_force(task, place)
    best: dict[Layout, Weighed] = {}
    for w in tried:
        if w.choice.layout not in best or w.seconds < best[w.choice.layout].seconds:
            best[w.choice.layout] = w
    expected = simplest_first(list(best.values()))[: len(found.ranked)]
    assert [w.seconds for w in found.ranked] == pytest.approx([w.seconds for w in expected], rel=1e-12)
    assert found.ranked[0].choice.layout == expected[0].choice.layout
    assert len(found.ranked) == min(8, len(best)), "as many layouts as are shown, or all that fit"
    step = FRONT_STEP * place.host.device_memory_bytes
    for w in tried:
        assert any(f.seconds <= w.seconds and f.memory_bytes <= w.memory_bytes + step for f in found.front), w.choice
    assert front_of(list(found.front), step) == list(found.front)
    if memory is not None:
        assert any("needs more than" in r.reason for r in found.rejections.listed()), "the case is to have misfits"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (BIG, "2x8xh100-sxm:ndr400"),
        (
            (*BIG, "parallel.offload=host", "parallel.reduce_dtype=bf16", "parallel.reduce_every=microbatch"),
            "1x8xa100-sxm-80g",
        ),
        ((*BIG, "parallel.reduce_every=step"), "1x8xh100-sxm"),
        (("model.preset=qwen3-0.6b", "batch.global_batch=96", "data.sequence_length=512"), "3x4xa100-sxm-40g:100gbit"),
        (("model.num_layers=6", "batch.global_batch=24"), "1x6xcpu"),
        (("model.preset=gpt2-xl", "batch.global_batch=120", "data.sequence_length=1024"), "5x6xv100-sxm-32g:edr100"),
        (("model.preset=llama3-70b", "batch.global_batch=96", "data.sequence_length=8192"), "12x8xa100-sxm-80g:hdr200"),
    ],
)
def test_bounds_are_below_the_exact_figures(words: tuple[str, ...], text: str) -> None:
    looking = Search(job(*words), cluster(text))
    pool = looking.pool(looking.allowed())
    runs = [i for i in range(pool.seconds.size) if pool.seconds[i] < float("inf")]
    for index in random.Random(0).sample(runs, min(100, len(runs))):
        weighed = looking.scale.weigh(pool.choice(index))
        if isinstance(weighed, str):
            continue
        assert pool.seconds[index] <= weighed.seconds, weighed.choice
        assert pool.memory[index] <= weighed.memory_bytes, weighed.choice
    for index in random.Random(1).sample(runs, min(1000, len(runs))):
        choice = pool.choice(index)
        assert pool.seconds[index] <= looking.scale.step(looking.scale.setting_of(choice)).seconds, choice


def test_the_setting_of_a_choice_is_that_of_its_resolved_job() -> None:
    place = cluster("2x4xh100-sxm:ndr400")
    several: tuple[tuple[str, ...], ...] = (
        BIG, (*BIG, "parallel.reduce_every=step", "run.steps=20"), ("model.num_layers=5",),
        (*BIG, "parallel.reduce_dtype=bf16", "parallel.reduce_every=microbatch"),
        ("model.num_layers=6", "parallel.pp_layers=[2, 3, 1, 1]", "model.num_layers=7", "batch.global_batch=16"),
    )  # fmt: skip
    for words in several:
        task = job(*words)
        scale = Scale(task, place)
        choices = list(everything(task, place))
        for choice in random.Random(1).sample(choices, min(60, len(choices))):
            try:
                resolved = scale.resolve(choice)
            except JobError:
                continue
            assert scale.setting_of(choice) == setting_of(resolved, place), choice


def test_a_rule_of_the_search_refuses_what_the_job_refuses() -> None:
    task = job("model.num_heads=6", "model.num_kv_heads=2", "model.dim=96", "data.sequence_length=20", "model.num_layers=5",
               "batch.global_batch=6", "parallel.cp_method=alltoall")  # fmt: skip
    place = cluster("1x12xh100-sxm")
    scale = Scale(task, place)
    limits, held = Limits.of(scale.base.spec, task), held_by(task)
    seen = set()
    for layout in layouts(12):
        # cp_method has an effect, and so is accepted, under cp alone.
        if layout.cp == 1:
            continue
        choice = Choice(layout, (styles(layout, limits, held) or [None])[0], 1, "none")  # type: ignore[arg-type]
        reason = fault(layout, limits, held)
        if reason is None and choice.style is None:
            continue
        if choice.style is None:
            choice = Choice(layout, styles(Layout(pp=1), limits, held)[0], 1, "none")
        refused = isinstance(scale.weigh(choice), str)
        assert refused == (reason is not None), (layout, reason)
        seen.add(reason)
    assert len(seen) >= 5, seen


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.sequence_parallel=false",), ("parallel.cp_method=gather",), ("parallel.reduce_every=microbatch",),
        ("parallel.reduce_every=step",), ("parallel.reduce_dtype=bf16",), ("parallel.bucket_bytes=4MiB",),
        ("parallel.overlap=true",), ("parallel.overlap=false",), ("parallel.parameter_dtype=bf16", "parallel.precision=bf16"),
    ],
)  # fmt: skip
def test_a_setting_that_a_layout_leaves_without_effect_excludes_it(words: tuple[str, ...]) -> None:
    task, place = job("model.num_layers=4", "batch.global_batch=16", *words), cluster("1x8xh100-sxm")
    scale = Scale(task, place)
    limits, held = Limits.of(scale.base.spec, task), held_by(task)
    refused = set()
    for layout in layouts(8):
        ways = styles(layout, limits, held)
        if not ways:
            continue
        # All sequences of a rank at once, so that no rule of micro-batches has a say.
        found = scale.weigh(Choice(layout, ways[-1], 16 // layout.dp, "none"))
        if layout.pp > 1 and isinstance(found, str) and "micro-batches" in found:
            continue
        assert isinstance(found, str) == (fault(layout, limits, held) is not None), (layout, found)
        refused.add(isinstance(found, str))
    assert refused == {True, False}


def test_counts_of_rejections_add_up_and_each_has_an_example() -> None:
    found = search(job(*BIG), cluster("8x8xh100-sxm:ndr400"))
    listed = found.rejections.listed()
    pool_size = found.choices
    assert sum(r.count for r in listed if r.of == "choices") + len(found.ranked) == pool_size
    refused = sum(r.count for r in listed if r.of == "layouts")
    assert 0 < refused < found.layouts == sum(1 for _ in layouts(64))
    assert all(r.example and r.reason and r.layout for r in listed)


def test_what_the_user_sets_is_kept() -> None:
    found = search(job(*BIG, "parallel.tp=4", "batch.microbatch=2", "parallel.recompute=full"), cluster("1x8xh100-sxm"))
    assert found.ranked
    for w in found.ranked:
        assert (w.choice.layout.tp, w.choice.microbatch, w.choice.recompute) == (4, 2, "full")
    assert set(found.held.keys) == {"parallel.tp", "batch.microbatch", "parallel.recompute"}
    assert any("the job sets parallel.tp = 4" in r.reason for r in found.rejections.listed())


def test_a_batch_that_no_layout_splits_is_refused_with_the_nearest() -> None:
    with pytest.raises(JobError) as raised:
        search(job("batch.global_batch=7", "model.num_heads=1", "model.num_kv_heads=1", "model.num_layers=1",
                   "data.sequence_length=63"), cluster("1x8xh100-sxm"))  # fmt: skip
    assert raised.value.key == "batch.global_batch" and "batch.global_batch=8" in (raised.value.hint or "")


def test_a_set_micro_batch_that_no_layout_takes_is_refused() -> None:
    with pytest.raises(PacelineError) as raised:
        search(job("batch.microbatch=5"), cluster("1x8xh100-sxm"))
    assert "batch.microbatch" in str(raised.value)


def test_a_layout_that_may_run_out_is_taken_only_where_no_other_fits() -> None:
    task = job("model.num_layers=4", "batch.global_batch=16")
    least = min(w.memory_bytes for w in brute_force(task, cluster("1x4xh100-sxm")))
    tight = cluster("1x4xh100-sxm", round(least * 1.01))
    found = search(task, tight)
    assert found.ranked and found.ranked[0].resolved.fits
    limit = careful_limit(tight.host.device_memory_bytes, "cuda")
    assert oom_probability(limit, 0.99 * tight.host.device_memory_bytes, 0.05) == pytest.approx(OOM_CHANCE, abs=1e-3)
    assert found.ranked[0].memory_bytes > limit
