"""What goes to a terminal: text that cannot steer it, durations, and tables of its width."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairturn.clock import SECOND_US

if TYPE_CHECKING:  # rich is loaded when there is something to print
    from rich.console import Console

_GAP = 3  # between two columns
_TEXT_WIDTH_MIN = 12


def printable(text: str) -> str:
    """The text with control characters escaped, so that a name cannot steer the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def seconds(us: int) -> str:
    """A duration for people: seconds with one decimal."""
    return f"{us / SECOND_US:,.1f}"


def plain_number(number: float) -> str:
    """A number without an exponent and without zeros at its end."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def console() -> "Console":
    """Standard output, with its width and its colours (none with NO_COLOR or in a file)."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def print_table(
    out: "Console", columns: Sequence[str], rows: Sequence[Sequence[str] | None]
) -> None:
    """Print text in the first column and numbers in the others; None is a gap between two rows.

    Where the terminal is narrow, the text is cut and then the headings are folded. No number is
    cut: the lines are longer than the terminal is wide, if need be.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    widest = [
        max((len(row[n]) for row in rows if row and n < len(row)), default=1)
        for n in range(len(columns))
    ]
    numbers = sum(max(pair) for pair in zip(widest[1:], map(len, columns[1:]), strict=True))
    left = out.width - numbers - _GAP * len(columns[1:])
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    made.add_column(
        columns[0], no_wrap=True, overflow="ellipsis", max_width=max(left, _TEXT_WIDTH_MIN)
    )
    for column, width in zip(columns[1:], widest[1:], strict=True):
        made.add_column(column, justify="right", overflow="fold", min_width=width)
    for row in rows:
        if row is None:
            made.add_section()
        else:
            made.add_row(*row)
    least = _TEXT_WIDTH_MIN + sum(widest[1:]) + _GAP * len(columns[1:])
    out.print(made, width=max(out.width, least), crop=False)
