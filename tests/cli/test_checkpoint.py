"""`paceline checkpoint`: what it prints, in text and as JSON, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoint import storage
from paceline.checkpoint.folders import quarantine
from paceline.checkpoint.storage import open_storage
from paceline.cli import checkpoint, main
from paceline.job.load import load_job
from paceline.model.spec import parameters, resolve
from tests.checkpoint.written import by_rows, numbers, odd_tensors, write_split
from tests.cli.job import SMALL, TEXT
from tests.pool.launch import Launcher

TENSORS = {"model/w": numbers((6, 4)), "optimizer/exp_avg/w": numbers((6, 4))}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with steps 100 and 120, a save that did not finish, and one in quarantine; the working folder."""
    monkeypatch.chdir(tmp_path)
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    write_split(checkpoints, TENSORS, by_rows, 2, step=100, state={"eval_loss": 1.25})
    write_split(checkpoints, TENSORS, by_rows, 3, step=120)
    write_split(checkpoints, TENSORS, by_rows, 3, step=110)
    quarantine(open_storage(checkpoints), 110, "a bit was flipped")
    (checkpoints / "step-00000130").mkdir()
    return tmp_path / "runs" / "tiny"


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["checkpoint", *words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code, out, _ = call(capsys, *words, "--json")
    found: dict[str, Any] = json.loads(out)
    assert found["schema"] == "paceline.checkpoint/1" and found["exit"] == code
    return found


def flip(path: Path, offset: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_list_shows_every_folder(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "list", "runs/tiny")
    lines = [line.split() for line in out.splitlines()]
    assert code == 0 and lines[0][:2] == ["step", "size"]
    assert [line[0] for line in lines[1:]] == ["100", "120", "130", "110"]
    assert "1.2500" in lines[1] and lines[1][-1] == lines[2][-1] == "whole"
    assert "unfinished: it has no COMMIT" in out and "quarantined: a bit was flipped" in out
    found = document(capsys, "list", "runs/tiny")
    assert found["action"] == "list" and len(found["checkpoints"]) == 4
    first = found["checkpoints"][0]
    assert (first["step"], first["state"], first["world_size"], first["samples"]) == (100, "whole", 2, 800)
    assert first["eval_loss"] == 1.25 and first["size_bytes"] > 0 and first["time"] == 1e9


def test_list_says_what_looks_damaged(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "checkpoints/step-00000120/rank-00001.safetensors").unlink()
    flip(run_dir / "checkpoints/step-00000100/manifest.json", 300)
    found = document(capsys, "list", "runs/tiny/checkpoints")["checkpoints"]
    assert [item["state"] for item in found] == ["damaged", "damaged", "unfinished", "quarantined"]
    assert "manifest.json" in found[0]["problem"] and "rank-00001.safetensors" in found[1]["problem"]


def test_a_step_is_listed_and_verified_where_it_was_copied(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "checkpoints/step-00000120").rename(run_dir.parent.parent / "copy")
    assert [item["step"] for item in document(capsys, "list", "copy")["checkpoints"]] == [120]
    assert document(capsys, "verify", "copy")["checkpoints"][0]["findings"] == []
    flip(Path("copy/rank-00002.safetensors"))
    assert call(capsys, "verify", "copy")[0] == 1


def test_verify_reads_every_byte_and_names_the_piece(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "verify", "runs/tiny")
    assert code == 0 and out.count("is as it was written") == 2 and "step-00000130: no checkpoint" in out
    flip(run_dir / "checkpoints/step-00000120/rank-00001.safetensors")
    code, out, err = call(capsys, "verify", "runs/tiny")
    assert code == 1 and "step-00000120: DAMAGED" in out and "Traceback" not in err
    found = document(capsys, "verify", "runs/tiny/checkpoints/step-00000120")
    (finding,) = found["checkpoints"][0]["findings"]
    assert found["exit"] == 1 and finding["file"] == "rank-00001.safetensors"
    assert finding["tensor"] == "optimizer/exp_avg/w" and finding["offset"] == [2, 0]
    assert len(finding["expected"]) == len(finding["actual"]) == 32 and finding["expected"] != finding["actual"]
    assert all(finding[key] in finding["text"] for key in ("file", "tensor", "expected", "actual"))
    assert call(capsys, "verify", "runs/tiny/checkpoints/step-00000100")[0] == 0


@pytest.mark.parametrize("action", ["list", "verify", "convert", "export"])
def test_no_checkpoint_is_77(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = ["--to", str(tmp_path / "to")] if action in ("convert", "export") else []
    code, _, err = call(capsys, action, str(tmp_path), *to)
    assert code == 77 and "holds no checkpoint" in err and "Traceback" not in err
    found = document(capsys, action, str(tmp_path / "none"), *to)
    assert found["exit"] == 77 and "there is no folder" in found["error"]["message"]
    assert "run directory" in found["error"]["next"]


def test_a_newer_format_is_77_and_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = run_dir / "checkpoints/step-00000120/COMMIT"
    mark.write_text(mark.read_text().replace("paceline.checkpoint/1", "paceline.checkpoint/2"))
    for action in (["verify"], ["convert", "--to", "out"], ["export", "--to", "out"]):
        code, _, err = call(capsys, action[0], "runs/tiny/checkpoints/step-00000120", *action[1:])
        assert code == 77 and "paceline.checkpoint/2" in err and "reads paceline.checkpoint/1" in err, err
    states = [item["state"] for item in document(capsys, "list", "runs/tiny")["checkpoints"]]
    assert states == ["whole", "damaged", "unfinished", "quarantined"]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["list", "x", "--files", "3"], ["--files has no effect on list", "convert"]),
        (["verify", "x", "--to", "y"], ["--to has no effect on verify"]),
        (["export", "x", "--to", "y", "--weights-only"], ["--weights-only has no effect on export"]),
        (["import", "x", "--to", "y", "--dtype", "bf16"], ["--dtype has no effect on import"]),
        (["convert", "x"], ["convert writes something new and needs --to"]),
        (["convert", "x", "--to", "y", "--files", "0"], ["--files 0 writes nothing"]),
        (["convert", "x", "--to", "y", "--dtype", "bf16"], ["--dtype bf16", "optimizer state", "--weights-only"]),
        (["convert", "x", "--to", "y", "--weights-only", "--dtype", "int8"], ["int8", "bf16"]),
        (["repair", "x"], ["repair", "verify"]),
        (["list"], ["PATH"]),
    ],
)
def test_wrong_usage_is_2(words: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, *words)
    assert code == 2 and all(text in err for text in texts), err


def test_convert_export_and_import_write_what_they_say(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = document(capsys, "convert", "runs/tiny", "--to", "packed", "--files", "2")["written"]
    assert (written["path"], written["step"], written["tensors"], written["files"]) == (
        "packed/step-00000120",
        120,
        2,
        2,
    )
    assert call(capsys, "verify", "packed")[0] == 0
    code, out, _ = call(capsys, "export", "runs/tiny", "--to", "w.safetensors")
    assert code == 0 and "w.safetensors: 1 tensor, " in out
    assert torch.equal(load_file("w.safetensors")["w"], TENSORS["model/w"])
    assert document(capsys, "import", "w.safetensors", "--to", "start")["written"]["path"] == "start/step-00000000"
    assert [item["step"] for item in document(capsys, "list", "start")["checkpoints"]] == [0]
    code, _, err = call(capsys, "convert", "runs/tiny", "--to", "packed")
    assert code == 78 and "never overwritten" in err


@pytest.mark.parametrize("action", ["convert", "export"])
def test_a_full_disk_is_79_and_leaves_nothing(
    run_dir: Path, action: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(operation: str, path: str) -> None:
        if operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    monkeypatch.setattr(storage, "on_operation", full)
    code, _, err = call(capsys, action, "runs/tiny", "--to", "new/place")
    assert code == 79 and "--to: no space to write new/" in err and "name another place" in err, err
    assert not [path for path in Path("new").rglob("*") if path.is_file() or path.name.startswith("step")]


def test_long_work_shows_lines_on_stderr(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "QUIET_SECONDS", -1.0)
    code, out, err = call(capsys, "verify", "runs/tiny", "--json")
    assert code == 0 and "checkpoint: verifying" in err and json.loads(out)["exit"] == 0
    assert "checkpoint: converting" in call(capsys, "convert", "runs/tiny", "--to", "packed")[2]
    monkeypatch.setattr(checkpoint, "QUIET_SECONDS", 1e9)
    assert call(capsys, "verify", "runs/tiny")[2] == ""


def test_a_url_is_a_place_too(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"memory://{run_dir.parent.parent.name}"
    written = document(capsys, "convert", "runs/tiny", "--to", place)["written"]
    assert written["path"] == f"{place}/step-00000120"
    assert call(capsys, "verify", place)[0] == call(capsys, "verify", written["path"])[0] == 0
    assert [item["state"] for item in document(capsys, "list", place)["checkpoints"]] == ["whole"]
    assert call(capsys, "export", place, "--to", f"{place}-weights/w.safetensors")[0] == 0
    assert call(capsys, "export", f"{place}/step-00000120", "--to", "w.safetensors")[0] == 0
    assert torch.equal(load_file("w.safetensors")["w"], TENSORS["model/w"])
    code, _, err = call(capsys, "verify", f"{place}-none")
    assert code == 77 and "holds no checkpoint" in err


@pytest.mark.parametrize("action", ["list", "verify"])
def test_looking_needs_no_torch(run_dir: Path, action: str) -> None:
    program = (
        "import sys\nfrom paceline.cli import main\n"
        f"assert main(['checkpoint', {action!r}, 'runs/tiny']) == 0\n"
        "print('heavy:', sorted({'torch', 'numpy', 'rich', 'fsspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "heavy: []" in done.stdout, done.stdout + done.stderr


def test_the_command_from_outside(launch: Launcher, tmp_path: Path) -> None:
    write_split(tmp_path / "c", odd_tensors(), by_rows, 2)
    flip(tmp_path / "c/step-00000100/rank-00000.safetensors", 20)
    done = launch(["checkpoint", "verify", "c"])
    assert done.returncode == 1 and "the header" in done.stdout and "Traceback" not in done.stderr
    assert "Commands" not in done.stderr and launch(["checkpoint", "--help"]).stdout.count("paceline checkpoint ") >= 6


def test_a_run_starts_from_imported_weights(
    launch: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    spec = resolve(load_job(None, SMALL).model)
    weights = {p.name: numbers(p.shape, seed=index) for index, p in enumerate(parameters(spec))}
    save_file(weights, "in.safetensors")
    assert call(capsys, "import", "in.safetensors", "--to", "start")[0] == 0
    # So small a step leaves every weight what it is.
    words = [
        *SMALL,
        "run.name=a",
        "run.steps=1",
        "checkpoint.resume=start",
        "optimizer.lr=1e-30",
        "optimizer.warmup_steps=0",
    ]
    done = launch(["train", *words, "--procs", "1"], timeout=90)
    assert done.returncode == 0, done.stderr[-2000:]
    assert call(capsys, "export", "runs/a", "--to", "out.safetensors")[0] == 0
    found = load_file("out.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
