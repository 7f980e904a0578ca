"""The driver's errors as ours. Every path to SQLite, read or write, passes through `translated`."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from fairturn.errors import StoreBusy, StoreError, StoreFull, StoreRefused
from fairturn.stores.sqlite.locks import holder_of

# With less than this free, an I/O error is the disk's: SQLite cannot make its -shm and -wal files.
FREE_BYTES_MIN = 128 * 1024


@contextmanager
def translated(
    path: Path, on_damage: Callable[[StoreError], None] = lambda error: None
) -> Iterator[None]:
    """Raise the driver's errors as ours; `on_damage` is called with those that mean damage."""
    try:
        yield
    except apsw.Error as error:
        ours = translate(error, path)
        if isinstance(error, apsw.CorruptError | apsw.NotADBError):
            on_damage(ours)
        raise ours from error


def translate(error: apsw.Error, path: Path) -> StoreError:
    """The error of our tree that a driver's error stands for."""
    if isinstance(error, apsw.FullError) or (
        isinstance(error, apsw.IOError | apsw.CantOpenError) and free_bytes(path) < FREE_BYTES_MIN
    ):
        return StoreFull(f"the disk of {path} is full; nothing was stored by this call")
    if isinstance(error, apsw.NotADBError):
        return StoreRefused(f"{path} is not a database; it was left untouched")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        holder = holder_of(path)
        by = "another process" if holder is None else str(holder)
        return StoreBusy(f"{path} is locked by {by}; try again")
    if isinstance(error, apsw.CantOpenError | apsw.ReadOnlyError | apsw.PermissionsError):
        return StoreRefused(f"{path} cannot be opened for writing: {error}")
    if isinstance(error, apsw.CorruptError):
        return StoreError(f"{path} is damaged ({error}); restore it from a backup")
    return StoreError(f"{path}: {error}")


def free_bytes(path: Path) -> int:
    """The bytes that this user can still write on the file system of the path."""
    try:
        stat = os.statvfs(path.parent)
    except OSError as error:
        raise StoreError(f"the folder {path.parent} cannot be used: {error.strerror}") from error
    return stat.f_bavail * stat.f_frsize
