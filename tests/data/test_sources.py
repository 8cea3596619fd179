"""What each kind of source gives, and what is said where it gives nothing."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from paceline import config as configuration
from paceline.data.config import DataSection, Source
from paceline.data.prepare import prepare
from paceline.data.sources import OpenSource, open_source
from paceline.data.split import is_held_out
from paceline.errors import DataError, JobError


def texts(name: str | Path, text_key: str | None = None) -> list[str]:
    return [p.text for p in open_source(Source(source=str(name)), "data.source", text_key).pieces()]


def test_standard_library_is_python_source_in_a_fixed_order() -> None:
    opened = open_source(Source(source="stdlib"), "data.source", None)
    names = [f.name for f in opened.files]
    assert "argparse.py" in names and not any("test" in f.parts for f in opened.files)
    assert opened.files == open_source(Source(source="stdlib"), "data.source", None).files
    first = next(opened.pieces())
    assert first.text and not first.continues


def test_text_file_comes_back_whole_in_pieces_cut_at_line_ends(tmp_path: Path) -> None:
    text = "".join(f"line {i} é\r\n" for i in range(20_000))
    (tmp_path / "long.txt").write_bytes(text.encode())
    pieces = list(open_source(Source(source=str(tmp_path / "long.txt")), "data.source", None).pieces())
    assert "".join(p.text for p in pieces) == text
    assert len(pieces) > 3 and all(p.text.endswith("\n") for p in pieces)
    assert [p.continues for p in pieces] == [False, *[True] * (len(pieces) - 1)]


def test_folder_and_glob_are_read_in_sorted_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden"):
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a.txt", "b.txt"]
    assert texts(tmp_path / "*.txt") == ["a.txt", "b.txt"]


def test_jsonl_and_parquet_give_the_field_that_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"body": "one", "id": 1}, {"body": "", "id": 2}, {"body": "two", "id": 3}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    assert texts(tmp_path / "d.jsonl", "body") == texts(tmp_path / "d.parquet", "body") == ["one", "two"]
    for name in ("d.jsonl", "d.parquet"):
        with pytest.raises(DataError, match=r"no field 'bodi'.*body, id") as error:
            texts(tmp_path / name, "bodi")
        assert error.value.hint == "Set data.text_key = body." and error.value.exit_code == 78


def test_missing_extras_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "d.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pyarrow package") as error:
        texts(tmp_path / "d.parquet")
    assert error.value.hint == "pip install 'paceline[parquet]'"
    with pytest.raises(DataError, match="datasets package") as error:
        texts("hf:wikitext")
    assert error.value.hint == "pip install 'paceline[datasets]'"


def test_hugging_face_rows_are_read_by_name_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((name, config, split))
        if name == "gone":
            raise RuntimeError("no such data set")
        return [{"text": "one"}, {"text": "two"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert texts("hf:some/text") == texts("hf:some/text@small#test") == ["one", "two"]
    assert asked == [("some/text", None, "train"), ("some/text", "small", "test")]
    with pytest.raises(DataError, match=r"cannot load hf:gone: no such data set"):
        texts("hf:gone")


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("text")
    with pytest.raises(DataError, match="no file or folder") as error:
        texts(tmp_path / "corpis.txt")
    assert f"Did you mean {tmp_path / 'corpus.txt'}?" == error.value.hint
    with pytest.raises(DataError, match="matches no file"):
        texts(tmp_path / "*.md")
    with pytest.raises(DataError, match="no file or folder") as error:
        texts(tmp_path / "nowhere" / "a.txt")
    assert "no folder" in (error.value.hint or "")
    with pytest.raises(DataError) as error:
        texts("stdlb")
    assert error.value.hint == "Did you mean stdlib?"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("latin.txt", "café".encode("latin-1"), "not UTF-8"),
        ("image.txt", b"\x00\x01abc", "NUL bytes"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "line 2 is not JSON"),
        ("number.jsonl", b'{"text": 5}\n', "holds int, not text"),
        ("list.jsonl", b"[1]\n", "list instead of an object"),
        ("false.parquet", b"PAR0", "not Parquet"),
    ],
)
def test_unreadable_files_are_named_with_the_reason(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason) as error:
        texts(tmp_path / name)
    assert name in str(error.value)


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    section = DataSection(source=str(tmp_path / "empty.txt"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match="holds no text"):
        prepare(section, progress=lambda *_: None)


def test_text_key_without_fields_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="has no effect") as error:
        prepare(DataSection(source=str(tmp_path / "a.txt"), text_key="body", cache_dir=str(tmp_path / "cache")))
    assert error.value.key == "data.text_key"
    with pytest.raises(DataError, match="has no effect"):
        open_source(Source(source=str(tmp_path / "a.txt"), text_key="body"), "data.source", None)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"source": []}, "names no source"),
        ({"source": [{"source": "a", "weight": 1}, "b"]}, "'b' has no weight"),
        ({"source": [{"source": "a", "weight": 1}]}, "single source has no effect"),
        ({"eval": {"eval": "x"}}, "eval_fraction"),
        ({"eval": {"x": [{"source": "a", "weight": 1}, {"source": "b", "weight": 1}]}}, "weight has no effect"),
        ({"eval_sequences": 0}, "evaluates nothing"),
        ({"tokenizer": "bpe:many"}, "bpe:<vocabulary>"),
    ],
)
def test_contradictions_are_refused(settings: dict[str, object], reason: str) -> None:
    given = {f"data.{k}": configuration.Setting(v, "job.toml") for k, v in settings.items()}
    with pytest.raises(JobError, match=reason):
        configuration.build({"data": DataSection}, given)


def test_auto_and_tables_are_understood() -> None:
    given = {"data.cache_dir": configuration.Setting("auto", "job.toml")}
    given["data.source"] = configuration.Setting(["stdlib", {"source": "x/*.py", "text_key": "t"}], "job.toml")
    section = configuration.build({"data": DataSection}, given)["data"]
    assert isinstance(section, DataSection)
    assert section.cache_dir is None and section.source == ["stdlib", Source(source="x/*.py", text_key="t")]


@pytest.mark.parametrize("fraction", [0.5, 0.3, 0.1, 0.03, 1 / 7])
def test_held_out_share_is_exact_and_stable(fraction: float) -> None:
    held = [is_held_out(i, fraction) for i in range(2000)]
    assert abs(sum(held) - 2000 * fraction) <= 1
    assert any(held[: int(1 / fraction) // 2 + 1]) and not all(held[:3])
    assert not any(is_held_out(i, 0.0) for i in range(100))


def test_known_files_have_a_size() -> None:
    opened = open_source(Source(source="stdlib"), "data.source", None)
    assert (opened.size_bytes or 0) > 1_000_000
    assert OpenSource("hf:x", "data.source", (), "text").size_bytes is None
