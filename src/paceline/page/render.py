"""A page from a template of a command's package, with the style and the charts that all pages share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jinja2

from paceline.units import format_bytes, format_count, format_flop_rate, format_percent, format_seconds


def render_page(
    package: str, template: str, document: Any, globals: Mapping[str, Any] | None = None, **values: Any
) -> str:
    """The page.

    Args:
        package: where the template is; `style.css` and `chart.html` are there for all.
        document: goes into the page as JSON.
        globals: names that macros see too.
        values: names of the template.
    """
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(name, ".") for name in (package, "paceline.page")]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        bytes=or_dash(format_bytes),
        count=or_dash(format_count),
        flop_rate=or_dash(format_flop_rate),
        loss=or_dash(format_loss),
        percent=or_dash(format_percent),
        rate=or_dash(format_rate),
        seconds=or_dash(_signed_seconds),
        signed_percent=or_dash(lambda share: f"{share * 100:+.1f}%"),
        value=_value,
    )
    environment.globals.update(globals or {})
    return environment.get_template(template).render(data=embedded_json(document), **values)


def embedded_json(document: Any) -> str:
    """JSON that may stand in a `<script>`: no `</`, and no text that looks like an address."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).replace("/", "\\/").replace("<", "\\u003c")


def format_loss(value: float) -> str:
    """A loss, in four or three significant digits."""
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.3g}"


def format_rate(value: float) -> str:
    """Something a second."""
    return f"{value:,.0f}" if abs(value) < 1e6 else format_count(value)


def or_dash(form: Any) -> Any:
    """A formatter that writes a dash for None."""
    return lambda value: "-" if value is None else form(value)


def _signed_seconds(seconds: float) -> str:
    return f"-{format_seconds(-seconds)}" if seconds < 0 else format_seconds(seconds) if seconds else "0 s"


def _value(value: Any) -> str:
    """A value of a table: numbers readable, tables as `key value`."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
