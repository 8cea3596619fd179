"""What is there to resume from is damaged, foreign, or not there for all ranks: found, named, never in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from paceline.checkpoint.convert import convert
from paceline.checkpoint.folders import list_steps
from paceline.checkpoint.storage import open_storage
from paceline.checkpoint.storage_local import LocalStorage
from paceline.errors import JobError, NoCheckpoint, PacelineError
from paceline.run.directory import RunDirectory
from tests.pool.pool import Pool, RankFailed
from tests.train.attempts import STEPS, attempt, attempts, left, said

SAVES = ("checkpoint.every=2", "model.num_layers=2")


@pytest.fixture(scope="module")
def original(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the straight run, and one that ended after step 5 with checkpoints 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("faults")
    broken = (*SAVES, "run.name=broken")
    pool.run(
        attempts, 2, folder, [((*SAVES, "run.name=straight"), {}), (broken, {"stop": 5, "each": True})], timeout=60
    )
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def checkpoints(folder: Path, run: str = "broken") -> Path:
    return folder / "runs" / run / "checkpoints"


def steps(folder: Path, run: str = "broken") -> list[int]:
    return list_steps(open_storage(checkpoints(folder, run)))


def flip(file: Path, offset: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1
    file.write_bytes(data)


def refused(
    pool: Pool, folder: Path, *words: str, ranks: int = 1, function: Any = attempt, run: str = "broken"
) -> PacelineError:
    """The error that an attempt ends with, the same on all ranks; nothing is saved, moved or removed by it."""
    before = {p: p.stat().st_size for p in checkpoints(folder, run).rglob("*")}
    with pytest.raises(RankFailed) as failed:
        pool.run(function, ranks, folder, (*SAVES, f"run.name={run}", *words), timeout=40)
    error = failed.value.exception
    assert isinstance(error, PacelineError), failed.value
    assert len(failed.value.tracebacks) == ranks
    assert all(error.message[:60] in text for text in failed.value.tracebacks.values())
    after = {p: p.stat().st_size for p in checkpoints(folder, run).rglob("*")}
    assert {p: size for p, size in after.items() if not p.name.startswith(".writer")} == {
        p: size for p, size in before.items() if not p.name.startswith(".writer")
    }
    return error


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(pool: Pool, folder: Path) -> None:  # R4
    for name in sorted(p.name for p in checkpoints(folder).glob("step-00000005/rank-*")):
        flip(checkpoints(folder) / "step-00000005" / name)
    text = pool.run(attempt, 2, folder, (*SAVES, "run.name=broken"), timeout=40)[0]
    aside = checkpoints(folder) / "quarantine" / "step-00000005-1"
    reason = json.loads((aside / "reason.json").read_text())["reason"]
    assert "is damaged" in reason and "rank-0000" in reason and "optimizer/" in reason + text
    assert (
        f"warning: the checkpoint of step 5 is damaged and was set aside in quarantine/{aside.name}: {reason}" in text
    )
    assert "resuming after step 4 from" in text
    found = [r for r in said(folder / "runs" / "broken", "checkpoint") if r["attempt"] == 2]
    assert [(r["state"], r["step"]) for r in found[:2]] == [("quarantined", 5), ("resumed", 4)]
    assert found[0]["reason"] == reason
    resumed, straight = left(folder / "runs" / "broken"), left(folder / "runs" / "straight")
    assert (resumed.curve, resumed.samples, resumed.tensors) == (straight.curve, straight.samples, straight.tensors)


def test_a_damaged_manifest_is_seen_without_loading(pool: Pool, folder: Path) -> None:
    flip(checkpoints(folder) / "step-00000005" / "manifest.json", 300)
    (checkpoints(folder) / "step-00000004" / "rank-00001.safetensors").unlink()
    text = pool.run(attempt, 1, folder, (*SAVES, "run.name=broken"), timeout=40)[0]
    assert "the checkpoint of step 5 is damaged" in text and "the checkpoint of step 4 is damaged" in text
    assert "resuming after step 2 from" in text and steps(folder)[-1] == STEPS


def test_nothing_valid_is_never_a_fresh_start(pool: Pool, folder: Path) -> None:
    for file in checkpoints(folder).glob("step-*/rank-00000.safetensors"):
        flip(file)
    lines = len(said(folder / "runs" / "broken", "step"))
    messages = []
    for _ in range(2):
        with pytest.raises(RankFailed) as failed:
            pool.run(attempt, 1, folder, (*SAVES, "run.name=broken"), timeout=40)
        error = failed.value.exception
        assert isinstance(error, NoCheckpoint) and error.exit_code == 77
        messages.append(error.message)
    assert "held 3 checkpoints and none of them is valid" in messages[0] and messages[0] == messages[1]
    assert all(f"step-0000000{step}-1" in messages[0] for step in (2, 4, 5))
    assert steps(folder) == [] and len(said(folder / "runs" / "broken", "step")) == lines
    text = pool.run(attempt, 1, folder, (*SAVES, "run.name=broken", "checkpoint.resume=never"), timeout=40)[0]
    assert "resuming" not in text and sorted(left(folder / "runs" / "broken-2").curve) == list(range(1, STEPS + 1))


def test_a_run_whose_first_save_never_finished_begins_anew(pool: Pool, folder: Path) -> None:
    for step in (2, 4):
        shutil.rmtree(checkpoints(folder) / f"step-0000000{step}")
    (checkpoints(folder) / "step-00000005" / "COMMIT").unlink()
    # What was moved aside does not stand in the way of the attempt after it either, which has nothing to resume again.
    texts = pool.run(attempts, 1, folder, [((*SAVES, "run.name=broken"), {"kill": 1})] * 2, timeout=40)[0]
    assert "a save that finished all but its COMMIT" in texts[0] and not any("resuming" in text for text in texts)
    assert [r["step"] for r in said(folder / "runs" / "broken", "run_started")] == [0, 0, 0]
    assert (checkpoints(folder) / "quarantine" / "step-00000005-1").is_dir()


def test_a_newer_format_is_left_alone(pool: Pool, folder: Path) -> None:
    mark = checkpoints(folder) / "step-00000005" / "COMMIT"
    mark.write_text(mark.read_text().replace("paceline.checkpoint/1", "paceline.checkpoint/2"))
    error = refused(pool, folder, ranks=2)
    assert error.exit_code == 77 and "paceline.checkpoint/2" in error.message
    assert steps(folder) == [2, 4, 5]


OTHER = ("run.name=other", "checkpoint.resume=runs/broken")


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("model.ffn_dim=64",), ("model/blocks.0.mlp", "has shape (32, 32) in the checkpoint and (64, 32) in the model")),
        (("model.vocab_size=512",), ("model/embedding.weight has shape", "(512, 32) in the model")),
        (("model.num_layers=1",), ("only in the checkpoint: model/blocks.1.",)),
        (("model.tie_embeddings=false",), ("missing from the checkpoint: model/lm_head.weight", "optimizer/exp_avg/lm_head")),
        (("data.tokenizer=bpe:300",), ("another vocabulary", "bytes", "bpe:300")),
        (("optimizer.name=sgd", "optimizer.momentum=0.9"), ("optimizer/momentum_buffer/", "optimizer/exp_avg/")),
    ],
)  # fmt: skip
def test_another_model_is_refused_with_what_differs(  # BL-49
    pool: Pool, original: Path, tmp_path: Path, words: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    shutil.copytree(original, tmp_path / "copy")
    (tmp_path / "copy" / "runs" / "other" / "checkpoints").mkdir(parents=True)
    error = refused(pool, tmp_path / "copy", *OTHER[1:], *words, ranks=2, run="other")
    assert isinstance(error, JobError) and error.exit_code == 78
    shown = f"{error} {error.values}"
    assert all(text in shown for text in texts), shown


def test_a_job_changed_under_its_own_checkpoints_is_refused(pool: Pool, folder: Path) -> None:
    error = refused(pool, folder, "model.ffn_dim=64")
    assert error.exit_code == 78 and "model.ffn_dim: 32 -> 64" in error.message
    error = refused(pool, folder, "model.ffn_dim=64", 'checkpoint.allow_change=["model.ffn_dim"]')
    assert error.exit_code == 78 and "(64, 32) in the model" in error.message
    elsewhere = refused(pool, folder, "checkpoint.dir=elsewhere")
    assert elsewhere.exit_code == 78 and "checkpoint.dir" in elsewhere.message and not (folder / "elsewhere").exists()


def test_another_text_is_refused_unless_it_is_allowed(pool: Pool, folder: Path) -> None:
    (folder / "text.txt").write_text((folder / "text.txt").read_text().replace("lazy", "busy"))
    error = refused(pool, folder, ranks=2)
    assert error.exit_code == 78 and error.key == "data.source"
    assert error.values["checkpoint"][:16] in error.message and error.values["job"][:16] in error.message
    allowed = (*SAVES, "run.name=broken", 'checkpoint.allow_change=["data.source"]')
    assert "resuming after step 5" in pool.run(attempt, 1, folder, allowed, timeout=40)[0]


def test_weights_alone_may_lack_what_is_named_and_the_rest_is_said(pool: Pool, folder: Path) -> None:  # BL-49 BL-38
    convert(str(folder / "runs" / "broken"), str(folder / "weights"), weights_only=True)
    fewer = ("run.name=fewer", "checkpoint.resume=weights", "model.num_layers=1", "model.tie_embeddings=false")
    with pytest.raises(RankFailed) as failed:
        pool.run(attempt, 1, folder, fewer, timeout=40)
    error = str(failed.value.exception)
    assert "missing from the checkpoint: model/lm_head.weight" in error
    assert "only in the checkpoint: model/blocks.1." in error
    fewer = (*fewer, 'checkpoint.allow_missing=["model/lm_head.*"]', 'checkpoint.allow_unexpected=["model/blocks.1.*"]')
    text = pool.run(attempt, 1, folder, fewer, timeout=40)[0]
    assert "left at their initial values: model/lm_head.weight\n" in text
    assert "only in the checkpoint and not read: model/blocks.1.attention" in text
    # Three ways to go on after step 5: as it was, resumed in full, and with the weights alone, which is another curve.
    same = (*SAVES, "run.name=same", "checkpoint.resume=weights")
    pool.run(attempts, 2, folder, [(same, {}), ((*SAVES, "run.name=broken"), {})], timeout=60)
    straight, resumed = left(folder / "runs" / "straight"), left(folder / "runs" / "broken")
    weights = {r["step"]: (r["loss"], r["grad_norm"]) for r in said(folder / "runs" / "same", "step")}
    assert resumed.curve == straight.curve and list(weights) == [6, 7, 8]
    # Moments matter from the first update on.
    assert weights[6] == straight.curve[6] and weights[7] != straight.curve[7]


def test_a_run_starts_exactly_from_another_ones_checkpoint(pool: Pool, folder: Path) -> None:
    words = (*SAVES, *OTHER)
    texts = pool.run(attempts, 2, folder, [(words, {"stop": 7}), (words, {})], timeout=60)[0]
    assert "resuming after step 5 from" in texts[0] and "runs/broken/checkpoints/step-00000005" in texts[0]
    # Its own checkpoints go before the one that it started from.
    assert "resuming after step 7 from" in texts[1] and "runs/other/checkpoints" in texts[1]
    straight = left(folder / "runs" / "straight")
    assert [r["step"] for r in said(folder / "runs" / "other", "step")] == [6, 7, 8]
    for record in said(folder / "runs" / "other", "step"):
        assert (record["loss"], record["grad_norm"]) == straight.curve[record["step"]]
    assert steps(folder) == [2, 4, 5]


def test_a_run_that_starts_at_its_end_has_a_checkpoint_of_its_own(pool: Pool, folder: Path) -> None:
    pool.run(attempt, 2, folder, (*SAVES, "run.name=other", "checkpoint.resume=runs/straight"), timeout=40)
    assert steps(folder, "other") == [STEPS]
    assert left_tensors(folder, "other") == left_tensors(folder, "straight")


def left_tensors(folder: Path, run: str) -> dict[str, list[str]]:
    manifest = json.loads((checkpoints(folder, run) / f"step-0000000{STEPS}" / "manifest.json").read_text())
    return {name: [p["checksum"] for p in tensor["pieces"]] for name, tensor in manifest["tensors"].items()}


@pytest.mark.parametrize("path", ["nowhere", "runs/empty"])
def test_a_path_without_a_checkpoint_is_refused(pool: Pool, folder: Path, path: str) -> None:
    (folder / "runs" / "empty").mkdir()
    (folder / "runs" / "other" / "checkpoints").mkdir(parents=True)
    error = refused(pool, folder, f"checkpoint.resume={path}", ranks=2, run="other")
    assert error.exit_code == 77 and error.key == "checkpoint.resume" and path in error.message


# ---- ranks that do not see the same


def attempt_elsewhere(rank: int, world_size: int, folder: Path, words: Sequence[str]) -> None:
    """Rank 1 was told of another directory."""
    attempt(rank, world_size, folder, [*words, f"run.name=at-{rank}"])


def test_ranks_told_of_different_directories_end_with_both(pool: Pool, folder: Path) -> None:  # BL-37
    error = refused(pool, folder, ranks=2, function=attempt_elsewhere)
    assert error.exit_code == 78 and error.key == "run.dir"
    assert str(folder / "runs" / "at-0") in error.message and str(folder / "runs" / "at-1") in error.message
    assert sorted(p.name for p in (folder / "runs").iterdir()) == ["broken", "straight"]


def attempt_without_directory(rank: int, world_size: int, folder: Path, words: Sequence[str]) -> None:
    """Rank 1's host does not have the run directory."""
    lost = JobError("there is no run")
    with mock.patch.object(RunDirectory, "attach", side_effect=lost):
        attempt(rank, world_size, folder, words)


def test_a_rank_that_does_not_see_the_run_directory_ends_all(pool: Pool, folder: Path) -> None:  # BL-37
    error = refused(pool, folder, ranks=2, function=attempt_without_directory)
    assert "rank 1 (on " in error.message and str(folder / "runs" / "broken") in error.message
    assert pool.run(attempt, 2, folder, (*SAVES, "run.name=broken"), timeout=40), "the lease was not given back"


def attempt_without_checkpoints(rank: int, world_size: int, folder: Path, words: Sequence[str]) -> None:
    """Rank 1's host does not have the checkpoints."""
    read = LocalStorage.read

    def read_on_rank_0(storage: LocalStorage, name: str, *rest: Any) -> bytes:
        if rank == 1:
            raise FileNotFoundError(name)
        return read(storage, name, *rest)

    with mock.patch.object(LocalStorage, "read", read_on_rank_0):
        attempt(rank, world_size, folder, words)


def test_a_rank_that_does_not_see_the_checkpoints_costs_none_of_them(pool: Pool, folder: Path) -> None:  # BL-37
    error = refused(pool, folder, ranks=2, function=attempt_without_checkpoints)
    assert "rank 1 cannot load" in error.message and "rank 0 finds every byte as it was written" in error.message
    assert steps(folder) == [2, 4, 5]


def attempt_denying(rank: int, world_size: int, folder: Path, words: Sequence[str]) -> str:
    """Whatever rank 1 asks for is not there, it hears; a file system that lags behind says that."""
    exists = LocalStorage.exists

    def lags(storage: LocalStorage, name: str) -> bool:
        return rank == 0 and exists(storage, name)

    with mock.patch.object(LocalStorage, "exists", lags):
        return attempt(rank, world_size, folder, words)


def test_no_rank_goes_by_an_existence_test_of_its_own(pool: Pool, folder: Path) -> None:  # BL-45
    assert "resuming after step 5" in pool.run(attempt_denying, 2, folder, (*SAVES, "run.name=broken"), timeout=40)[0]
    assert left(folder / "runs" / "broken").curve == left(folder / "runs" / "straight").curve
