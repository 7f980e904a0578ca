"""Exit codes of commands, and the message on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from typing import NoReturn

import click

from fairturn.cli.terminal import printable
from fairturn.errors import (
    ExpiryPassed,
    KindRefused,
    NoQueue,
    NotFound,
    QueueFull,
    StoreUnavailable,
    TraceError,
)

FAILED, WRONG_USE, NOT_FOUND, TRY_AGAIN = 1, 2, 3, 75  # 75 is EX_TEMPFAIL of sysexits.h
NO_SPACE = (ENOSPC, EDQUOT, EFBIG)
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class CommandExit(click.ClickException):
    """Ends the command with a message and an exit code."""

    def __init__(self, sentence: str, code: int = FAILED) -> None:
        super().__init__(printable(sentence))
        self.exit_code = code  # type: ignore[misc]  # click declares it per class


def code_of(error: BaseException) -> int:
    """Return the exit code for an error."""
    if isinstance(error, NotFound | NoQueue):
        return NOT_FOUND
    if isinstance(error, QueueFull | StoreUnavailable):
        return TRY_AGAIN
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    # The input was wrong: a value, a file, a trace.
    if isinstance(
        error, ExpiryPassed | KindRefused | TraceError | ValueError | TypeError | OSError
    ):
        return WRONG_USE
    return FAILED


def unwritable(error: OSError, more: str = "") -> CommandExit:
    """Return the exit for output that cannot be written; `more` is added to the message."""
    code = TRY_AGAIN if error.errno in NO_SPACE else FAILED
    what = "standard output" if error.filename is None else error.filename
    return CommandExit(f"{what} cannot be written: {error.strerror}{more}", code)


def wrong_use(sentence: str) -> NoReturn:
    """End the command with a usage error."""
    raise click.UsageError(printable(sentence))


@contextmanager
def misuse_is_wrong_use() -> Iterator[None]:
    """Report a `ValueError` or `TypeError` of the block as a usage error."""
    try:
        yield
    except (ValueError, TypeError) as error:
        wrong_use(str(error))
