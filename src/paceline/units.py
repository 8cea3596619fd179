"""Bytes, seconds, counts and rates: the only place that formats or parses any of them.

Memory is written in binary units (GiB = 2^30 bytes), links in decimal ones (GB/s = 10^9 bytes per second), as the field
does. Parsers accept what the formatters print.
"""

from __future__ import annotations

import re

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40

_BYTE_UNITS = {
    "B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB, "PiB": 2**50,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
}  # fmt: skip
_SECOND_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


class Bytes(int):
    """A size in bytes; written `"8GiB"` or `"500MB"` in a job file."""


class Seconds(float):
    """A duration in seconds; written `"90s"`, `"10m"`, `"1h30m"` in a job file."""


class Count(int):
    """A whole number that may be written `15e12`."""


class Procs(int):
    """A number of processes or nodes; `4`, or a range `"2:4"`, of which it is the larger end and `least` the smaller."""

    least: int

    def __new__(cls, most: int, least: int | None = None) -> Procs:
        made = super().__new__(cls, most)
        made.least = most if least is None else least
        return made

    def __str__(self) -> str:
        return f"{int(self)}" if self.least == self else f"{self.least}:{int(self)}"


def parse_bytes(text: str) -> Bytes:
    """Bytes of `"8GiB"`. Raises ValueError naming the units where the text is no size."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in _BYTE_UNITS:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as 8GiB or 500MB")
    return Bytes(round(float(match[1]) * _BYTE_UNITS[match[2]]))


def parse_seconds(text: str) -> Seconds:
    """Seconds of `"90s"` or `"1h30m"`. Raises ValueError naming the units where the text is no duration."""
    parts = [(float(n), u) for n, u in re.findall(r"([0-9]*\.?[0-9]+)\s*([a-z]+)\s*", text)]
    whole = re.fullmatch(r"(?:\s*[0-9]*\.?[0-9]+\s*[a-z]+\s*)+", text)
    if whole is None or any(u not in _SECOND_UNITS for _, u in parts):
        raise ValueError(f"{text!r} is not a duration; write a number and a unit, such as 90s, 10m or 1h30m")
    return Seconds(sum(n * _SECOND_UNITS[u] for n, u in parts))


def parse_count(value: str | int | float) -> Count:
    """A whole number of `15e12`, `"15e12"` or `700`. Raises ValueError where it is negative or has a fraction."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is not a whole number such as 700 or 15e12") from None
    if isinstance(value, bool) or number != number or number < 0 or number != int(number):
        raise ValueError(f"{value!r} is not a whole number such as 700 or 15e12")
    return Count(value) if isinstance(value, int) else Count(int(number))


def parse_procs(value: str | int) -> Procs:
    """`4` or `"2:4"`. Raises ValueError where it is neither, below 1, or the wrong way round."""
    least, colon, most = str(value).partition(":")
    ends = (least, most) if colon else (least, least)
    if isinstance(value, bool) or not all(end.strip().isdecimal() for end in ends):
        raise ValueError(f"{value!r} is neither a number nor a range such as 2:4")
    low, high = (int(end) for end in ends)
    if low < 1:
        raise ValueError(f"{value} starts nothing; give 1 or more")
    if high < low:
        raise ValueError(f"{value} ends below its beginning; write {high}:{low}")
    return Procs(high, low)


def format_bytes(size_bytes: float) -> str:
    """`1.50 GiB`, `320 B`."""
    for unit, scale in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(size_bytes) >= scale:
            return f"{_three(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """`12 ms`, `3.20 s`, `4m 05s`, `2h 10m`, `3d 4h`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{_three(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{_three(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def format_count(count: float) -> str:
    """`893 K`, `1.24 B`, `15.0 T`: parameters, tokens, samples."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= scale:
            return f"{_three(count / scale)} {unit}"
    return f"{count:g}"


def format_flop_rate(flop_per_second: float) -> str:
    """`213 GFLOP/s`, `989 TFLOP/s`."""
    for unit, scale in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12), ("GFLOP/s", 1e9)):
        if abs(flop_per_second) >= scale:
            return f"{_three(flop_per_second / scale)} {unit}"
    return f"{flop_per_second / 1e6:.0f} MFLOP/s"


def format_bandwidth(bytes_per_second: float) -> str:
    """`1.70 GB/s`, decimal as links are sold."""
    if abs(bytes_per_second) >= 1e9:
        return f"{_three(bytes_per_second / 1e9)} GB/s"
    return f"{_three(bytes_per_second / 1e6)} MB/s"


def format_percent(share: float) -> str:
    """`56.3%` of a share in 0..1."""
    return f"{share * 100:.1f}%"


def format_money(amount: float, currency: str = "USD") -> str:
    """`8.20 M USD`, `812 USD`, `2.99 USD`."""
    for unit, scale in ((" B", 1e9), (" M", 1e6), (" K", 1e4)):
        if abs(amount) >= scale:
            return f"{_three(amount / (1e3 if unit == ' K' else scale))}{unit} {currency}"
    return f"{amount:,.0f} {currency}" if abs(amount) >= 100 else f"{amount:.2f} {currency}"


def _three(number: float) -> str:
    """Three significant digits without an exponent."""
    size = abs(number)
    return f"{number:.2f}" if size < 10 else f"{number:.1f}" if size < 100 else f"{number:.0f}"
