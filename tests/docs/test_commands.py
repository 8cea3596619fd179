"""What the documents tell a reader to type works, and says what the documents show."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from paceline import cli
from paceline.job.load import load_job, split_words
from tests.docs.markdown import blocks, commands, copy_examples, documents, make_recipe, name_of
from tests.pool.launch import Completed, Launcher
from tests.pool.pool import ROOT

README = ROOT / "README.md"
QUICK_START = ROOT / "docs/guide/quick-start.md"
SHORT = ["run.steps=5", "run.log_every=2", "data.eval_sequences=8", "data.source=text"]
"""Added to every training command: what is proven is that it runs, not what it learns. The text is a small one."""

COMMAND_BLOCKS = [(path, block) for path in documents() for block in blocks(path, "sh")]
MODULES = {
    (name, *sub): importlib.import_module(module)
    for name in cli.COMMANDS
    for command in [importlib.import_module(f"paceline.cli.{name}")]
    for sub, module in [
        ((), f"paceline.cli.{name}"),
        *(((word,), module) for word, (module, _) in getattr(command, "SUBCOMMANDS", {}).items()),
    ]
}
"""Each command, and each measurement of one that has several, by its words."""

HELP_EXAMPLES = [(words, line.strip()) for words, module in MODULES.items() for line in module.EXAMPLE.splitlines()[1:]]


@pytest.mark.limit(400)
def test_every_command_of_the_readme_that_is_marked_run_runs(launch: Launcher, environment: dict[str, str]) -> None:
    copy_examples(launch.folder)
    shown = "".join(block.text for block in blocks(README, "text"))
    marked = [block for block in blocks(README, "sh") if "run" in block.words]
    assert marked
    for block in marked:
        for words in commands(block):
            ended = _run_short(words, launch, environment)
            if ended is None:
                continue
            failed = ended.returncode != 0
            assert failed == ("fails" in block.words), f"{shlex.join(words)}\n{ended.stdout}{ended.stderr}"
            if failed:
                _shows(shown, ended)


def _run_short(words: list[str], launch: Launcher, env: dict[str, str]) -> Completed | None:
    if words[0] == "make":
        words = make_recipe(words[1])
    if words[0] != "paceline":
        assert words[:3] == ["python", "-m", "pytest"], f"neither paceline nor the tests: {words}"
        return None
    short = {"train": SHORT, "generate": ["--tokens", "8"]}.get(words[1], [])
    return launch([*words[1:], *short], env=env, timeout=150)


def _shows(shown: str, ended: Completed) -> None:
    """The README quotes the message, as far as it quotes it."""
    printed = ended.stdout + ended.stderr
    quoted = [line.removesuffix("...").strip() for line in shown.splitlines() if line.strip()]
    said = [line.strip() for line in printed.splitlines() if "does not fit" in line or line.startswith("paceline: ")]
    assert said, printed
    for line in said:
        head = line.split(":")[0]
        about = [q for q in quoted if q.startswith(head)]
        if head == "does not fit":
            # Memory figures grow with the model's arithmetic: the parts are quoted, their order is what they say.
            assert (
                about and re.findall(r"[a-z]+ \d", about[0]) == re.findall(r"[a-z]+ \d", line)[: len(_parts(about[0]))]
            )
        assert about, f"README does not show: {line}"
        assert line.startswith(about[0]), f"README shows {about[0]!r}, the command says {line!r}"


def _parts(text: str) -> list[str]:
    return re.findall(r"[a-z]+ \d", text)


@pytest.mark.limit(180)
def test_the_script_of_the_quick_start_trains(launch: Launcher) -> None:
    scripts = [block.text for block in blocks(QUICK_START, "python")]
    assert len(scripts) == 1
    (launch.folder / "squares.py").write_text(scripts[0])
    ended = launch([], module="squares", timeout=150)
    assert ended.returncode == 0, ended.stderr
    assert "'steps': 30" in ended.stdout
    assert (launch.folder / "runs/squares/records").is_dir()


@pytest.mark.parametrize(("path", "block"), COMMAND_BLOCKS, ids=[name_of(p) for p, _ in COMMAND_BLOCKS])
def test_every_command_in_a_document_is_understood(
    path: Path, block: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in commands(block):  # type: ignore[arg-type]
        if words[0] == "make":
            make_recipe(words[1])
        if "paceline" in words:
            _understood(words[words.index("paceline") + 1 :], monkeypatch, capsys)


@pytest.mark.parametrize(("name", "line"), HELP_EXAMPLES, ids=[line for _, line in HELP_EXAMPLES])
def test_every_example_in_a_help_text_is_understood(
    name: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)
    words = words[words.index("paceline") + 1 :]
    assert tuple(words[: len(name)]) == name
    _understood(words, monkeypatch, capsys)


@pytest.mark.parametrize("name", MODULES, ids=" ".join)
def test_the_help_of_each_command_has_an_example_of_it(
    name: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*name, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert f"paceline {' '.join(name)}" in printed.partition("example:")[2]


def test_the_quick_start_and_the_overview_name_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"])
    overview = capsys.readouterr().out
    written = "".join(path.read_text() for path in documents())
    for name in cli.COMMANDS:
        assert f"\n  {name} " in overview
        assert f"paceline {name}" in written, f"no document shows paceline {name}"


def _understood(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command parses with its real parser, and its keys and their values are those of the job."""
    if words[0].startswith("-"):
        return
    module = MODULES.get(tuple(words[:2])) or MODULES[(words[0],)]
    seen: list[object] = []
    monkeypatch.setattr(module, "run", lambda args: seen.append(args) or 0)
    assert cli.main(words) == 0, capsys.readouterr().err
    asked = getattr(seen[0], "words", [])
    path, overrides = split_words([word for word in asked if word != "JOB.toml"])
    load_job(ROOT / path if path else None, overrides)
