"""Facts that a document repeats are those of the code: the job's keys, exit codes, records, figures."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline import errors
from paceline.cluster import failures
from paceline.data.config import DataSection
from paceline.job import reference
from paceline.job.load import SECTIONS, load_job
from paceline.model.config import ModelSection
from paceline.model.flop import (
    activation_bytes,
    attention_flop_per_token,
    matmul_parameter_count,
    training_flop_per_token,
)
from paceline.model.spec import parameter_count, parameters, resolve
from paceline.optim.config import OptimizerSection
from paceline.parallel.ddp.config import DdpConfig
from paceline.parallel.fsdp.config import FsdpConfig
from paceline.parallel.layout import Layout
from paceline.parallel.memory import layout_cost, parameter_sizes
from paceline.plan.price_file import load_prices
from paceline.run.records import KINDS, PARTS
from tests.docs.markdown import blocks, documents, name_of, tables
from tests.pool.pool import ROOT

GUIDE = ROOT / "docs/guide"
TOML_BLOCKS = [(path, block) for path in documents() for block in blocks(path, "toml")]
JOB_BLOCKS = [(path, block.text) for path, block in TOML_BLOCKS if block.words == ("toml",)]
PRICE_BLOCKS = [(path, block.text) for path, block in TOML_BLOCKS if block.words == ("toml", "prices")]


def test_the_job_reference_is_the_one_that_the_sections_give() -> None:
    assert (GUIDE / reference.REFERENCE_FILE).read_text() == reference.reference(), "run make docs"


def test_the_schema_is_the_one_that_the_sections_give() -> None:
    stored = json.loads((GUIDE / reference.SCHEMA_FILE).read_text())
    assert stored == json.loads(json.dumps(reference.schema())), "run make docs"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_the_schema_knows_every_key_of_an_example(path: Path) -> None:
    schema = json.loads((GUIDE / reference.SCHEMA_FILE).read_text())
    for section, table in tomllib.loads(path.read_text()).items():
        for key, value in table.items():
            _accepts(schema["properties"][section]["properties"][key], value, f"{section}.{key}")


def test_the_schema_refuses_a_wrong_type() -> None:
    schema = json.loads((GUIDE / reference.SCHEMA_FILE).read_text())
    with pytest.raises(AssertionError):
        _accepts(schema["properties"]["optimizer"]["properties"]["lr"], "fast", "optimizer.lr")


def _accepts(rule: dict[str, Any], value: object, key: str) -> None:
    """As far as the schema goes in the examples: type, choice, and alternatives."""
    if "anyOf" in rule:
        options = [o for o in rule["anyOf"] if o.get("const") == value or _is_of(o.get("type"), value)]
        assert options, f"{key} = {value!r} is none of {rule['anyOf']}"
    if "enum" in rule:
        assert value in rule["enum"], key
    if "type" in rule:
        assert _is_of(rule["type"], value), f"{key} = {value!r} is no {rule['type']}"


def _is_of(kinds: str | list[str] | None, value: object) -> bool:
    known = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    names = [kinds] if isinstance(kinds, str) else kinds or []
    return any(isinstance(value, known[name]) and isinstance(value, bool) <= (name == "boolean") for name in names)


@pytest.mark.parametrize(("path", "text"), JOB_BLOCKS, ids=[name_of(p) for p, _ in JOB_BLOCKS])
def test_every_job_file_in_a_document_is_one(path: Path, text: str, tmp_path: Path) -> None:
    for example in (ROOT / "examples").glob("*.toml"):
        (tmp_path / example.name).write_text(example.read_text())
    (tmp_path / "own.toml").write_text(text)
    assert load_job(tmp_path / "own.toml").settings


@pytest.mark.parametrize(("path", "text"), PRICE_BLOCKS, ids=[name_of(p) for p, _ in PRICE_BLOCKS])
def test_every_price_file_in_a_document_is_one(path: Path, text: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(text)
    assert load_prices(tmp_path / "own.toml").first is not None


def test_the_failure_rates_of_a_document_are_those_of_the_table() -> None:
    text = (ROOT / "docs/math/checkpoint-interval.md").read_text()
    rows = {row[0]: row for found in tables(text) if found[0][0] == "observed" for row in found[1:]}
    assert set(rows) == {observed.run for observed in failures.table().observed}
    for observed in failures.table().observed:
        told = rows[observed.run]
        assert int(told[1].replace(",", "")) == observed.devices
        assert float(told[3]) == pytest.approx(observed.per_device_hour, rel=0.01)


def test_the_script_about_owning_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = blocks(GUIDE / "money.md", "python")
    exec(compile(script.text, "money.md", "exec"), {})
    assert "break-even after" in capsys.readouterr().out


def test_exit_codes_are_those_of_the_exceptions() -> None:
    documented = {int(row[0]): row[1] for row in tables((GUIDE / "exit-codes.md").read_text())[0][1:]}
    raised = {kind.exit_code for kind in _tree(errors.PacelineError)}
    assert set(documented) == raised | {0}
    for code, word in {
        74: "held",
        75: "saved",
        76: "stalled",
        77: "checkpoint",
        78: "job",
        79: "disk",
        130: "nothing",
    }.items():
        assert word in documented[code], f"{code}: {documented[code]}"


def test_the_tree_in_errors_is_the_tree_of_errors() -> None:
    drawn = dict(re.findall(r"(\w+) +(\d+) ", errors.__doc__ or ""))
    for kind in _tree(errors.PacelineError):
        assert kind.__name__ in (errors.__doc__ or "")
        assert int(drawn.get(kind.__name__, kind.exit_code)) == kind.exit_code


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    said = _texts_of_the_code()
    rows = [row for table in tables((GUIDE / "troubleshooting.md").read_text()) for row in table[1:]]
    assert len(rows) > 40
    for message, *_ in rows:
        for fragment in re.split(r"\.\.\.", message.replace("'", "")):
            words = fragment.strip(" ,;:()")
            assert words in said or len(words) < 4, f"{message!r}: no message says {words!r}"


def _texts_of_the_code() -> str:
    """All text constants but docstrings, the parts of f-strings among them; quotes left out."""
    nodes = [n for path in (ROOT / "src").rglob("*.py") for n in ast.walk(ast.parse(path.read_text()))]
    docstrings = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    texts = [
        n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docstrings
    ]
    return "\n".join(texts).replace("'", "")


def _tree(kind: type[errors.PacelineError]) -> list[type[errors.PacelineError]]:
    return [kind, *(leaf for child in kind.__subclasses__() for leaf in _tree(child))]


def test_record_kinds_and_fields_are_those_of_the_records() -> None:
    page = (GUIDE / "run-directory.md").read_text()
    chapters = re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, re.M | re.S)
    assert [name for name, _ in chapters] == list(KINDS)
    for name, chapter in chapters:
        documented = [row[0].strip("`") for row in tables(chapter)[0][1:]]
        # `step`, which every record has, stands above all of them.
        fields = [field.name for field in msgspec.structs.fields(KINDS[name]) if field.name != "step"]
        assert documented == fields, name
    for part in PARTS:
        assert f"`{part}`" in page


def test_the_keys_that_the_data_page_speaks_of_are_those_of_the_section() -> None:
    keys = {f"data.{field.name}" for field in msgspec.structs.fields(DataSection)}
    page = (GUIDE / "data.md").read_text()
    assert keys <= set(re.findall(r"data\.\w+", page))


def test_every_key_that_a_document_names_is_one() -> None:
    valid = {f"{name}.{field.name}" for name, cls in SECTIONS.items() for field in msgspec.structs.fields(cls)}
    sections = "|".join(SECTIONS)
    for path in documents():
        # `data.md`, `run.records` and their like are file and module names.
        named = re.findall(rf"`({sections})\.(\w+)(?:[ =`])", path.read_text())
        wrong = {
            f"{s}.{k}" for s, k in named if f"{s}.{k}" not in valid and k not in ("md", "py", "toml", "jsonl", "json")
        }
        assert not wrong, f"{name_of(path)} names {wrong}"


def test_the_worked_example_of_ddp_cost_is_computed() -> None:
    spec = resolve(ModelSection(preset="small"))
    sizes = parameter_sizes(spec, 4)
    optimizer, pair = OptimizerSection(), Layout(dp_replicate=2)
    cost, cost_bf16 = (
        layout_cost(sizes, pair, optimizer, DdpConfig(reduce_bf16=b), FsdpConfig(), 1) for b in (False, True)
    )
    activations = activation_bytes(spec, 8, 256, 2)
    figures = {
        "parameters": parameter_count(spec),
        "tensors": len(parameters(spec)),
        "payload of the gradient reduction, fp32": cost.collectives[0].size_bytes,
        "calls of the gradient reduction": cost.collectives[0].count,
        'the same with `reduce_dtype = "bf16"`': cost_bf16.collectives[0].size_bytes,
        "parameters + gradients + moments": cost.state.parameters + cost.state.gradients + cost.state.moments,
        "weights in matrix products, M": matmul_parameter_count(spec),
        "attention forward, palm, 4 N H K L": attention_flop_per_token(spec, 256),
        "training FLOP per token, palm": training_flop_per_token(spec, 256),
        "training FLOP per token, causal": training_flop_per_token(spec, 256, "causal"),
        "6 x all parameters, the rule of thumb": 6 * parameter_count(spec),
        "one block": activations.per_layer,
        "all blocks": activations.layers,
        "logits and loss": activations.logits_and_loss,
        "16-bit weight copies": activations.weight_copies,
        "all": activations.total,
    }
    page = (ROOT / "docs/math/ddp-cost.md").read_text()
    rows = {row[0]: row[1] for table in tables(page) for row in table if len(row) == 2}
    written = {name: int(re.sub(r"[^\d]", "", rows[name])) for name in figures}
    assert written == {name: int(value) for name, value in figures.items()}


def test_the_bus_bandwidth_factor_is_written_out_right() -> None:
    page = (ROOT / "docs/math/ddp-cost.md").read_text()
    ranks, factors = next(table for table in tables(page) if table[0][0] == "ranks")
    for n, factor in zip(ranks[1:-1], factors[1:-1], strict=True):
        assert float(factor) == pytest.approx(2 * (int(n) - 1) / int(n), abs=0.005)


@pytest.mark.parametrize("path", sorted((ROOT / "docs/guide").glob("*.md")), ids=lambda p: p.name)
def test_every_page_of_the_guide_is_linked_from_the_readme(path: Path) -> None:
    assert f"docs/guide/{path.name}" in (ROOT / "README.md").read_text()
