"""`paceline drill` as a user runs it: real runs, real faults, and controls that go red."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.drill.faults import CONTROLS
from paceline.rehearsal.compare import compare_curves
from tests.cli.job import SMALL, TEXT
from tests.docs.markdown import copy_examples
from tests.pool.launch import Launcher

HARD = ["model.dropout=0.1", "data.workers=1"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def drill(launch: Launcher, *words: str, timeout: float = 300.0) -> dict[str, Any]:
    done = launch(["drill", *words, "--json"], timeout=timeout)
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["schema"] == "paceline.drill/1", done.stderr
    assert done.returncode == document["exit"]
    return document


# R2, R6: a rank killed at a random moment, and a damaged checkpoint; a drawn seed each time.
@pytest.mark.limit(200)
def test_a_kill_and_a_damaged_checkpoint_are_survived_bit_for_bit_and_a_control_is_not(
    launch: Launcher, text: Path
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    kinds = "kill,corrupted-checkpoint"
    words = [
        *SMALL,
        *HARD,
        "parallel.compile=false",
        "--procs",
        "2",
        "--kinds",
        kinds,
        "--seed",
        str(seed),
        "--controls",
    ]
    found = drill(launch, *words, timeout=190)
    assert found["verdict"] == "pass", found
    kill, corrupted = found["trials"]
    assert (kill["kind"], kill["survived"], kill["equal"], kill["exits"], kill["attempts"]) == (
        "kill",
        True,
        True,
        [0],
        2,
    )
    assert 0.0 <= kill["detect_seconds"] <= kill["recover_seconds"] and 0 <= kill["steps_redone"] <= 11
    assert kill["named_rank"] == kill["struck_rank"]
    controls = {control["without"]: control for control in found["controls"]}
    assert set(controls) == {"restarts", "checksums"} and not any(c["survived"] for c in controls.values())
    assert controls["restarts"]["exits"] == [1] and controls["checksums"]["exits"] == [0]
    assert not controls["checksums"]["equal"]  # loaded without a word, and another model
    assert corrupted["survived"] and corrupted["equal"] and corrupted["steps_redone"] >= 6
    assert found["expected"]["measured_recovery"]["recovery_seconds"] == pytest.approx(
        max(kill["recover_seconds"], corrupted["recover_seconds"])
    )
    folder = text / "runs/default-drill"
    assert json.loads((folder / "drill.json").read_text())["trials"] == found["trials"]
    assert not (text / "runs/default").exists()  # never in the run's own directory
    assert compare_curves(folder / "undisturbed", folder / "kill", 24).exact


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--kinds", "kil"], 2, "kill-in-save"),
        (["--cluster", "nonsense"], 2, "nonsense"),
        (["--procs", "3"], 78, "batch.global_batch"),
        (["optimizer.lrr=1"], 78, "optimizer.lr"),
    ],
)
def test_what_cannot_be_drilled_is_told_before_anything_runs(
    launch: Launcher, text: Path, words: list[str], code: int, told: str
) -> None:
    done = launch(["drill", *SMALL, *words, "--json"])
    assert done.returncode == code and told in done.stderr and "Traceback" not in done.stderr
    assert json.loads(done.stdout)["exit"] == code
    assert not (text / "runs").exists()


@pytest.mark.soak
@pytest.mark.limit(1800)
def test_the_tiny_job_survives_everything_and_no_control(launch: Launcher) -> None:
    """All faults within ten minutes; each protection off once."""
    copy_examples(launch.folder)
    found = drill(launch, "examples/tiny.toml", "--procs", "2", timeout=620)
    assert found["verdict"] == "pass", found["lost"]
    assert found["seconds"] < 600
    named, of = found["blamed"]
    assert named >= 0.9 * of
    found = drill(launch, "examples/tiny.toml", "--procs", "2", "--controls", timeout=1100)
    assert {trial["without"] for trial in found["controls"] if not trial["survived"]} == {c.without for c in CONTROLS}
