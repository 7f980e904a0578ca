"""What goes to a terminal: text that cannot steer it, durations, tables of its width, progress."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EPIPE
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fairturn.clock import SECOND_US, to_datetime

if TYPE_CHECKING:  # rich is loaded when there is something to print
    from rich.console import Console

_GAP = 3  # between two columns
_TEXT_WIDTH_MIN, _TEXTS_WIDTH_MIN = 12, 8  # of the only one, of each of several
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class Progress(Protocol):
    """Hears how much is done, and of how much where that becomes known."""

    def __call__(self, done: int, total: int | None = None) -> None: ...


def printable(text: str) -> str:
    """The text with control characters escaped, so that a name cannot steer the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def seconds(us: int) -> str:
    """A duration for people: seconds with one decimal."""
    return f"{us / SECOND_US:,.1f}"


def short_seconds(us: int) -> str:
    """The same where there is little room: a decimal only while it matters."""
    return seconds(us) if us < 1_000 * SECOND_US else f"{us / SECOND_US:,.0f}"


def duration(us: int) -> str:
    """A duration for people, in the unit that suits it."""
    s = us / SECOND_US
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if s >= 2 * length:
            return f"{s / length:,.1f} {unit}"
    return f"{s:,.1f} s" if s >= 1 else f"{s * 1000:,.0f} ms"


def age(us: int) -> str:
    """How old something is, as short as can be."""
    s = max(0, us // SECOND_US)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if s >= length:
            return f"{s // length} {unit}"
    return f"{s} s"


def moment(at: int | None) -> str:
    """A moment for people, in their time zone; nothing if it has not come."""
    return "" if at is None else f"{to_datetime(at).astimezone():%Y-%m-%d %H:%M:%S}"


def size(size_bytes: float) -> str:
    """A number of bytes for people."""
    power = 0
    while size_bytes >= 1024 and power < len(_UNITS) - 1:
        size_bytes /= 1024
        power += 1
    return f"{size_bytes:,.1f} {_UNITS[power]}" if power else f"{size_bytes:,.0f} {_UNITS[0]}"


def plain_number(number: float) -> str:
    """A number without an exponent and without zeros at its end."""
    return f"{number:.6f}".rstrip("0").rstrip(".")


def number(n: int, noun: str) -> str:
    """So many of something."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def json_line(value: dict[str, Any]) -> str:
    """A value as JSON, in ASCII, for programs."""
    return json.dumps(value, separators=(",", ":"))


def print_line(value: dict[str, Any]) -> None:
    """Print a value as a line of JSON."""
    sys.stdout.write(f"{json_line(value)}\n")


def silence_output() -> None:
    """Let what is printed from now on go nowhere, and what is left of before: or the interpreter
    would try to write it when it ends, and fail with a traceback."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def console(*, stderr: bool = False) -> "Console":
    """Standard output, with its width and its colours (none in a file). With NO_COLOR there is no
    style at all: bold and dim are colours to some terminals."""
    from rich.console import Console

    class Output(Console):
        def on_broken_pipe(self) -> None:
            # Rich itself would end the process, also where the command has more to do.
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
    what: str, total: int | None = None, *, beside_output: bool = False
) -> Iterator[Progress]:
    """A bar on standard error while the block runs, if that is a terminal.

    With `beside_output` the block prints lines meanwhile; on a terminal they are progress enough,
    and a bar would run through them.
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
        redirect_stdout=False,  # what is printed meanwhile stays on standard output
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total=None: bar.update(task, completed=done, total=total)


def print_table(
    out: "Console",
    columns: Sequence[str],
    rows: Sequence[Sequence[str] | None],
    *,
    texts: Sequence[int] = (0,),
    words: Sequence[int] = (),
) -> None:
    """Print a table; the columns in `texts` hold text, those in `words` words and ids, the others
    numbers. None is a gap between two rows.

    Where the terminal is narrow, texts are cut and then the headings are folded. No word and no
    number is cut: the lines are longer than the terminal is wide, if need be.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

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
    """The width that each of several texts gets, so that none has more while another lacks."""
    least = _TEXT_WIDTH_MIN if len(wanted) == 1 else _TEXTS_WIDTH_MIN
    given = [min(want, least) for want in wanted]
    while sum(given) < width and given != list(wanted):
        for n, want in enumerate(wanted):
            if given[n] < want and sum(given) < width:
                given[n] += 1
    return given
