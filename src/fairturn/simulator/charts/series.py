"""Charts of values over time: the waits of customers, and a customer's count."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from fairturn.clock import SECOND_US
from fairturn.simulator.charts import svg

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 112, 18, 26
_COUNT_RIGHT = 20  # the chart of the count needs no room for names
_TICKS_S = (0.1, 1, 10, 60, 600, 3_600, 36_000, 360_000)
_TICK_TEXTS = ("0.1 s", "1 s", "10 s", "1 min", "10 min", "1 h", "10 h", "100 h")
_NAME_APART = 18.0
_COUNT_TICKS = (0, -2, -10, -100, -1_000, -10_000, -100_000, -1_000_000)


class Series(NamedTuple):
    """A line: its CSS class, its name, and a duration for each timestamp or None."""

    kind: str
    name: str
    values: Sequence[int | None]


class Note(NamedTuple):
    """A text on the time axis."""

    at: int
    text: str


def waits_chart(
    timestamps: Sequence[int], series: Sequence[Series], notes: Iterable[Note], decimal: str
) -> str:
    """Durations over time, on a logarithmic axis. `decimal` is the reader's decimal separator."""
    low, high = _tick_range([v for line in series for v in line.values if v is not None])
    scale = svg.LogScale(_TICKS_S[low], _TICKS_S[high], _HEIGHT - _BOTTOM, _TOP)
    parts: list[str] = []
    for tick in range(low, high + 1):
        y = scale.at(_TICKS_S[tick] * SECOND_US)
        label = _TICK_TEXTS[tick].replace(".", decimal)
        parts.append(svg.path("rule", f"M{_LEFT} {svg.num(y)}H{_WIDTH - _RIGHT}"))
        parts.append(svg.text(_LEFT - 8, y + 4, label, "axis", "end"))
    step = max(1, len(timestamps) // 4)
    for place in range(step // 2, len(timestamps), step):
        at = timestamps[place]
        x = _x(place, len(timestamps))
        parts.append(svg.text(x, _HEIGHT - 6, _time_of_day(at), "axis", "middle", at=at))
    for note in notes:
        parts += _note(note, timestamps)
    parts += [_line(line, scale) for line in series]
    parts += _names(series, scale)
    return _svg(parts)


def _svg(parts: Iterable[str]) -> str:
    """A chart that screen readers skip: they read the table beside it."""
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" aria-hidden="true"'
        f' focusable="false">{"".join(parts)}</svg>'
    )


def _tick_range(values: Sequence[int]) -> tuple[int, int]:
    """The numbers of the ticks around all values, at least three apart."""
    seconds = [v / SECOND_US for v in values] or [0.1, 10]
    low = max((n for n, tick in enumerate(_TICKS_S) if tick <= min(seconds)), default=0)
    last = len(_TICKS_S) - 1
    high = min((n for n, tick in enumerate(_TICKS_S) if tick >= max(seconds)), default=last)
    return low, min(last, max(high, low + 3))


def _x(place: int, n: int) -> float:
    return _LEFT + (place + 0.5) / max(1, n) * (_WIDTH - _LEFT - _RIGHT)


def _note(note: Note, timestamps: Sequence[int]) -> list[str]:
    place = next((n for n in reversed(range(len(timestamps))) if timestamps[n] <= note.at), None)
    if place is None:
        return []
    x = _x(place, len(timestamps))
    right = x <= _WIDTH / 2
    text = svg.text(x + (5 if right else -5), _TOP, note.text, "axis", "start" if right else "end")
    return [svg.path("note", f"M{svg.num(x)} {_TOP - 6}V{_HEIGHT - _BOTTOM}"), text]


def _line(line: Series, scale: svg.LogScale) -> str:
    """A line, interrupted where there is no value; a single value is a dot."""
    drawn, n = [], len(line.values)
    before = None
    for place, value in enumerate(line.values):
        if value is not None:
            command = "M" if before is None else "L"
            drawn.append(f"{command}{svg.num(_x(place, n))} {svg.num(scale.at(value))}")
            following = line.values[place + 1] if place + 1 < n else None
            if before is None and following is None:
                drawn.append("h0.01")
        before = value
    return svg.path(f"line {line.kind}", " ".join(drawn))


def _names(series: Sequence[Series], scale: svg.LogScale) -> list[str]:
    """The names at the ends of the lines, moved apart where they would overlap."""
    ends: list[tuple[float, str, str]] = []
    for line in series:
        last = next((v for v in reversed(line.values) if v is not None), None)
        if last is not None and line.name:
            ends.append((scale.at(last) + 4, line.kind, line.name))
    names = []
    y = _TOP - _NAME_APART
    for wanted, kind, name in sorted(ends):
        y = max(y + _NAME_APART, wanted)
        names.append(svg.text(_WIDTH - _RIGHT + 8, y, name, f"name {kind}"))
    return names


def _time_of_day(us: int) -> str:
    minutes = us // (60 * SECOND_US)
    return f"{minutes // 60 % 24:02}:{minutes % 60:02}"


def count_chart(points: Sequence[tuple[int, int]], bounds: Sequence[int], now: int) -> str:
    """The pending documents count over time: a step down with each document, up at a reset.
    The bands are the nine priorities, 1 at the top."""
    begin, end = points[0][0], max(now, points[-1][0], points[0][0] + 1)
    lowest = min(*(count for _, count in points), bounds[0] - 1)

    def x(at: int) -> float:
        return _LEFT + (at - begin) / (end - begin) * (_WIDTH - _LEFT - _COUNT_RIGHT)

    def y(count: float) -> float:
        # Logarithmic: the nine levels lie near 0, and a count may be far below them.
        depth = math.log10(1 + max(0.0, -count)) / math.log10(1 - lowest)
        return _TOP + depth * (_HEIGHT - _TOP - _BOTTOM)

    parts: list[str] = []
    top = 0.0
    for level, bound in enumerate([*(b for b in bounds if b >= lowest), None], 1):
        bottom = lowest if bound is None else bound - 0.5
        parts += _band(level, y(top), y(bottom))
        top = bottom
    for tick in _COUNT_TICKS:
        if tick >= lowest:
            parts.append(
                svg.text(_LEFT - 8, y(tick) + 4, f"{tick}".replace("-", "−"), "axis", "end")
            )
    drawn = [f"M{svg.num(x(begin))} {svg.num(y(points[0][1]))}"]
    for (_, before), (at, count) in pairwise(points):
        drawn.append(f"H{svg.num(x(at))}V{svg.num(y(count))}")
        if count > before:
            parts.append(svg.path("note", f"M{svg.num(x(at))} {_TOP}V{_HEIGHT - _BOTTOM}"))
    parts.append(svg.path("line busy", "".join([*drawn, f"H{svg.num(x(end))}"])))
    for at, anchor in ((begin, "start"), (end, "end")):
        parts.append(svg.text(x(at), _HEIGHT - 6, _time_of_day(at), "axis", anchor, at=at))
    return _svg(parts)


def _band(level: int, top: float, bottom: float) -> list[str]:
    """The band of a level, with its number if there is room for it."""
    if bottom - top <= 0.5:
        return []
    style = "band odd" if level % 2 else "band even"
    band = svg.rect(style, _LEFT, top, _WIDTH - _LEFT - _COUNT_RIGHT, bottom - top)
    if bottom - top < 16:
        return [band]
    return [band, svg.text(_WIDTH - 14, (top + bottom) / 2 + 4, str(level), "axis")]
