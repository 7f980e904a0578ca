"""Drawings as SVG, with words from outside escaped and no style inside: the sheet has the colours.

Every chart has a table behind it; a drawing is hidden from screen readers, which get the table.
"""

import itertools
from collections.abc import Iterable, Sequence
from math import log10
from typing import NamedTuple

from markupsafe import Markup, escape

from fairturn.clock import SECOND_US

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 112, 18, 26
_TICKS_S = (0.1, 1, 10, 60, 600, 3_600, 36_000, 360_000)
_LABELS = {
    0.1: "0.1 s", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3_600: "1 h",
    36_000: "10 h", 360_000: "100 h",
}  # fmt: skip
_LABEL_APART = 18.0


class Series(NamedTuple):
    """A line: its class in the sheet, its name, and a value for each moment or None."""

    kind: str
    name: str
    values: Sequence[int | None]


class Note(NamedTuple):
    """A mark at a moment, with words."""

    at: int
    text: str


def waits_chart(
    moments: Sequence[int], series: Sequence[Series], notes: Iterable[Note], decimal: str
) -> Markup:
    """Durations over time, on a logarithmic axis."""
    values = [v for line in series for v in line.values if v is not None]
    low, high = _bounds(values)
    parts: list[Markup] = []
    for tick in _TICKS_S:
        if low <= tick <= high:
            y = _y(tick * SECOND_US, low, high)
            parts.append(_line("rule", _LEFT, y, _WIDTH - _RIGHT, y))
            label = _LABELS[tick].replace(".", decimal)
            parts.append(_text("axis end", _LEFT - 8, y + 4, label))
    step = max(1, len(moments) // 4)
    for place in range(step // 2, len(moments), step):
        x = _x(place, len(moments))
        parts.append(
            Markup('<text class="axis mid" x="{}" y="{}" data-at="{}">{}</text>').format(
                _r(x), _HEIGHT - 6, moments[place], _hour(moments[place])
            )
        )
    for note in notes:
        where = _place(note.at, moments)
        if where is not None:
            x = _x(where, len(moments))
            parts.append(_line("note", x, _TOP - 6, x, _HEIGHT - _BOTTOM))
            side = "end" if x > _WIDTH / 2 else ""
            parts.append(_text(f"axis {side}", x + (-5 if side else 5), _TOP, note.text))
    for line in series:
        parts.append(_path(line, low, high))
    parts += _names(series, low, high)
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" aria-hidden="true" focusable="false">{}</svg>'
    ).format(_WIDTH, _HEIGHT, Markup("").join(parts))


def _bounds(values: Sequence[int]) -> tuple[float, float]:
    """The ticks, in seconds, between which all values lie; three of them at least."""
    seconds = [max(v / SECOND_US, _TICKS_S[0]) for v in values] or [0.1, 10]
    low = max((tick for tick in _TICKS_S if tick <= min(seconds)), default=_TICKS_S[0])
    high = min((tick for tick in _TICKS_S if tick >= max(seconds)), default=_TICKS_S[-1])
    place = _TICKS_S.index(low)
    if _TICKS_S.index(high) - place < 3:
        high = _TICKS_S[min(len(_TICKS_S) - 1, place + 3)]
    return low, high


def _y(us: float, low: float, high: float) -> float:
    seconds = min(max(us / SECOND_US, low), high)
    share = (log10(seconds) - log10(low)) / (log10(high) - log10(low))
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _x(place: int, n: int) -> float:
    return _LEFT + (place + 0.5) / max(1, n) * (_WIDTH - _LEFT - _RIGHT)


def _place(at: int, moments: Sequence[int]) -> int | None:
    """The last of the moments that is not after this one; None if all are."""
    return next((n for n in reversed(range(len(moments))) if moments[n] <= at), None)


def _path(line: Series, low: float, high: float) -> Markup:
    """One line; where there is no value it is broken, and a value alone is a dot."""
    drawn, n = [], len(line.values)
    before = None
    for place, value in enumerate(line.values):
        if value is not None:
            x, y = _x(place, n), _y(value, low, high)
            drawn.append(f"{'M' if before is None else 'L'}{_r(x)} {_r(y)}")
            following = line.values[place + 1] if place + 1 < n else None
            if before is None and following is None:
                drawn.append("h0.01")
        before = value
    return Markup('<path class="line {}" d="{}"/>').format(line.kind, " ".join(drawn))


def _names(series: Sequence[Series], low: float, high: float) -> list[Markup]:
    """The names at the ends of the lines, none over another."""
    ends: list[tuple[float, str, str]] = []
    for line in series:
        known = [v for v in line.values if v is not None]
        if known and line.name:
            ends.append((_y(known[-1], low, high) + 4, line.kind, line.name))
    last = _TOP - _LABEL_APART
    names = []
    for y, kind, name in sorted(ends):
        last = max(last + _LABEL_APART, y)
        names.append(_text(f"name {kind}", _WIDTH - _RIGHT + 8, last, name))
    return names


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> Markup:
    return Markup('<path class="{}" d="M{} {}L{} {}"/>').format(
        kind, _r(x1), _r(y1), _r(x2), _r(y2)
    )


def _text(kind: str, x: float, y: float, text: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}">{}</text>').format(
        kind.strip(), _r(x), _r(y), escape(text)
    )


def _r(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _hour(us: int) -> str:
    minutes = us // (60 * SECOND_US)
    return f"{minutes // 60 % 24:02}:{minutes % 60:02}"


def count_chart(points: Sequence[tuple[int, int]], bounds: Sequence[int], now: int) -> Markup:
    """The pending documents count over time: a stair down with each document, and up at a reset.
    The bands are the nine priorities, 1 at the top."""
    begin, end = points[0][0], max(now, points[-1][0], points[0][0] + 1)
    lowest = min(*(count for _, count in points), bounds[0] - 1)

    def x(at: int) -> float:
        return _LEFT + (at - begin) / (end - begin) * (_WIDTH - _LEFT - 20)

    def y(count: float) -> float:
        # The nine levels lie near 0; a long way down is drawn shorter.
        depth = log10(1 + max(0.0, -count)) / log10(1 - lowest)
        return _TOP + depth * (_HEIGHT - _TOP - _BOTTOM)

    parts: list[Markup] = []
    top = 0.0
    for level, bound in enumerate([*bounds, None], 1):
        bottom = float(lowest) if bound is None or bound < lowest else bound - 0.5
        if y(bottom) - y(top) > 0.5:
            parts.append(
                Markup('<rect class="band {}" x="{}" y="{}" width="{}" height="{}"/>').format(
                    "odd" if level % 2 else "even",
                    _LEFT,
                    _r(y(top)),
                    _WIDTH - _LEFT - 20,
                    _r(y(bottom) - y(top)),
                )
            )
            if y(bottom) - y(top) >= 16:
                parts.append(_text("axis", _WIDTH - 14, (y(top) + y(bottom)) / 2 + 4, str(level)))
        top = bottom
        if bound is None or bound < lowest:
            break
    for tick in (0, -2, -10, -100, -1_000, -10_000, -100_000, -1_000_000):
        if tick >= lowest:
            parts.append(_text("axis end", _LEFT - 8, y(tick) + 4, str(tick).replace("-", "−")))
    drawn = [f"M{_r(x(points[0][0]))} {_r(y(points[0][1]))}"]
    resets: list[float] = []
    for (_, before), (at, count) in itertools.pairwise(points):
        drawn.append(f"H{_r(x(at))}V{_r(y(count))}")
        if count > before:
            resets.append(x(at))
    drawn.append(f"H{_r(x(end))}")
    for across in resets:
        parts.append(_line("note", across, _TOP, across, _HEIGHT - _BOTTOM))
    parts.append(Markup('<path class="line busy" d="{}"/>').format("".join(drawn)))
    for at, side in ((begin, ""), (end, "end")):
        parts.append(
            Markup('<text class="axis {}" x="{}" y="{}" data-at="{}">{}</text>').format(
                side, _r(x(at)), _HEIGHT - 6, at, _hour(at)
            )
        )
    return Markup(
        '<svg class="chart" viewBox="0 0 {} {}" aria-hidden="true" focusable="false">{}</svg>'
    ).format(_WIDTH, _HEIGHT, Markup("").join(parts))
