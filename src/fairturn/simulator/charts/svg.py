"""SVG as text: shapes, labels and a logarithmic scale.

Colours come from the style sheet around a chart, through CSS classes. Text from outside is escaped.
"""

import math
import unicodedata
from html import escape

from fairturn.clock import SECOND_US


def safe(text: str) -> str:
    """Return `text` escaped for HTML, with control and formatting characters replaced."""
    return escape("".join(c if _is_visible(c) else "\N{REPLACEMENT CHARACTER}" for c in text))


def _is_visible(character: str) -> bool:
    # str.isprintable rejects the no-break spaces that group the digits of a number.
    return character.isprintable() or unicodedata.category(character) == "Zs"


def num(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def text(
    x: float, y: float, words: str, style: str, anchor: str = "start", *, at: int | None = None
) -> str:
    """A label. The page's script displays the time `at` in the reader's time zone."""
    anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
    timestamp = "" if at is None else f' data-at="{at}"'
    return (
        f'<text class="{style}" x="{num(x)}" y="{num(y)}"{anchored}{timestamp}>{safe(words)}</text>'
    )


def path(style: str, drawn: str) -> str:
    """A path of drawing commands."""
    return f'<path class="{style}" d="{drawn}"/>'


def rect(style: str, x: float, y: float, width: float, height: float) -> str:
    """A rectangle, from its upper left corner."""
    return (
        f'<rect class="{style}" x="{num(x)}" y="{num(y)}" width="{num(width)}"'
        f' height="{num(height)}"/>'
    )


def box(x: float, y: float, width: float, height: float) -> str:
    """The commands of a rectangle, for a path that has many."""
    return f"M{num(x)} {num(y)}h{num(width)}v{num(height)}h{num(-width)}z"


class LogScale:
    """Maps durations on a logarithmic axis to coordinates; a value outside is drawn at an end."""

    def __init__(self, low_s: float, high_s: float, begin: float, end: float) -> None:
        self._low_s, self._high_s = low_s, high_s
        self._begin, self._end = begin, end

    def at(self, us: float) -> float:
        """The coordinate of a duration."""
        seconds = min(max(us / SECOND_US, self._low_s), self._high_s)
        share = math.log(seconds / self._low_s) / math.log(self._high_s / self._low_s)
        return self._begin + share * (self._end - self._begin)
