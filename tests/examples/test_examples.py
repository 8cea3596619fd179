"""Every example is parsed, planned and run small."""

from __future__ import annotations

import json

import pytest

from paceline.job.load import load_job
from tests.docs.markdown import copy_examples
from tests.pool.launch import Launcher
from tests.pool.pool import ROOT

JOBS = sorted((ROOT / "examples").glob("*.toml"))
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
SMALL = ["run.steps=2", "model.num_layers=2", "batch.global_batch=4", "data.eval_sequences=4", "data.source=text"]
"""Two steps over little text, which take seconds whatever the model."""


def test_there_is_nothing_among_the_examples_that_no_test_runs() -> None:
    left = {path.name for path in (ROOT / "examples").iterdir()} - {p.name for p in [*JOBS, *SCRIPTS]}
    assert not left - {"__pycache__", "README.md"}
    assert {"tiny.toml", "small.toml"} <= {path.name for path in JOBS}


@pytest.mark.parametrize("name", [path.name for path in JOBS])
def test_an_example_plans_as_it_stands(name: str, launch: Launcher) -> None:
    copy_examples(launch.folder)
    ended = launch(["plan", f"examples/{name}", "--fixed", "--cluster", "1x1xh100-sxm", "--json"])
    assert ended.returncode == 0, ended.stderr
    chosen = json.loads(ended.stdout)["chosen"]
    assert chosen["fits"]
    assert chosen["layout"]["dp_replicate"] == 1


@pytest.mark.limit(180)
@pytest.mark.parametrize("name", [path.name for path in JOBS])
def test_an_example_trains(name: str, launch: Launcher, environment: dict[str, str]) -> None:
    copy_examples(launch.folder)
    ended = launch(
        ["train", f"examples/{name}", *SMALL, "data.tokenizer=bytes", "--procs", "1", "--json"],
        env=environment,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["steps"] == 2
    sequence = load_job(ROOT / "examples" / name).data.sequence_length
    assert summary["tokens"] == 2 * 4 * sequence
    # An untrained model knows nothing: its loss is about that of guessing among all ids.
    assert 4.0 < summary["loss"] < 9.0
    assert (launch.folder / summary["run_dir"] / "report.html").is_file()


@pytest.mark.limit(180)
@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS])
def test_an_example_script_runs(name: str, launch: Launcher, environment: dict[str, str]) -> None:
    copy_examples(launch.folder)
    (launch.folder / f"{name}.py").write_text((ROOT / "examples" / f"{name}.py").read_text())
    ended = launch([], module=name, env=environment, timeout=150)
    assert ended.returncode == 0, ended.stderr
