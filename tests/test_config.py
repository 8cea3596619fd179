"""Layers of settings, and what a wrong one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta

from paceline.config import AUTO, Section, build, layer, parse_override, read_file
from paceline.errors import JobError
from paceline.units import Bytes, Count, Seconds


class Engine(Section):
    power: Annotated[int, Meta(ge=1)] = 5
    tank: Bytes = Bytes(1)
    pause: Seconds | None = None
    laps: Annotated[Count | None, Meta(extra=AUTO)] = None
    tuning: dict[str, float] = {}  # noqa: RUF012 (msgspec copies it)


SECTIONS: dict[str, type[Section]] = {"engine": Engine}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_later_layers_win_and_remember_where_they_came_from(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", '[engine]\npower = 2\ntank = "2GiB"\n')
    child = write(tmp_path / "child.toml", 'extends = "base.toml"\n[engine]\npower = 3\npause = "1m30s"\n')
    settings = layer(read_file(child), dict([parse_override("engine.laps=15e3")]))
    engine = build(SECTIONS, settings)["engine"]
    assert engine == Engine(power=3, tank=Bytes(2 * 2**30), pause=Seconds(90), laps=Count(15000))
    assert settings["engine.tank"].origin.endswith("base.toml")
    assert settings["engine.laps"].origin == "command line"


def test_auto_is_a_word_for_none_only_where_it_is_meant() -> None:
    assert build(SECTIONS, dict([parse_override("engine.laps=auto")]))["engine"] == Engine()
    with pytest.raises(JobError, match=r"engine\.power.*Expected `int`"):
        build(SECTIONS, dict([parse_override("engine.power=auto")]))


def test_an_entry_of_a_table_is_addressed_by_a_longer_key() -> None:
    settings = layer({}, dict([parse_override("engine.tuning={a = 1.0, b = 2.0}")]))
    settings = layer(settings, dict([parse_override("engine.tuning.b=3.0")]))
    assert build(SECTIONS, settings)["engine"] == Engine(tuning={"a": 1.0, "b": 3.0})


def test_of_exclusive_keys_the_one_given_last_stays() -> None:
    groups = (("engine.power", "engine.laps"),)
    settings = layer({}, dict([parse_override("engine.power=2")]), groups)
    settings = layer(settings, dict([parse_override("engine.laps=7")]), groups)
    assert set(settings) == {"engine.laps"}


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("engine.powr=1", "Did you mean engine.power?"),
        ("motor.power=1", "Did you mean engine.power?"),
        ("engine.power=0", ">= 1"),
        ("engine.power=fast", "Expected `int`, got `str`"),
        ("engine.tank=8XB", "8GiB or 500MB"),
        ("engine.pause=90", "write, for example, 90s"),
        ("engine.laps=1.5", "not a whole number"),
    ],
)
def test_a_wrong_value_is_told_why(override: str, text: str) -> None:
    with pytest.raises(JobError) as error:
        build(SECTIONS, dict([parse_override(override)]))
    assert text in str(error.value) and "command line" in str(error.value)


def test_all_problems_are_listed_at_once() -> None:
    settings = layer(layer({}, dict([parse_override("engine.powr=1")])), dict([parse_override("engine.tank=x")]))
    with pytest.raises(JobError) as error:
        build(SECTIONS, settings)
    assert "engine.powr" in str(error.value) and "engine.tank" in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("power = 1", "outside a table"), ("[engine", "is not TOML"), ('extends = "job.toml"', "extends itself")],
)
def test_a_broken_file_is_told_why(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(JobError) as error:
        read_file(write(tmp_path / "job.toml", text))
    assert reason in str(error.value) and error.value.exit_code == 78


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "tiny.toml", "")
    with pytest.raises(JobError, match=r"no job file at .*tinny.toml") as error:
        read_file(tmp_path / "tinny.toml")
    assert "Did you mean" in str(error.value) and "tiny.toml" in str(error.value.hint)


def test_words_that_are_no_setting_are_refused() -> None:
    with pytest.raises(JobError, match=r"section\.key=value"):
        parse_override("steps=3")
