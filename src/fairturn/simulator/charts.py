"""Pictures for the report, as SVG in words of our own: no library, no script, no network.

Every colour is a CSS class, so that the page decides for light and dark. No picture speaks by
colour alone: a better level is taller, each percentile has its own shape, and each bar its number.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from fairturn.clock import SECOND_US
from fairturn.priority import LEVELS

WIDTH = 1_080
LABELS = 168  # the part of the width for names
RIGHT = 14
_ROW, _BAR = 15, 13
_TICK_SECONDS = (60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400)
_TICKS_MAX = 9
LOG_FROM_S = 0.1

Bin = int  # 0: nothing; 1 to 9: served, in this level at best; WAITING: waited and got nothing
WAITING: Bin = 10


class Row(NamedTuple):
    """A customer in a strip: what happened to it in each part of the time."""

    name: str
    bins: Sequence[Bin]


class Band(NamedTuple):
    """Rows of one group."""

    name: str
    rows: Sequence[Row]


class Spread(NamedTuple):
    """The waits of one group in one mode: sorted microseconds and the marks among them."""

    name: str
    waits: Sequence[int]
    p50_us: int
    p95_us: int
    p99_us: int
    max_us: int


class Bar(NamedTuple):
    """A value with its name and what is written beside it."""

    name: str
    us: int
    text: str
    style: str  # a class: `main`, `other` or `ideal`


def safe(text: str) -> str:
    """A text from outside, for HTML: it can neither be markup nor steer what is around it."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def _svg(height: float, title: str, description: str, parts: Iterable[str]) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{safe(title)}">\n'
        f"<title>{safe(title)}</title>\n<desc>{safe(description)}</desc>\n{inner}\n</svg>"
    )


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    style = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{safe(text)}</text>'


def _cut(name: str, length: int = 22) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}…"


# ── Who was served when ──────────────────────────────────────────────────────────────────────────


def strip(title: str, bands: Sequence[Band], ends_at: int, description: str) -> str:
    """A row for each customer, from left to right the time: a block where it was served, as tall
    as its level is good, and a line where it waited and got nothing."""
    parts: list[str] = []
    paths: dict[Bin, list[str]] = {}
    y = 4.0
    for band in bands:
        parts.append(_text(0, y + _BAR - 3, band.name, "group"))
        y += _ROW + 1
        for row in band.rows:
            parts.append(_text(LABELS - 8, y + _BAR - 3, _cut(row.name), "name", "end"))
            parts.append(f'<path class="rule" d="M{LABELS} {y + _BAR:.0f}H{WIDTH - RIGHT}"/>')
            for kind, begin, end in _runs(row.bins):
                paths.setdefault(kind, []).append(_block(kind, begin, end, len(row.bins), y))
            y += _ROW
        y += 5
    for kind, drawn in sorted(paths.items()):
        style = "waits" if kind == WAITING else f"level-{kind}"
        parts.append(f'<path class="{style}" d="{"".join(drawn)}"/>')
    parts += _time_axis(y, ends_at)
    return _svg(y + 24, title, description, parts)


def _runs(bins: Sequence[Bin]) -> Iterable[tuple[Bin, int, int]]:
    begin = 0
    for n in range(1, len(bins) + 1):
        if n == len(bins) or bins[n] != bins[begin]:
            if bins[begin]:
                yield bins[begin], begin, n
            begin = n


def _block(kind: Bin, begin: int, end: int, bins: int, y: float) -> str:
    scale = (WIDTH - RIGHT - LABELS) / bins
    x, width = LABELS + begin * scale, (end - begin) * scale
    height = 3.5 if kind == WAITING else _BAR - (kind - 1) * 0.95
    return f"M{x:.1f} {y + _BAR - height:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"


def _time_axis(y: float, ends_at: int) -> list[str]:
    ends_s = max(1.0, ends_at / SECOND_US)
    step = next((s for s in _TICK_SECONDS if ends_s / s <= _TICKS_MAX), None)
    while step is None or ends_s / step > _TICKS_MAX:
        step = 2 * (step or _TICK_SECONDS[-1])
    parts = []
    for n in range(int(ends_s / step) + 1):
        x = LABELS + (WIDTH - RIGHT - LABELS) * n * step / ends_s
        parts.append(f'<path class="tick" d="M{x:.1f} 0V{y + 3:.0f}"/>')
        parts.append(_text(x, y + 16, _clock_text(n * step), "axis", "middle" if n else "start"))
    return parts


def _clock_text(seconds: float) -> str:
    """A moment on the axis: minutes below two hours, then hours, then days."""
    if seconds == 0:
        return "0"
    if seconds < 7_200:
        return f"{seconds / 60:g} min"
    if seconds < 3 * 86_400:
        return f"{seconds / 3_600:g} h"
    return f"{seconds / 86_400:g} d"


def level_key() -> str:
    """What the blocks of the strips mean."""
    parts = [_text(LABELS - 8, 16, "level", "name", "end")]
    x = float(LABELS)
    for level in range(1, LEVELS + 1):
        height = _BAR - (level - 1) * 0.95
        parts.append(
            f'<rect class="level-{level}" x="{x:.0f}" y="{20 - height:.1f}" width="22"'
            f' height="{height:.1f}"/>'
        )
        parts.append(_text(x + 27, 18, str(level), "axis"))
        x += 48
    parts.append(f'<rect class="waits" x="{x + 12:.0f}" y="16.5" width="44" height="3.5"/>')
    parts.append(_text(x + 62, 18, "waited and was not served", "axis"))
    return _svg(
        26,
        "Key",
        "Blocks: served, taller and bluer is a better level. Thin line: waited, not served.",
        parts,
    )


# ── How long documents waited ────────────────────────────────────────────────────────────────────


class _LogScale:
    """Seconds on a logarithmic axis that begins with all that is nothing to anybody."""

    def __init__(self, max_us: int, right: float) -> None:
        self.top = max(1.0, math.ceil(math.log10(max(1.0, max_us / SECOND_US))))
        self._bottom = math.log10(LOG_FROM_S)
        self._width = right - LABELS

    def x(self, us: float) -> float:
        value = math.log10(max(LOG_FROM_S, us / SECOND_US))
        return LABELS + self._width * (value - self._bottom) / (self.top - self._bottom)

    def axis(self, y: float) -> list[str]:
        parts = []
        power = self._bottom
        while power <= self.top + 1e-9:
            x = self.x(10**power * SECOND_US)
            text = f"{10**power:,.0f} s" if power >= 0 else f"≤ {LOG_FROM_S:g} s"
            anchor = "start" if power == self._bottom else "middle"
            parts.append(f'<path class="tick" d="M{x:.1f} 0V{y + 3:.0f}"/>')
            parts.append(_text(x, y + 16, text, "axis", anchor))
            power += 1
        return parts


def _mark(shape: str, x: float, y: float) -> str:
    shapes = {
        "p50": f"M{x - 5:.1f} {y:.1f}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0z",
        "p95": f"M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z",
        "p99": f"M{x:.1f} {y - 6.5:.1f}l6.5 11.5h-13z",
        "max": f"M{x - 1.5:.1f} {y - 7:.1f}h3v14h-3z",
    }
    return f'<path class="mark" d="{shapes[shape]}"/>'


def spreads(title: str, rows: Sequence[Spread], max_us: int, description: str) -> str:
    """A row for each mode: how many documents waited how long, on a logarithmic axis."""
    right = WIDTH - 120
    scale = _LogScale(max_us, right)
    columns = 90
    width = (right - LABELS) / columns
    parts: list[str] = []
    y, height = 8.0, 46.0
    for row in rows:
        counts = [0] * columns
        for us in row.waits:
            column = int((scale.x(us) - LABELS) / width)
            counts[min(columns - 1, column)] += 1
        most = max(counts, default=0) or 1
        bars = [
            f"M{LABELS + n * width:.1f} {y + height:.1f}v{-size:.1f}h{width - 0.8:.1f}v{size:.1f}z"
            for n, count in enumerate(counts)
            if count and (size := 3 + (height - 16) * math.sqrt(count / most))
        ]
        parts.append(_text(LABELS - 8, y + height - 6, _cut(row.name), "name", "end"))
        parts.append(f'<path class="spread" d="{"".join(bars)}"/>')
        parts.append(f'<path class="rule" d="M{LABELS} {y + height:.1f}H{right}"/>')
        for shape, us in (
            ("max", row.max_us),
            ("p99", row.p99_us),
            ("p95", row.p95_us),
            ("p50", row.p50_us),
        ):
            parts.append(_mark(shape, scale.x(us), y + height))
        p99 = f"{row.p99_us / SECOND_US:,.1f} s"
        parts.append(_text(WIDTH, y + height + 4, p99, "value", "end"))
        y += height + 16
    return _svg(y + 24, title, description, [*scale.axis(y), *parts])


def mark_key() -> str:
    """What the shapes of the spreads mean."""
    parts = [_text(LABELS - 8, 18, "of 100 documents", "name", "end")]
    x = float(LABELS)
    for shape, text in (
        ("p50", "50 waited less"),
        ("p95", "95 waited less"),
        ("p99", "99 waited less (the number at the right)"),
        ("max", "the longest wait"),
    ):
        parts += [_mark(shape, x + 8, 14), _text(x + 22, 18, text, "axis")]
        x += 40 + 7.4 * len(text)
    return _svg(26, "Key", "Circle p50, diamond p95, triangle p99, upright bar the maximum.", parts)


# ── The modes side by side ───────────────────────────────────────────────────────────────────────


def bars(title: str, rows: Sequence[Bar], max_us: int, description: str) -> str:
    """A bar for each mode, on a logarithmic axis, with its number at the end."""
    scale = _LogScale(max_us, WIDTH - 150)
    parts: list[str] = []
    y = 4.0
    for row in rows:
        end = max(scale.x(row.us), LABELS + 2)
        parts.append(_text(LABELS - 8, y + 15, _cut(row.name), "name", "end"))
        parts.append(
            f'<rect class="bar {row.style}" x="{LABELS}" y="{y:.1f}" '
            f'width="{end - LABELS:.1f}" height="20" rx="3"/>'
        )
        parts.append(_text(end + 7, y + 15, row.text, "value"))
        y += 26
    return _svg(y + 24, title, description, [*scale.axis(y), *parts])
