"""Charts with a row for each customer or mode: when each was served, how long documents waited."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from fairturn.clock import SECOND_US
from fairturn.priority import LEVELS
from fairturn.simulator.charts import svg

LOG_FROM_S = 0.1  # start of the logarithmic axes
WIDTH = 1_080
LABELS = 168  # the part of the width for names
_LABEL_LENGTH = 22
RIGHT = 14
_ROW, _BAR = 15, 13
_TIME_TICKS_S = (60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400)
_TIME_TICKS_MAX = 9
_SPREAD_COLUMNS = 90

Bin = int  # 0: nothing; 1 to 9: served, in this level at best; WAITING: waited and was not served
WAITING: Bin = 10


class Timeline(NamedTuple):
    """One customer in a strip: what happened to it in each part of the time."""

    name: str
    bins: Sequence[Bin]


class Band(NamedTuple):
    """The timelines of one group of customers."""

    name: str
    timelines: Sequence[Timeline]


class Spread(NamedTuple):
    """The waits of one group in one mode: sorted microseconds, and the percentiles to mark."""

    name: str
    waits: Sequence[int]
    p50_us: int
    p95_us: int
    p99_us: int
    max_us: int


class Bar(NamedTuple):
    """A duration with its name and the text beside it."""

    name: str
    us: int
    text: str
    style: str  # a CSS class: `main`, `other` or `ideal`


def _svg(height: float, title: str, description: str, parts: Iterable[str]) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{svg.safe(title)}">\n'
        f"<title>{svg.safe(title)}</title>\n<desc>{svg.safe(description)}</desc>\n{inner}\n</svg>"
    )


def _label(y: float, name: str) -> str:
    short = name if len(name) <= _LABEL_LENGTH else f"{name[: _LABEL_LENGTH - 1]}…"
    return svg.text(LABELS - 8, y, short, "name", "end")


def _tick(x: float, y: float, text: str, anchor: str) -> list[str]:
    """A vertical line across the chart, and its text below `y`."""
    return [
        svg.path("tick", f"M{svg.num(x)} 0V{svg.num(y + 3)}"),
        svg.text(x, y + 16, text, "axis", anchor),
    ]


def strip(
    title: str,
    bands: Sequence[Band],
    ends_at: int,
    description: str,
    *,
    shaded: Iterable[tuple[int, int]] = (),
) -> str:
    """A row for each customer over time: a block while it was served, taller for a better level,
    and a thin line while it waited and was not served. Shaded intervals span all rows."""
    parts: list[str] = []
    blocks: dict[Bin, list[str]] = {}
    y = 4.0
    for band in bands:
        parts.append(svg.text(0, y + _BAR - 3, band.name, "group"))
        y += _ROW + 1
        for row in band.timelines:
            parts.append(_label(y + _BAR - 3, row.name))
            parts.append(svg.path("rule", f"M{LABELS} {svg.num(y + _BAR)}H{WIDTH - RIGHT}"))
            begin, scale = 0, (WIDTH - RIGHT - LABELS) / len(row.bins)
            for kind, same in groupby(row.bins):
                n = len(list(same))
                if kind:
                    height = _block_height(kind)
                    block = svg.box(LABELS + begin * scale, y + _BAR - height, n * scale, height)
                    blocks.setdefault(kind, []).append(block)
                begin += n
            y += _ROW
        y += 5
    for kind, drawn in sorted(blocks.items()):
        parts.append(svg.path("waits" if kind == WAITING else f"level-{kind}", "".join(drawn)))
    per_us = (WIDTH - RIGHT - LABELS) / max(1, ends_at)
    shades = [
        svg.rect("shade", LABELS + begin * per_us, 0, (min(end, ends_at) - begin) * per_us, y)
        for begin, end in shaded
        if begin < ends_at
    ]
    return _svg(y + 24, title, description, [*shades, *parts, *_time_axis(y, ends_at)])


def _block_height(kind: Bin) -> float:
    return 3.5 if kind == WAITING else _BAR - (kind - 1) * 0.95


def _time_axis(y: float, ends_at: int) -> list[str]:
    ends_s = max(1.0, ends_at / SECOND_US)
    step = next((s for s in _TIME_TICKS_S if ends_s / s <= _TIME_TICKS_MAX), _TIME_TICKS_S[-1])
    while ends_s / step > _TIME_TICKS_MAX:
        step *= 2
    parts = []
    for n in range(int(ends_s / step) + 1):
        x = LABELS + (WIDTH - RIGHT - LABELS) * n * step / ends_s
        parts += _tick(x, y, _elapsed(n * step), "middle" if n else "start")
    return parts


def _elapsed(seconds: float) -> str:
    """A time since the start, in minutes, hours or days."""
    if seconds == 0:
        return "0"
    if seconds < 7_200:
        return f"{seconds / 60:g} min"
    if seconds < 3 * 86_400:
        return f"{seconds / 3_600:g} h"
    return f"{seconds / 86_400:g} d"


def level_key() -> str:
    """The key to the blocks of a strip."""
    parts = [_label(16, "level")]
    x = float(LABELS)
    for level in range(1, LEVELS + 1):
        height = _block_height(level)
        parts.append(svg.rect(f"level-{level}", x, 20 - height, 22, height))
        parts.append(svg.text(x + 27, 18, str(level), "axis"))
        x += 48
    parts.append(svg.rect("waits", x + 12, 16.5, 44, _block_height(WAITING)))
    parts.append(svg.text(x + 62, 18, "waited and was not served", "axis"))
    description = (
        "Blocks: served; taller and bluer is a better level. Thin line: waited, not served."
    )
    return _svg(26, "Key", description, parts)


def _report_scale(max_us: int, right: float) -> tuple[svg.LogScale, int]:
    """A scale for waits of at most `max_us`, and the power of ten in seconds at its end."""
    power = max(1, math.ceil(math.log10(max(1.0, max_us / SECOND_US))))
    return svg.LogScale(LOG_FROM_S, 10**power, LABELS, right), power


def _power_axis(scale: svg.LogScale, last_power: int, y: float) -> list[str]:
    parts = _tick(LABELS, y, f"≤ {LOG_FROM_S:g} s", "start")
    for power in range(last_power + 1):
        parts += _tick(scale.at(10**power * SECOND_US), y, f"{10**power:,} s", "middle")
    return parts


def _mark(shape: str, x: float, y: float) -> str:
    shapes = {
        "p50": f"M{svg.num(x - 5)} {svg.num(y)}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
        "p95": f"M{svg.num(x)} {svg.num(y - 6)}l6 6l-6 6l-6 -6z",
        "p99": f"M{svg.num(x)} {svg.num(y - 6.5)}l6.5 11.5h-13z",
        "max": f"M{svg.num(x - 1.5)} {svg.num(y - 7)}h3v14h-3z",
    }
    return svg.path("mark", shapes[shape])


def spreads(title: str, rows: Sequence[Spread], max_us: int, description: str) -> str:
    """A histogram of the waits for each mode, on one logarithmic axis, with percentiles marked."""
    right = WIDTH - 120
    scale, power = _report_scale(max_us, right)
    parts: list[str] = []
    y, height = 8.0, 46.0
    for row in rows:
        base = y + height
        parts.append(_label(base - 6, row.name))
        parts.append(svg.path("spread", _histogram(row.waits, scale, right, base, height)))
        parts.append(svg.path("rule", f"M{LABELS} {svg.num(base)}H{right}"))
        marks = {"max": row.max_us, "p99": row.p99_us, "p95": row.p95_us, "p50": row.p50_us}
        parts += [_mark(shape, scale.at(us), base) for shape, us in marks.items()]
        p99 = f"{row.p99_us / SECOND_US:,.1f} s"
        parts.append(svg.text(WIDTH, base + 4, p99, "value", "end"))
        y += height + 16
    return _svg(y + 24, title, description, [*_power_axis(scale, power, y), *parts])


def _histogram(
    waits: Sequence[int], scale: svg.LogScale, right: float, base: float, height: float
) -> str:
    """Columns on `base`. Their heights are square roots of counts, so that rare waits show."""
    width = (right - LABELS) / _SPREAD_COLUMNS
    counts = [0] * _SPREAD_COLUMNS
    for us in waits:
        counts[min(_SPREAD_COLUMNS - 1, int((scale.at(us) - LABELS) / width))] += 1
    most = max(counts) or 1
    return "".join(
        svg.box(LABELS + n * width, base - size, width - 0.8, size)
        for n, count in enumerate(counts)
        if count and (size := 3 + (height - 16) * math.sqrt(count / most))
    )


def mark_key() -> str:
    """The key to the marks of the spreads."""
    parts = [_label(18, "of 100 documents")]
    x = float(LABELS)
    for shape, text in (
        ("p50", "50 waited less"),
        ("p95", "95 waited less"),
        ("p99", "99 waited less (the number at the right)"),
        ("max", "the longest wait"),
    ):
        parts += [_mark(shape, x + 8, 14), svg.text(x + 22, 18, text, "axis")]
        x += 40 + 7.4 * len(text)
    description = "Circle p50, diamond p95, triangle p99, upright bar the maximum."
    return _svg(26, "Key", description, parts)


def bars(title: str, rows: Sequence[Bar], max_us: int, description: str) -> str:
    """A bar for each mode, on a logarithmic axis, with its value at the end."""
    scale, power = _report_scale(max_us, WIDTH - 150)
    parts: list[str] = []
    y = 4.0
    for row in rows:
        end = max(scale.at(row.us), LABELS + 2)
        parts.append(_label(y + 15, row.name))
        parts.append(svg.rect(f"bar {row.style}", LABELS, y, end - LABELS, 20))
        parts.append(svg.text(end + 7, y + 15, row.text, "value"))
        y += 26
    return _svg(y + 24, title, description, [*_power_axis(scale, power, y), *parts])
