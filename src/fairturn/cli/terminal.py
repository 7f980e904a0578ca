"""Output on a terminal: escaped text, durations, sizes, tables and progress bars."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EPIPE
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fairturn.clock import SECOND_US, to_datetime

if TYPE_CHECKING:
    from rich.console import Console

_GAP = 3  # between two columns
_TEXT_WIDTH_MIN, _TEXTS_WIDTH_MIN = 12, 8  # of a single text column, and of each of several
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class ProgressCallback(Protocol):
    """Called with the amount done, and the total once it is known."""

    def __call__(self, done: int, total: int | None = None) -> None: ...


def printable(text: str) -> str:
    """Return the text with control characters escaped: a name must not control the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def seconds(us: int) -> str:
    """Format a duration in seconds, with one decimal."""
    return f"{us / SECOND_US:,.1f}"


def short_seconds(us: int) -> str:
    """Format a duration in seconds, from 1,000 s on without a decimal."""
    return seconds(us) if us < 1_000 * SECOND_US else f"{us / SECOND_US:,.0f}"


def duration(us: int) -> str:
    """Format a duration in ms, s, minutes, hours or days."""
    s = us / SECOND_US
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if s >= 2 * length:
            return f"{s / length:,.1f} {unit}"
    return f"{s:,.1f} s" if s >= 1 else f"{s * 1000:,.0f} ms"


def age(us: int) -> str:
    """Format an age in whole units, such as `5 min`."""
    s = max(0, us // SECOND_US)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if s >= length:
            return f"{s // length} {unit}"
    return f"{s} s"


def timestamp(at: int | None) -> str:
    """Format a timestamp in the local time zone; empty for None."""
    return "" if at is None else f"{to_datetime(at).astimezone():%Y-%m-%d %H:%M:%S}"


def size(size_bytes: float) -> str:
    """Format a number of bytes in binary units."""
    power = 0
    while size_bytes >= 1024 and power < len(_UNITS) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:,.1f} {_UNITS[power]}" if power else f"{size_bytes:,.0f} {_UNITS[0]}"


def plain_number(number: float) -> str:
    """Format a number without an exponent and without trailing zeros."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def number(n: int, noun: str) -> str:
    """Format a count with its noun in the singular or plural."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def json_line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def print_line(value: dict[str, Any]) -> None:
    sys.stdout.write(f"{json_line(value)}\n")


def silence_output() -> None:
    """Discard further output, and output still buffered: the interpreter would try to write it at
    exit and fail with a traceback."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def console(*, stderr: bool = False) -> "Console":
    """Return a console with the width and colours of the terminal (no colours in a file). With
    NO_COLOR there is no style at all, because some terminals show bold and dim as colours."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            # Rich would end the process, even if the command has more to do.
            raise BrokenPipeError(EPIPE, os.strerror(EPIPE))

    plain = bool(os.environ.get("NO_COLOR"))
    return Output(
        stderr=stderr,
        color_system=None if plain else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


@contextmanager
def progress(
    title: str, total: int | None = None, *, beside_output: bool = False
) -> Iterator[ProgressCallback]:
    """Show a progress bar on standard error while the block runs, if that is a terminal.

    With `beside_output` the block prints lines: if standard output is a terminal too, there is no
    bar, which would mix with them.
    """
    if not sys.stderr.isatty() or (beside_output and sys.stdout.isatty()):
        yield lambda done, total=None: None
        return
    from rich import progress as bars

    columns = [bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TaskProgressColumn()]
    with bars.Progress(
        *columns,
        bars.TimeElapsedColumn(),
        console=console(stderr=True),
        transient=True,
        redirect_stdout=False,
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)


def print_table(
    out: "Console",
    columns: Sequence[str],
    rows: Sequence[Sequence[str] | None],
    *,
    texts: Sequence[int] = (0,),
    words: Sequence[int] = (),
) -> None:
    """Print a table, with control characters escaped. Columns in `texts` contain text, those in
    `words` words and ids, all others numbers. A row None is a gap.

    On a narrow terminal, texts are truncated, then headings wrapped. Words and numbers are never
    truncated, even if lines exceed the width of the terminal.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = [None if row is None else [printable(cell) for cell in row] for row in rows]
    widest = [
        max((len(row[n]) for row in rows if row and n < len(row)), default=1)
        for n in range(len(columns))
    ]
    least = [
        max(width, *map(len, column.split()), 0)
        for width, column in zip(widest, columns, strict=True)
    ]
    wanted = [max(width, len(column)) for width, column in zip(widest, columns, strict=True)]
    whole = [n for n in range(len(columns)) if n not in texts]
    gaps = _GAP * (len(columns) - 1)
    left = out.width - sum(wanted[n] for n in whole) - gaps
    given = _shared(left, [wanted[n] for n in texts])
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for n, column in enumerate(columns):
        if n in texts:
            width = given[texts.index(n)]
            made.add_column(column, no_wrap=True, overflow="ellipsis", max_width=width)
        else:
            side: Literal["left", "right"] = "left" if n in words else "right"
            made.add_column(column, justify=side, overflow="fold", min_width=least[n])
    for row in rows:
        if row is None:
            made.add_section()
        else:
            made.add_row(*row)
    narrowest = sum(given) + sum(least[n] for n in whole) + gaps
    out.print(made, width=max(out.width, narrowest), crop=False)


def _shared(width: int, wanted: Sequence[int]) -> list[int]:
    """Distribute the width evenly among text columns, up to the width that each needs."""
    least = _TEXT_WIDTH_MIN if len(wanted) == 1 else _TEXTS_WIDTH_MIN
    given = [min(want, least) for want in wanted]
    while sum(given) < width and given != list(wanted):
        for n, want in enumerate(wanted):
            if given[n] < want and sum(given) < width:
                given[n] += 1
    return given
