"""How a command ends: the exit code, and one sentence on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from typing import NoReturn

import click

from fairturn.cli.terminal import printable
from fairturn.errors import (
    FairturnError,
    NoQueue,
    NotFound,
    QueueFull,
    StoreUnavailable,
    TraceError,
)

FAILED, WRONG_USE, NOT_FOUND, TRY_AGAIN = 1, 2, 3, 75  # 75 is EX_TEMPFAIL of sysexits.h
NO_SPACE = (ENOSPC, EDQUOT, EFBIG)
INTERRUPTED = 130  # what a shell says of a program that was ended by Ctrl-C


class Ending(click.ClickException):
    """Ends the command with this sentence and this code."""

    def __init__(self, sentence: str, code: int = FAILED) -> None:
        super().__init__(printable(sentence))
        self.exit_code = code  # type: ignore[misc]  # click means one for each class


class Interrupted(Ending):
    """Somebody pressed Ctrl-C."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence, INTERRUPTED)


def code_of(error: BaseException) -> int:
    """The exit code that an error stands for."""
    if isinstance(error, NotFound | NoQueue):
        return NOT_FOUND
    if isinstance(error, QueueFull | StoreUnavailable):
        return TRY_AGAIN
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    # What the caller handed in: a value, a file, a trace.
    if isinstance(error, TraceError | ValueError | TypeError | OSError):
        return WRONG_USE
    return FAILED


def ending_of(error: FairturnError) -> Ending:
    """The ending that says what happened in the world."""
    return Ending(str(error), code_of(error))


def unwritable(error: OSError, more: str = "") -> Ending:
    """The ending of a command whose output takes no more; `more` says what was done."""
    code = TRY_AGAIN if error.errno in NO_SPACE else FAILED
    # A file that a command writes has a name; standard output has none.
    what = "standard output" if error.filename is None else error.filename
    return Ending(f"{what} cannot be written: {error.strerror}{more}", code)


def wrong_use(sentence: str) -> NoReturn:
    """End with what is wrong with the options that were given."""
    raise click.UsageError(printable(sentence))


@contextmanager
def misuse_is_wrong_use() -> Iterator[None]:
    """The queue's own words about a value, when the value was given on the command line."""
    try:
        yield
    except (ValueError, TypeError) as error:
        wrong_use(str(error))
