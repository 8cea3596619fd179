"""Token shards: made once, whole, and never used when something is wrong with them."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.data import build, shards
from paceline.data.config import DataSection, Source
from paceline.data.inspect import inspect
from paceline.data.lock import builder_lock
from paceline.data.prepare import cache_folder, open_prepared, prepare
from paceline.data.sources import open_source
from paceline.data.split import is_held_out
from paceline.data.tokenizer import BytesTokenizer
from paceline.errors import DataError, DiskFull
from tests.data.corpus import section, silent, write_texts


def expected_stream(folder: Path, held_out: bool, fraction: float = 0.1) -> list[int]:
    """What the shards must hold, put together with plain Python."""
    stream: list[int] = []
    for index, file in enumerate(sorted(folder.glob("*.txt"))):
        if is_held_out(index, fraction) == held_out:
            stream += [256, *file.read_bytes()]
    return stream


def test_streams_are_the_documents_each_after_a_separator(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text")
    data = prepare(section(folder, tmp_path / "cache"), progress=silent)
    for dataset, held_out in ((data.train, False), (data.evals["eval"], True)):
        stream = expected_stream(folder, held_out)
        assert dataset.streams[0].tokens().tolist() == stream
        assert len(dataset) == (len(stream) - 1) // 16
        for i in (0, 1, len(dataset) - 1):
            sample = dataset[i]
            assert sample["tokens"].tolist() == stream[i * 16 : i * 16 + 16]
            assert sample["labels"].tolist() == stream[i * 16 + 1 : i * 16 + 17]
    assert data.train.documents + data.evals["eval"].documents == 40


def test_samples_are_the_same_from_many_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_texts(tmp_path / "text")
    one = prepare(section(folder, tmp_path / "one"), progress=silent)
    monkeypatch.setattr(build, "SHARD_TEXT_BYTES", 3000)
    monkeypatch.setattr(build, "_BATCH_CHARACTERS", 1500)
    many = prepare(section(folder, tmp_path / "many"), progress=silent)
    assert len(one.manifest.shards) == 1 and len(many.manifest.shards) > 8
    everything = np.arange(len(one.train))
    for name, array in one.train.batch(everything).items():
        assert np.array_equal(array, many.train.batch(everything)[name]), name


def test_batch_gives_document_borders_only_where_there_are_some(tmp_path: Path) -> None:
    data = prepare(section(write_texts(tmp_path / "text"), tmp_path / "cache"), progress=silent)
    inside = [i for i in range(len(data.train)) if (data.train[i]["document_starts"] > 0).any()]
    plain = [i for i in range(len(data.train)) if i not in inside]
    assert set(data.train.batch(plain[:4])) == {"tokens", "labels", "sample_ids"}
    batch = data.train.batch([plain[0], inside[0], inside[1]])
    borders = [0, 16, 32, 48] + [
        row * 16 + int(p) for row, i in ((1, inside[0]), (2, inside[1])) for p in starts(data, i)
    ]
    assert batch["cumulative"].tolist() == sorted(borders) and batch["cumulative"].dtype == np.int32
    assert int(batch["max_length"]) == max(np.diff(sorted(borders)))
    flat = batch["tokens"].ravel()
    assert all(flat[b] == 256 for b in borders if b % 16)
    assert batch["sample_ids"].tolist() == [plain[0], inside[0], inside[1]]


def starts(data: Any, index: int) -> list[int]:
    return [int(p) for p in data.train[index]["document_starts"] if p > 0]


def test_a_long_file_is_one_document_with_a_gap_where_a_piece_is_held_out(tmp_path: Path) -> None:
    text = "".join(f"{i:07d}\n" for i in range(60_000))
    (tmp_path / "one.txt").write_text(text)
    held_out_none = DataSection(source=str(tmp_path / "one.txt"), eval_fraction=0, cache_dir=str(tmp_path / "cache"))
    whole = prepare(held_out_none, progress=silent)
    assert whole.train.documents == 1 and whole.evals == {}
    assert BytesTokenizer().decode(whole.train.streams[0].tokens()) == text
    split = prepare(section(tmp_path / "one.txt", tmp_path / "cache"), progress=silent)
    pieces = len(list(open_source(Source(source=str(tmp_path / "one.txt")), "data.source", None).pieces()))
    runs = [held for held, _ in itertools.groupby(is_held_out(i, 0.1) for i in range(pieces))]
    assert split.train.documents == runs.count(False) and split.evals["eval"].documents == runs.count(True) > 0
    assert split.train.token_count + split.evals["eval"].token_count == len(text) + len(runs)


def test_second_opening_builds_nothing(tmp_path: Path) -> None:
    wanted = section(write_texts(tmp_path / "text"), tmp_path / "cache")
    with pytest.raises(DataError, match="no finished token shards") as error:
        open_prepared(wanted)
    assert "paceline data prepare" in (error.value.hint or "")
    first = prepare(wanted, progress=silent)
    told: list[object] = []
    again = prepare(wanted, progress=lambda *words: told.append(words))
    assert told == [] and again.manifest == first.manifest == open_prepared(wanted).manifest


def test_changed_text_is_built_anew(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text")
    wanted = section(folder, tmp_path / "cache")
    before = prepare(wanted, progress=silent)
    (folder / "000.txt").write_text("other words than before\n" * 20)
    after = prepare(wanted, progress=silent)
    assert after.manifest.fingerprint != before.manifest.fingerprint
    assert after.train.streams[0].tokens().tolist() == expected_stream(folder, False)


def test_interrupted_build_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SHARD_TEXT_BYTES", 3000)
    monkeypatch.setattr(build, "_BATCH_CHARACTERS", 1500)
    folder = write_texts(tmp_path / "text")
    whole = prepare(section(folder, tmp_path / "whole"), progress=silent)
    wanted, write_part, written = section(folder, tmp_path / "cache"), shards.write_part, []

    def interrupted(where: Path, stem: str, tokens: Any, begins: Any) -> Any:
        written.append(stem)
        if len(written) == 9:
            raise KeyboardInterrupt
        return write_part(where, stem, tokens, begins)

    monkeypatch.setattr(shards, "write_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted, progress=silent)
    finished = {p.stem for p in cache_folder(wanted).glob("train-*.json")}
    assert len(finished) >= 3 and not (cache_folder(wanted) / shards.MANIFEST).exists()
    before = len(written)
    resumed = prepare(wanted, progress=silent)
    assert not {stem.split(".")[0] for stem in written[before:]} & finished
    assert resumed.manifest.fingerprint == whole.manifest.fingerprint


@pytest.mark.parametrize("what", ["tokens", "starts", "manifest", "gone"])
def test_truncated_files_are_refused_by_open_and_rebuilt_by_prepare(tmp_path: Path, what: str) -> None:  # BL-32
    folder = write_texts(tmp_path / "text")
    wanted = section(folder, tmp_path / "cache")
    data = prepare(wanted, progress=silent)
    victim = data.folder / (
        "manifest.json" if what == "manifest" else f"train-0-00000.0.{what.replace('gone', 'starts')}"
    )
    if what == "gone":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size // 2)
    with pytest.raises(DataError, match=r"bytes instead of|damaged|No such file") as error:
        open_prepared(wanted)
    assert victim.name in str(error.value) and "paceline data prepare" in str(error.value)
    told: list[str] = []
    again = prepare(wanted, progress=lambda text, *_: told.append(text))
    assert any("building again" in text for text in told)
    assert again.manifest == data.manifest
    assert again.train.streams[0].tokens().tolist() == expected_stream(folder, False)


def test_changed_bytes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = section(write_texts(tmp_path / "text"), tmp_path / "cache")
    data = prepare(wanted, progress=silent)
    victim = data.folder / "train-0-00000.0.tokens"
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    with pytest.raises(DataError, match="checksum"):
        open_prepared(wanted)
    monkeypatch.setattr(shards, "SMALL_FILE_BYTES", 10)
    assert inspect(wanted)["damage"] == []
    damage = inspect(wanted, verify=True)["damage"]
    assert len(damage) == 1 and victim.name in damage[0]


def test_full_disk_is_named_and_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = section(write_texts(tmp_path / "text"), tmp_path / "cache")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="no space is left") as error:
        prepare(wanted, progress=silent)
    assert error.value.exit_code == 79 and "data.cache_dir" in (error.value.hint or "")
    assert list(cache_folder(wanted).iterdir()) == []
    monkeypatch.undo()
    assert len(prepare(wanted, progress=silent).train) > 0


def test_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write") as error:
        prepare(section(write_texts(tmp_path / "text"), tmp_path / "file" / "cache"), progress=silent)
    assert error.value.key == "data.cache_dir"


def test_sequence_longer_than_the_data_is_refused_with_numbers(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text", files=20, words=20)
    tokens = len(expected_stream(folder, False))
    with pytest.raises(DataError, match=f"needs 1000001, the train set has {tokens}") as error:
        prepare(section(folder, tmp_path / "cache", sequence_length=1_000_000), progress=silent)
    assert error.value.key == "data.sequence_length" and str(tokens - 1) in (error.value.hint or "")


def test_an_eval_set_without_text_is_refused(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text", files=1)
    with pytest.raises(DataError, match="eval") as error:
        prepare(section(folder, tmp_path / "cache", eval_fraction=0.01), progress=silent)
    assert "data.eval_fraction" in str(error.value)


def test_named_eval_sets_and_weighted_sources(tmp_path: Path) -> None:
    a, b, c = (write_texts(tmp_path / name, files=10, seed=k) for k, name in enumerate("abc"))
    sources: list[str | Source] = [Source(source=str(a), weight=3), Source(source=str(b), weight=1)]
    wanted = DataSection(
        source=sources, eval={"c": str(c)}, eval_fraction=0, sequence_length=16, cache_dir=str(tmp_path / "cache")
    )
    data = prepare(wanted, progress=silent)
    assert set(data.evals) == {"c"} and data.evals["c"].documents == 10
    samples = data.train.indices_at(0, np.arange(len(data.train)))
    assert (samples < data.train.sizes[0]).mean() == pytest.approx(0.75, abs=0.01)
    natural = DataSection(source=[str(a), str(b)], eval_fraction=0, sequence_length=16, cache_dir=wanted.cache_dir)
    both = prepare(natural, progress=silent)
    assert sorted(both.train.indices_at(0, np.arange(len(both.train)))) == list(range(len(both.train)))
    assert data.folder != both.folder


def test_tokenizers_are_trained_kept_and_compared(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text")
    trained = prepare(section(folder, tmp_path / "cache", tokenizer="bpe:300"), progress=silent)
    again = prepare(section(folder, tmp_path / "other", tokenizer="bpe:300"), progress=silent)
    assert trained.manifest.fingerprint == again.manifest.fingerprint  # nodes that train their own get the same
    assert trained.tokenizer.vocabulary == 300
    first = sorted(folder.glob("*.txt"))[0].read_text()
    ids = trained.tokenizer.encode_batch([first])[0]
    assert len(ids) < len(first) / 2 and trained.tokenizer.decode(ids) == first
    file = trained.folder / shards.TOKENIZER
    named = prepare(section(folder, tmp_path / "cache", tokenizer=str(file)), progress=silent)
    assert named.train.streams[0].tokens().tolist() == trained.train.streams[0].tokens().tolist()
    with pytest.raises(DataError, match=r"only .* of the 100000 ids"):
        prepare(section(folder, tmp_path / "cache", tokenizer="bpe:100000"), progress=silent)


def test_a_tokenizer_that_did_not_make_the_shards_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text")
    trained = prepare(section(folder, tmp_path / "cache", tokenizer="bpe:300"), progress=silent)
    ready_made = DataSection(source=str(trained.folder), tokenizer="bpe:300", sequence_length=16)
    assert prepare(ready_made).manifest == trained.manifest
    for other in ("bytes", "bpe:400"):
        with pytest.raises(DataError) as error:
            prepare(DataSection(source=str(trained.folder), tokenizer=other, sequence_length=16))
        assert trained.tokenizer.fingerprint in str(error.value) and error.value.key == "data.tokenizer"
    with pytest.raises(DataError) as error:
        prepare(DataSection(source=str(trained.folder), sequence_length=16))
    assert BytesTokenizer.fingerprint in str(error.value)
    (trained.folder / shards.TOKENIZER).write_text('{"other": 1}')
    with pytest.raises(DataError, match="made by tokenizer bpe:300"):
        prepare(ready_made)


def test_wrong_tokenizer_files_are_refused(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text", files=20)
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "broken.json").write_text("{")
    for name, reason in (
        ("tokeniser.json", "no tokenizer file"),
        ("broken.json", "cannot read"),
        ("tokenizer.json", "is no"),
    ):
        with pytest.raises(DataError, match=reason) as error:
            prepare(section(folder, tmp_path / "cache", tokenizer=str(tmp_path / name)), progress=silent)
        assert error.value.key == "data.tokenizer"
    with pytest.raises(DataError) as error:
        prepare(section(folder, tmp_path / "cache", tokenizer="byte"), progress=silent)
    assert error.value.hint == "Did you mean bytes?"


PREPARE = """
import hashlib, sys, time
from paceline.data import build
from tests.data.corpus import section
from paceline.data.prepare import prepare
from pathlib import Path
slow = float(sys.argv[3])
make = build.Build._shard
def shard(*arguments):
    time.sleep(slow)
    print("built", flush=True)
    return make(*arguments)
build.Build._shard = shard
data = prepare(section(Path(sys.argv[1]), Path(sys.argv[2])))
order = data.train.indices_at(0, range(len(data.train)))
print("hash", data.manifest.fingerprint, hashlib.sha256(order.tobytes()).hexdigest())
"""


def start_nodes(folder: Path, caches: list[Path], slow: float) -> list[str]:
    """Output of one process per cache folder, started together."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PREPARE, str(folder), str(cache), str(slow)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", "."])},
        )
        for cache in caches
    ]
    outputs = [p.communicate(timeout=40) for p in processes]
    assert [p.returncode for p in processes] == [0] * len(caches), outputs
    return [out for out, _ in outputs]


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_file_system_has_one_builder_and_all_ranks_the_same_order(tmp_path: Path, nodes: int) -> None:  # BL-32
    folder = write_texts(tmp_path / "text")
    caches = [tmp_path / f"node{rank * nodes // 4}" for rank in range(4)]
    outputs = start_nodes(folder, caches, slow=0.4)
    hashes = {line for out in outputs for line in out.splitlines() if line.startswith("hash")}
    builders = [rank for rank, out in enumerate(outputs) if "built" in out]
    assert len(hashes) == 1
    assert len(builders) == nodes


def hold(path: str, ready: Any) -> None:
    with builder_lock(Path(path), silent):
        ready.set()
        time.sleep(60)


def test_a_builder_that_stands_still_is_given_up_and_one_that_dies_is_replaced(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=hold, args=(str(tmp_path / "lock"), ready))
    holder.start()
    assert ready.wait(30)
    waited: list[str] = []
    with (
        pytest.raises(DataError, match="no progress for 300 ms") as error,
        builder_lock(tmp_path / "lock", waited.append, standstill_seconds=0.3),
    ):
        pass
    assert f"process {holder.pid} on" in waited[0] and str(holder.pid) in str(error.value)
    holder.kill()
    holder.join()
    with builder_lock(tmp_path / "lock", silent, standstill_seconds=0.3):
        pass


def test_leftover_of_an_interrupted_write_is_removed(tmp_path: Path) -> None:
    wanted = section(write_texts(tmp_path / "text"), tmp_path / "cache")
    cache_folder(wanted).mkdir(parents=True)
    (cache_folder(wanted) / "train-0-00000.0.tokens.123.part").write_bytes(b"half")
    assert not list(prepare(wanted, progress=silent).folder.glob("*.part"))


def test_datasets_are_small_to_send(tmp_path: Path) -> None:
    data = prepare(section(write_texts(tmp_path / "text"), tmp_path / "cache"), progress=silent)
    data.train[0]
    pickled = pickle.dumps(data.train)
    assert len(pickled) < 4000
    assert np.array_equal(pickle.loads(pickled)[3]["tokens"], data.train[3]["tokens"])


def test_inspect_tells_what_is_there(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "text")
    wanted = section(folder, tmp_path / "cache")
    data = prepare(wanted, progress=silent)
    found = json.loads(json.dumps(inspect(wanted, verify=True, steps=100, global_batch=8)))
    assert found["sets"]["train"] == {
        "documents": 36,
        "tokens": len(expected_stream(folder, False)),
        "sequences": len(data.train),
    }
    assert found["damage"] == [] and found["tokenizer"]["vocabulary"] == 257
    assert found["epochs"] == 800 / len(data.train)
    assert found["text_bytes"] == sum(f.stat().st_size for f in folder.glob("*.txt"))
    assert found["sample"].startswith((folder / "000.txt").read_text()[:50])


def test_progress_is_plain_lines_on_stderr_without_a_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(section(write_texts(tmp_path / "text"), tmp_path / "cache"))
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("data: tokenizing") and "\x1b" not in err
