"""TOML to frozen, typed sections. Knows how settings are layered and checked; knows no section.

A setting is addressed by a dotted key, `section.key`. It comes from a default, a file (which may extend another one), or
the command line, later over earlier, and remembers where it came from.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from paceline.errors import JobError
from paceline.units import Bytes, Count, Procs, Seconds, parse_bytes, parse_count, parse_procs, parse_seconds

AUTO = {"auto": True}
"""`Meta(extra=AUTO)` on a field of type `T | None`: the word "auto" in a job file means None, to be derived."""

COMMAND_LINE = "command line"
DEFAULT = "default"


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the job file. Contradictions inside one section raise ValueError in `__post_init__`."""


class Setting(NamedTuple):
    """A value and where it came from: a file name or `command line`."""

    value: Any
    origin: str


Settings = dict[str, Setting]
Exclusive = Sequence[tuple[str, ...]]
"""Groups of keys of which the one given last replaces the others."""

S = TypeVar("S", bound=Section)


def read_file(path: Path, exclusive: Exclusive = ()) -> Settings:
    """Settings of a job file, those of the file that it `extends` below its own.

    Raises:
        JobError: the file is missing, unreadable, no TOML, not made of tables, or extends itself.
    """
    return _read(path, (), exclusive)


def parse_override(text: str) -> tuple[str, Setting]:
    """`section.key=value` with the value in TOML syntax; a bare word is a string.

    Raises:
        JobError: there is no `=`, or no dot before it.
    """
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or "." not in key:
        raise JobError(
            f"{text!r} is neither a job file nor section.key=value", hint="Write, for example, run.steps=100."
        )
    return key, Setting(_toml_value(raw.strip()), COMMAND_LINE)


def layer(base: Settings, over: Mapping[str, Setting], exclusive: Exclusive = ()) -> Settings:
    """`over` on top of `base`. A key with more than two parts replaces one entry of a table.

    Of each group of `exclusive` keys, one that `over` sets removes the others from `base`.
    """
    gone = {key for group in exclusive if any(k in over for k in group) for key in group}
    merged = {key: setting for key, setting in base.items() if key not in gone}
    for key, setting in over.items():
        section, name, *inner = key.split(".")
        owner = f"{section}.{name}"
        if inner:
            held = merged.get(owner)
            table = held.value if held is not None and isinstance(held.value, dict) else {}
            merged[owner] = Setting(_with_entry(table, inner, setting.value), setting.origin)
        else:
            merged[owner] = setting
    return merged


def build(sections: Mapping[str, type[Section]], settings: Settings) -> dict[str, Section]:
    """Typed sections of the settings, defaults where nothing is set.

    Raises:
        JobError: unknown keys (each with the nearest valid one) and values of a wrong type, all of them at once.
    """
    valid = {f"{name}.{field}" for name, cls in sections.items() for field in cls.__struct_fields__}
    problems = [_unknown(key, setting, valid) for key, setting in settings.items() if key not in valid]
    values: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for key, setting in settings.items():
        if key not in valid:
            continue
        section, name = key.split(".")
        try:
            values[section][name] = _convert(setting.value, _field_types(sections[section])[name])
        except (msgspec.ValidationError, ValueError) as error:
            problems.append(_problem(key, setting, str(error)))
    if problems:
        raise _one_error(problems)
    return {name: _construct(name, cls, values[name], settings) for name, cls in sections.items()}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name closest to a misspelt one, or None."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def _construct(name: str, cls: type[S], values: dict[str, Any], settings: Settings) -> S:
    try:
        return cls(**values)
    except ValueError as error:
        origins = {settings[f"{name}.{key}"].origin for key in values}
        raise JobError(
            f"{error} (from {', '.join(sorted(origins)) or DEFAULT})", key=f"[{name}]", values=values
        ) from None


@functools.cache
def _field_types(section: type[Section]) -> dict[str, Any]:
    # Of the sections that are set, and once: evaluating annotations is most of what a short command does.
    return {field.name: field.type for field in msgspec.structs.fields(section)}


def _convert(value: Any, annotation: Any) -> Any:
    if value == "auto" and _extra(annotation).get("auto"):
        return None
    return msgspec.convert(value, annotation, dec_hook=_decode)


def _extra(annotation: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for meta in getattr(annotation, "__metadata__", ()):
        merged.update(getattr(meta, "extra", None) or {})
    return merged


def _decode(kind: type, value: Any) -> Any:
    if kind is Bytes:
        return parse_bytes(value) if isinstance(value, str) else Bytes(parse_count(value))
    if kind is Seconds:
        if isinstance(value, str):
            return parse_seconds(value)
        raise ValueError(f"{value!r} has no unit; write, for example, {value}s")
    if kind is Count:
        return parse_count(value)
    if kind is Procs:
        return parse_procs(value)
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


def _read(path: Path, seen: tuple[Path, ...], exclusive: Exclusive) -> Settings:
    path = path.resolve() if path.exists() else path
    if path in seen:
        chain = " -> ".join(p.name for p in (*seen, path))
        raise JobError(f"the job file extends itself: {chain}", key="extends", values={"path": str(path)})
    document = _parse_toml(path)
    parent = document.pop("extends", None)
    base: Settings = {}
    if parent is not None:
        if not isinstance(parent, str):
            raise JobError(f"{path}: extends = {parent!r} is not a path", key="extends")
        base = _read(path.parent / parent, (*seen, path), exclusive)
    own: dict[str, Setting] = {}
    for section, table in document.items():
        if not isinstance(table, dict):
            raise JobError(
                f"{path}: {section} = {table!r} stands outside a table",
                key=section,
                hint=f"Put it under its section, for example [run] {section} = {table!r}.",
            )
        own |= {f"{section}.{key}": Setting(value, _shown(path)) for key, value in table.items()}
    return layer(base, own, exclusive)


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = nearest(path.name, (p.name for p in path.parent.glob("*.toml"))) if path.parent.is_dir() else None
        hint = (
            f"Did you mean {path.parent / near}?"
            if near
            else "Give the path of a job file, such as examples/tiny.toml."
        )
        raise JobError(f"no job file at {path}", values={"path": str(path)}, hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"cannot read the job file {path}: {error}", values={"path": str(path)}) from None
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{path} is not TOML: {error}", values={"path": str(path)}) from None


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _toml_value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def _with_entry(table: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    head, *rest = path
    inner = table.get(head)
    below = inner if isinstance(inner, dict) else {}
    return {**table, head: _with_entry(below, rest, value) if rest else value}


def _unknown(key: str, setting: Setting, valid: set[str]) -> dict[str, Any]:
    section, _, name = key.partition(".")
    same_name = [k for k in valid if k.endswith(f".{name}")]
    in_section = nearest(name, [k.split(".")[1] for k in valid if k.startswith(f"{section}.")])
    near = f"{section}.{in_section}" if in_section else (same_name[0] if same_name else nearest(key, valid))
    problem = _problem(key, setting, "unknown key")
    problem["hint"] = f"Did you mean {near}?" if near else "The keys are listed in docs/guide/job.md."
    return problem


def _problem(key: str, setting: Setting, reason: str) -> dict[str, Any]:
    return {"key": key, "value": setting.value, "origin": setting.origin, "reason": reason, "hint": None}


def _one_error(problems: list[dict[str, Any]]) -> JobError:
    first, *others = problems
    lines = [
        f"{p['key']} = {p['value']!r} (from {p['origin']}): {p['reason']}. {p['hint'] or ''}".rstrip() for p in others
    ]
    message = f"{first['value']!r} (from {first['origin']}): {first['reason']}"
    return JobError(
        "\n  also ".join([message, *lines]), key=first["key"], values={"problems": problems}, hint=first["hint"]
    )
