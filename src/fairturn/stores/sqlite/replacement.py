"""Replacing a file that no other process has open.

SQLite applies a write-ahead log to whatever file has its name: a new file beside the log of the old
one would be damaged. And the old file without its log lacks the last transactions. So the log is
written into the old file first, under a lock that no other process can share. Then there is no log,
and one rename replaces a whole queue by another.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from fairturn.errors import StoreBusy
from fairturn.stores.sqlite.errors import translated
from fairturn.stores.sqlite.locks import user_of

# With a log, every connection keeps a shared lock on these bytes (PENDING_BYTE in SQLite's os.h).
_LOCKED_FROM, _LOCKED_BYTES = 0x40000000, 512
BESIDE = ("-wal", "-shm", "-journal")


def refuse_open(path: Path) -> None:
    """Raise `StoreBusy` if another process has the file open. Without a log, as on a network file
    system, a process is noticed only during a transaction."""
    with _locked(path):
        pass


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Keep other processes from the file, complete and without a log beside it, to rename another
    one over it. Raises `StoreBusy` if a process has it open. A log that cannot be applied, because
    the file is damaged, is removed."""
    with translated(path):
        try:
            connection = _hold(path)
        except apsw.BusyError as error:
            raise _in_use(path) from error
        except (apsw.CorruptError, apsw.NotADBError):
            connection = None
    if connection is None:
        with _locked(path):
            _remove_beside(path)
            yield
        return
    try:
        _remove_beside(path)
        yield
    finally:
        connection.close()


def _hold(path: Path) -> apsw.Connection:
    """A connection that holds the exclusive lock, with the log written into the file."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
        connection.execute("PRAGMA synchronous = FULL")
        if connection.execute("PRAGMA journal_mode = DELETE").get != "delete":
            raise apsw.BusyError("database is locked")
        connection.execute("BEGIN EXCLUSIVE")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The lock without SQLite, which could not open a damaged file. This process must have no
    connection to the file: closing a descriptor ends all locks that a process has on it."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, _LOCKED_BYTES, _LOCKED_FROM)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise _in_use(path) from error
        yield
    finally:
        os.close(descriptor)


def _in_use(path: Path) -> StoreBusy:
    user = user_of(path)
    by = "another process" if user is None else str(user)
    return StoreBusy(f"{path} is in use by {by}; stop every process that uses it")


def _remove_beside(path: Path) -> None:
    for beside in BESIDE:
        path.with_name(path.name + beside).unlink(missing_ok=True)
