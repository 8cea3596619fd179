"""The job reference and the JSON schema for editors, from the sections themselves: `python -m paceline.job.reference DIR`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from paceline.config import Section
from paceline.job.load import SECTIONS
from paceline.units import Bytes, Count, Procs, Seconds, format_bytes

REFERENCE_FILE = "job.md"
SCHEMA_FILE = "job.schema.json"

_UNIT_SCHEMAS: dict[type, dict[str, Any]] = {
    Bytes: {"type": ["string", "integer"], "description": "a size such as 8GiB"},
    Seconds: {"type": "string", "description": "a duration such as 90s or 10m"},
    Procs: {"type": ["integer", "string"], "description": "a number of processes such as 4, or a range such as 2:4"},
    Count: {"type": ["integer", "number", "string"], "description": "a whole number such as 700 or 15e12"},
}


def reference() -> str:
    """The Markdown page that lists every key with its type, default and meaning."""
    lines = [
        "# The job file",
        "",
        "Generated from the sections by `make docs`; a test holds the two together. A job file is TOML. `extends =",
        '"base.toml"` puts a file below another one; `section.key=value` on the command line goes on top. Sizes and times',
        'are written with units (`"8GiB"`, `"90s"`), whole counts also as `15e12`. An unknown key is an error that names the',
        "nearest one. `run.steps`, `run.tokens` and `run.epochs` replace each other, the one given last stays.",
    ]
    for name, section in SECTIONS.items():
        lines += [
            "",
            f"## [{name}]",
            "",
            _first_line(section),
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
        ]
        lines += [_row(field) for field in msgspec.structs.fields(section)]
    return "\n".join(lines) + "\n"


def schema() -> dict[str, Any]:
    """A JSON schema of the job file, as editors read it."""
    definitions: dict[str, Any] = {}
    tables = {name: _table_schema(section, definitions) for name, section in SECTIONS.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "paceline job",
        "type": "object",
        "additionalProperties": False,
        "properties": {"extends": {"type": "string"}, **tables},
        "$defs": definitions,
    }


def write(folder: Path) -> None:
    """Write both files into `folder`."""
    (folder / REFERENCE_FILE).write_text(reference(), encoding="utf-8")
    (folder / SCHEMA_FILE).write_text(json.dumps(schema(), indent=1) + "\n", encoding="utf-8")


def _table_schema(section: type[Section], definitions: dict[str, Any]) -> dict[str, Any]:
    # Field by field: msgspec cannot write a default of a type with units.
    fields = {}
    for field in msgspec.structs.fields(section):
        found = msgspec.json.schema(field.type, schema_hook=lambda kind: _UNIT_SCHEMAS[kind])
        definitions.update(found.pop("$defs", {}))
        fields[field.encode_name] = _without_null(found)
    return {"type": "object", "description": _first_line(section), "additionalProperties": False, "properties": fields}


def _without_null(found: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: where it means "to be derived" the file says auto, elsewhere the key is left out."""
    options = found.get("anyOf", [])
    if {"type": "null"} in options:
        found["anyOf"] = [o for o in options if o != {"type": "null"}] + [{"const": "auto"}]
    return found


def _row(field: msgspec.structs.FieldInfo) -> str:
    description = " ".join(str(_meta(field.type, "description") or "").split()).replace("|", "\\|")
    return f"| `{field.encode_name}` | {_type(field.type)} | {_default(field)} | {description} |"


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else None
    if value is None:
        return "auto" if (_meta(field.type, "extra") or {}).get("auto") else "-"
    if isinstance(value, Bytes):
        return f"`{format_bytes(value)}`"
    if isinstance(value, Seconds):
        return f'`"{value:g}s"`'
    if isinstance(value, Count):
        return f"`{int(value)}`"
    return f"`{json.dumps(msgspec.to_builtins(value))}`"


def _type(annotation: Any) -> str:
    """The type as a reader of the file sees it."""
    info = msgspec.inspect.type_info(annotation)
    return " or ".join(dict.fromkeys(_type_names(info))).replace("|", "\\|")


def _type_names(info: Any) -> list[str]:
    match info:
        case msgspec.inspect.Metadata():
            return _type_names(info.type)
        case msgspec.inspect.UnionType():
            return [n for part in info.types for n in _type_names(part) if n]
        case msgspec.inspect.LiteralType():
            return [f'"{v}"' if isinstance(v, str) else str(v) for v in info.values]
        case msgspec.inspect.CustomType():
            return [
                {Bytes: "size", Seconds: "duration", Count: "count", Procs: "number or range"}.get(
                    info.cls, info.cls.__name__
                )
            ]
        case msgspec.inspect.NoneType():
            return []
        case msgspec.inspect.StructType():
            return ["table"]
        case msgspec.inspect.DictType():
            return ["table"]
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType() | msgspec.inspect.TupleType():
            return ["list"]
    return [
        {"StrType": "text", "IntType": "whole number", "FloatType": "number", "BoolType": "true or false"}[
            type(info).__name__
        ]
    ]


def _meta(annotation: Any, name: str) -> Any:
    for meta in getattr(annotation, "__metadata__", ()):
        value = getattr(meta, name, None)
        if value is not None:
            return value
    return None


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    write(Path(sys.argv[1]))
