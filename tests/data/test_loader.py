"""The loader against batches made in place, and what happens when a worker ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data import order, prefetch, shared, worker
from paceline.data.loader import IterableLoader, Loader, check_shared_memory, shared_memory_need
from paceline.data.prepare import prepare
from paceline.errors import DataError, JobError, WorkerFailed
from paceline.units import MiB
from tests.data import datasets
from tests.data.corpus import section, silent, write_texts

SHAPE: dict[str, Any] = {"global_batch": 4, "microbatch": 2, "dp_rank": 0, "dp_degree": 1, "seed": 3}


@pytest.fixture
def tokens(tmp_path: Path) -> Any:
    return prepare(section(write_texts(tmp_path / "text"), tmp_path / "cache"), progress=silent).train


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No named shared memory stays behind any test here."""
    before = set(shared.SHARED_MEMORY.glob("paceline-*"))
    yield
    assert set(shared.SHARED_MEMORY.glob("paceline-*")) <= before


def expected_ids(step: int, size: int, **shape: int) -> list[list[int]]:
    shape = {k: v for k, v in (SHAPE | shape).items() if k != "seed"}
    return [order.samples_at(3, p, size).tolist() for p in order.positions_of_step(step, **shape)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_give_what_the_rank_would_make(tokens: Any, workers: int) -> None:
    with Loader(tokens, **SHAPE, start_step=2, steps=40, workers=workers) as loader:
        for step, microbatches in enumerate(loader, start=2):
            assert [m["sample_ids"].tolist() for m in microbatches] == expected_ids(step, len(tokens))
            for microbatch in microbatches:
                made = tokens.batch(microbatch["sample_ids"].numpy())
                assert made.keys() == microbatch.keys()
                assert all(np.array_equal(microbatch[k].numpy(), made[k]) for k in made)
            if step == 5:
                time.sleep(0.4)  # long enough for the workers to take over
        assert step == 39 and loader.wait_seconds > 0
    assert loader.worker_process_ids == []


def test_any_map_style_dataset_is_collated() -> None:
    data = datasets.Numbers()
    ranks = [Loader(data, **SHAPE | {"dp_rank": r, "dp_degree": 2}, steps=3) for r in range(2)]
    seen = []
    for step in range(3):
        for rank, loader in enumerate(ranks):
            (batch,) = next(loader)
            ids = batch["sample_ids"].tolist()
            assert [ids] == expected_ids(step, 40, dp_rank=rank, dp_degree=2)
            assert batch["x"].tolist() == [[float(i)] * 3 for i in ids] and batch["x"].dtype == torch.float32
            assert batch["t"].tolist() == [[i, i] for i in ids] and batch["i"].tolist() == ids
            assert batch["f"].tolist() == [i / 2 for i in ids]
            seen += ids
    assert len(set(seen)) == 12
    assert [list(loader) for loader in ranks] == [[], []]


def test_tensors_of_a_dataset_are_stacked_in_the_worker() -> None:
    with Loader(datasets.Tensors(), **SHAPE, steps=1) as loader:
        (first, _) = next(loader)
    assert first["t"].tolist() == [[float(i)] * 2 for i in first["sample_ids"].tolist()]
    assert os.getpid() not in first["pid"].tolist()


def test_batches_that_are_kept_are_not_overwritten() -> None:
    with Loader(datasets.Numbers(), **SHAPE, steps=30) as loader:
        kept = list(loader)
    ids = [m["sample_ids"].tolist() for step in kept for m in step]
    assert ids == [i for step in range(30) for i in expected_ids(step, 40)]
    assert all((m["x"][:, 0] == m["sample_ids"]).all() for step in kept for m in step)


def test_dataset_of_the_main_script_reaches_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "class Mine:\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, i): return {'i': i}\n"
        "if __name__ == '__main__':\n"
        "    from paceline.data.loader import Loader\n"
        "    with Loader(Mine(), global_batch=2, microbatch=2, dp_rank=0, dp_degree=1, seed=0, steps=3) as loader:\n"
        "        print(sorted(i for step in loader for i in step[0]['i'].tolist()))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30, env=environment())
    assert done.stdout.strip() == "[0, 1, 2, 3, 4, 5]", done.stderr
    monkeypatch.setenv(worker.MARK, "1")  # a script without the guard would train again inside the worker
    with pytest.raises(JobError, match="trains when it is imported") as error:
        Loader(datasets.Numbers(), **SHAPE)
    assert '__name__ == "__main__"' in (error.value.hint or "")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path("src").resolve()), str(Path.cwd())])}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
def test_a_killed_worker_is_named_with_its_signal(number: signal.Signals) -> None:  # BL-30
    shape = SHAPE | {"dp_rank": 1, "dp_degree": 2}
    began = time.monotonic()
    with Loader(datasets.Killed(number=int(number)), **shape) as loader, pytest.raises(WorkerFailed) as error:
        read(loader, 100)
    assert str(error.value).startswith("rank 1: loader worker 0") and number.name in str(error.value)
    assert f"signal {int(number)} ({number.name})" in error.value.message and error.value.values["rank"] == 1
    assert time.monotonic() - began < 20


def test_a_worker_killed_from_outside_is_seen(tokens: Any) -> None:
    with Loader(tokens, **SHAPE) as loader:
        next(loader)
        os.kill(loader.worker_process_ids[0], signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            read(loader, 1000, pause_seconds=0.01)


def read(loader: Loader, steps: int, pause_seconds: float = 0.0) -> None:
    for _ in range(steps):
        next(loader)
        time.sleep(pause_seconds)


def test_an_exception_in_a_worker_comes_with_its_traceback() -> None:
    with Loader(datasets.Raises(), **SHAPE, rank=7) as loader, pytest.raises(WorkerFailed) as error:
        read(loader, 100)
    assert "rank 7: loader worker 0 failed at step" in error.value.message
    assert "RuntimeError: sample five is broken" in error.value.message and "datasets.py" in error.value.message


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("tuple", "is a tuple, not a dict"),
        ("text", "is str, which is no number"),
        ("fields", "has fields"),
        ("", "has shape"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_cannot_be_put_together_are_named(kind: str, reason: str, workers: int) -> None:
    with pytest.raises(DataError, match=reason), Loader(datasets.Odd(kind), **SHAPE, workers=workers) as loader:
        next(loader)


def test_wrong_datasets_are_refused() -> None:
    with pytest.raises(DataError, match="cannot be sent to a loader worker"):
        Loader(datasets.Unpicklable(), **SHAPE)
    with pytest.raises(DataError, match="has no samples"):
        Loader(datasets.Numbers(size=0), **SHAPE)
    with pytest.raises(DataError, match="has no length"):
        Loader(iter([]), **SHAPE)
    with pytest.raises(JobError, match="do not divide"):
        next(Loader(datasets.Numbers(), **SHAPE | {"global_batch": 7, "dp_degree": 2}, workers=0))


def test_workers_ignore_signals_and_end_with_the_loader() -> None:
    loader = Loader(datasets.Numbers(), **SHAPE, workers=2)
    next(loader)
    pids = loader.worker_process_ids
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    for _ in range(10):
        next(loader)
    assert loader.worker_process_ids == pids
    loader.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    loader.close()


@pytest.mark.parametrize("dataset", ["Numbers", "Slow"])
def test_workers_end_when_their_rank_is_killed(dataset: str) -> None:
    code = (
        "import time; from paceline.data.loader import Loader; from tests.data import datasets\n"
        f"l = Loader(datasets.{dataset}(), global_batch=4, microbatch=2, dp_rank=0, dp_degree=1, seed=0, workers=2)\n"
        "print(*l.worker_process_ids, flush=True); time.sleep(60)\n"
    )
    rank = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment())
    assert rank.stdout is not None
    pids = [int(pid) for pid in rank.stdout.readline().split()]
    rank.kill()
    rank.communicate()
    until = time.monotonic() + 15
    while (alive := [p for p in pids if running(p)]) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(pids) == 2 and not alive


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("value", [None, "true"])
def test_tokenizer_threads_are_set_on_purpose_and_the_users_value_stays(  # BL-31
    value: str | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(datasets.TOKENIZERS_PARALLELISM, raising=False)
    if value:
        monkeypatch.setenv(datasets.TOKENIZERS_PARALLELISM, value)
    data = datasets.Environment(size=8)
    data[0] if value else None  # tokenize in the rank first
    with Loader(data, **SHAPE, workers=2, steps=4) as loader:  # 2 epochs
        for first, _ in loader:
            assert chr(int(first["first"][0])) == (value or "false")[0]
            assert int(first["parallel"][0]) == len(value or "false") and os.getpid() not in first["pid"].tolist()
    assert "fork" not in capfd.readouterr().err


def test_preparing_sets_tokenizer_threads_only_where_the_user_did_not(tmp_path: Path) -> None:  # BL-31
    code = (
        "import os, sys; from pathlib import Path; from tests.data.corpus import section, silent\n"
        "from paceline.data.prepare import prepare\n"
        "prepare(section(Path(sys.argv[1]), Path(sys.argv[2]), tokenizer='bpe:300'), progress=silent)\n"
        "if os.fork() == 0: os._exit(0)\n"
        "os.wait(); print(os.environ['TOKENIZERS_PARALLELISM'])\n"
    )
    folder = write_texts(tmp_path / "text")
    clean = {k: v for k, v in environment().items() if k != datasets.TOKENIZERS_PARALLELISM}
    for extra, after in (({}, "false"), ({datasets.TOKENIZERS_PARALLELISM: "true"}, "true")):
        command = [sys.executable, "-c", code, str(folder), str(tmp_path / f"cache{after}")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=clean | extra)
        assert (done.stdout.strip(), done.stderr) == (after, "")


def test_shared_memory_is_weighed_before_the_run() -> None:  # BL-30
    need = shared_memory_need(batch_bytes=8 * MiB, workers=2, prefetch=2, ranks=4)
    assert need == 256 * MiB
    warning = check_shared_memory(need, 64 * MiB)
    assert warning is not None and "256 MiB" in warning and "64.0 MiB" in warning and "data.workers" in warning
    assert check_shared_memory(need, 256 * MiB) is None and check_shared_memory(need, None) is None
    assert shared_memory_need(batch_bytes=8 * MiB, workers=0, prefetch=3, ranks=4) == 0


def test_full_shared_memory_is_said_and_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:  # BL-30
    monkeypatch.setattr(prefetch, "new_buffer_file", lambda: os.open("/dev/full", os.O_RDWR))  # a file that cannot grow
    with Loader(datasets.Large(), **SHAPE, steps=8) as loader:
        for step, microbatches in enumerate(loader):
            ids = [m["sample_ids"].tolist() for m in microbatches]
            assert ids == expected_ids(step, 40)
            assert all((m["x"] == m["i"][:, None]).all() for m in microbatches)
            notes = loader.notes
    assert len(notes) == 1 and notes[0].startswith("rank 0: loader worker 0 sends batches through a pipe")


def test_buffers_grow_and_give_back_what_was_written() -> None:
    buffer = shared.Buffer(shared.new_buffer_file())
    released: list[int] = []
    for size in (10, 100_000, 50):
        batch = {"x": np.arange(size), "scalar": np.asarray(size), "empty": np.empty((0, 3), np.float32)}
        (back,) = buffer.read(buffer.write([batch]), lambda: released.append(1))
        assert all(np.array_equal(back[k], batch[k]) and back[k].dtype == batch[k].dtype for k in batch)
        tensor = torch.from_numpy(back["x"])
        del back
        assert len(released) == 0
        del tensor
        assert released == [1]
        released.clear()
    buffer.close()


def stream(count: int) -> Iterator[dict[str, int]]:
    yield from ({"i": i} for i in range(count))


def test_streams_of_different_length_end_together() -> None:  # BL-19
    lengths = [21, 16, 30]
    common: dict[int, list[bool]] = {}
    loaders = []
    for rank, length in enumerate(lengths):
        answers = [length // 4 > step for step in range(10)]
        common[rank] = answers
    for rank, length in enumerate(lengths):
        step = iter(range(10))

        def agree(has_batch: bool, rank: int = rank, step: Iterator[int] = step) -> list[bool]:
            now = next(step)
            assert has_batch == common[rank][now]
            return [common[other][now] for other in range(3)]

        shape = {"global_batch": 12, "microbatch": 2, "dp_rank": rank, "dp_degree": 3}
        loaders.append(IterableLoader(stream(length), **shape, agree=agree))
    steps = [list(loader) for loader in loaders]
    assert [len(s) for s in steps] == [4, 4, 4]
    assert [m["i"].tolist() for m in steps[2][1]] == [[4, 5], [6, 7]]
    assert [loader.ran_out for loader in loaders] == [[1]] * 3
    assert [loader.dropped_samples for loader in loaders] == [4, 0, 4]
    assert "data rank 1 ran out of data after 4 steps" in (loaders[0].report() or "")
    assert "drops 4 samples" in (loaders[0].report() or "")
    assert list(loaders[0]) == []


def test_a_stream_may_be_stopped_before_its_end() -> None:
    shape = {"global_batch": 2, "microbatch": 1, "dp_rank": 0, "dp_degree": 1}
    loader = IterableLoader(stream(100), **shape, agree=lambda has_batch: [has_batch], steps=3)
    assert len(list(loader)) == 3 and loader.report() is None
