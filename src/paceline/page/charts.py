"""Line charts as geometry: data in, coordinates, ticks and labels out. The template draws them as SVG, nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WIDTH, HALF_WIDTH, HEIGHT = 1060, 500, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 12, 34


@dataclass(frozen=True)
class Line:
    """A curve. A value of None is a gap. `style` is a class of the style sheet."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    style: str = "series-1"
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """What the template needs: everything in pixels of a width x height box, texts formatted."""

    title: str
    x_label: str
    y_label: str
    width: int
    height: int
    plot: tuple[float, float, float, float]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    curves: list[dict[str, object]] = field(default_factory=list)
    levels: list[dict[str, object]] = field(default_factory=list)
    bands: list[tuple[float, float, str]] = field(default_factory=list)
    rules: list[tuple[float, str]] = field(default_factory=list)
    hover: list[list[object]] = field(default_factory=list)


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    y_format: Callable[[float], str],
    y_label: str = "",
    x_label: str = "step",
    from_zero: bool = False,
    width: int = WIDTH,
    levels: Sequence[tuple[str, float, str]] = (),
    bands: Sequence[tuple[float, float, str]] = (),
    rules: Sequence[tuple[float, str]] = (),
) -> Chart | None:
    """A chart of the lines, or None where there is nothing to draw.

    Args:
        title: names the chart for readers and screen readers.
        lines: the curves; the first one gives the hover points.
        y_format: a value as text.
        y_label: unit of the values, for the heading.
        x_label: what the horizontal axis counts.
        from_zero: whether the vertical axis begins at zero.
        width: of the box; a chart that is shown half as wide is made half as wide, so that its text keeps its size.
        levels: horizontal lines as (label, value, style).
        bands: shaded spans as (from x, to x, label).
        rules: vertical lines as (x, label).
    """
    points = [(x, y) for line in lines for x, y in zip(line.xs, line.ys, strict=True) if y is not None]
    if not points:
        return None
    all_y = [y for _, y in points] + [value for _, value, _ in levels]
    x_low, x_high = _widened(min(x for x, _ in points), max(x for x, _ in points))
    y_ticks = ticks(*_y_span(all_y, from_zero))
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return round(_LEFT + (x - x_low) / (x_high - x_low) * (width - _LEFT - _RIGHT), 1)

    def py(y: float) -> float:
        return round(_TOP + (y_high - y) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM), 1)

    curves: list[dict[str, object]] = [
        {
            "label": line.label,
            "style": line.style,
            "paths": [] if line.dots else _paths(line, px, py),
            "dots": _dots(line, px, py, y_format) if line.dots else [],
        }
        for line in lines
    ]
    x_ticks = [tick for tick in ticks(x_low, x_high, max(5, width // 110), whole=True) if x_low <= tick <= x_high]
    return Chart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        width=width,
        height=HEIGHT,
        plot=(_LEFT, _TOP, width - _RIGHT, HEIGHT - _BOTTOM),
        x_ticks=[(px(tick), f"{tick:,.0f}") for tick in x_ticks],
        y_ticks=[(py(tick), y_format(tick)) for tick in y_ticks],
        curves=curves,
        levels=[{"label": f"{label} {y_format(y)}", "y": py(y), "style": style} for label, y, style in levels],
        bands=[(px(max(a, x_low)), px(min(b, x_high)), label) for a, b, label in bands if b >= x_low and a <= x_high],
        rules=[(px(x), label) for x, label in rules if x_low <= x <= x_high],
        hover=_hover(lines[0], px, py, x_label, y_format),
    )


def ticks(low: float, high: float, about: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover low..high; whole ones if asked."""
    raw = (high - low) / max(1, about - 1)
    scale = 10 ** math.floor(math.log10(raw))
    step = next(factor for factor in (1, 2, 5, 10) if factor * scale >= raw * 0.999) * scale
    step = max(1.0, round(step)) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _y_span(values: Sequence[float], from_zero: bool) -> tuple[float, float]:
    """Low and high of the vertical axis: a few wild values at the start of a run must not flatten the rest."""
    ordered = sorted(values)
    top = ordered[min(len(ordered) - 1, math.ceil(0.995 * len(ordered)))]
    top = ordered[-1] if ordered[-1] <= 2 * max(top, 0.0) else top
    return _widened(0.0 if from_zero else ordered[0], top)


def _widened(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    pad = abs(low) * 0.05 or 1.0
    return low - pad, high + pad


def _paths(line: Line, px: Callable[[float], float], py: Callable[[float], float]) -> list[str]:
    """Polyline points, one text per stretch without gaps."""
    paths: list[list[str]] = [[]]
    for x, y in zip(line.xs, line.ys, strict=True):
        if y is None:
            paths.append([])
        else:
            paths[-1].append(f"{px(x)},{py(y)}")
    return [" ".join(path) for path in paths if path]


def _dots(
    line: Line, px: Callable[[float], float], py: Callable[[float], float], y_format: Callable[[float], str]
) -> list[tuple[float, float, str]]:
    return [
        (px(x), py(y), f"{line.label} {y_format(y)} at {x:,.0f}")
        for x, y in zip(line.xs, line.ys, strict=True)
        if y is not None
    ]


def _hover(
    line: Line,
    px: Callable[[float], float],
    py: Callable[[float], float],
    x_label: str,
    y_format: Callable[[float], str],
) -> list[list[object]]:
    return [
        [px(x), py(y), f"{x_label} {x:,.0f}: {y_format(y)}"]
        for x, y in zip(line.xs, line.ys, strict=True)
        if y is not None
    ]
