"""Operations on a whole SQLite file: inspection, snapshots, copies and replacement."""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from fairturn.clock import Uptime
from fairturn.errors import NoQueue, StoreBusy, StoreError, StoreFull
from fairturn.model import ContentRef
from fairturn.stores.inspection import Damage, Findings
from fairturn.stores.sqlite import audit, query
from fairturn.stores.sqlite.connection import BUSY_S, translated, user_of
from fairturn.stores.sqlite.rows import fetch
from fairturn.stores.sqlite.schema import newest_version, refuse_foreign_file, version_of
from fairturn.stores.values import RUNNING, WAITING

PAGES_AT_ONCE = 1_000
BESIDE = ("-wal", "-shm", "-journal")  # files that SQLite keeps beside a database

_MARK = "UPDATE queue SET is_copy = 1"
_READ_FAILED = (apsw.SQLITE_IOERR_READ, apsw.SQLITE_IOERR_SHORT_READ)

_QUEUE = "SELECT settings, boot, repairs FROM queue"
_EPOCH = "SELECT epoch, is_copy FROM queue"
# A scan of the primary key, past ended documents, to the first that is waiting.
_OLDEST_WAITING = f"""
    SELECT submitted_at FROM documents WHERE state = {WAITING} ORDER BY number LIMIT 1"""
_NEWEST = "SELECT submitted_at FROM documents ORDER BY number DESC LIMIT 1"
# Uses the index leases_until; the document's row has the exact end of its lease.
_EXPIRED = f"""
    SELECT count(*), min(d.lease_until) FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value
    WHERE l.until < ?1 AND d.state = {RUNNING} AND d.fence = l.fence AND d.lease_until < ?1"""
_UNDER_LEASE = "SELECT coalesce(sum(running), 0) FROM leases"

# In WAL mode every connection has a shared lock on these bytes (PENDING_BYTE in SQLite's os.h).
_LOCKED_FROM, _LOCKED_BYTES = 0x40000000, 512


# ── Inspection ───────────────────────────────────────────────────────────────────────────────────


class FileInspector:
    """Read access to a file for `fairturn doctor`. It creates, migrates and changes nothing."""

    def __init__(self, path: Path, connection: apsw.Connection) -> None:
        self.path = path
        self._connection = connection

    def schema(self) -> tuple[int, int]:
        """Return the schema version of the file, and the newest that this release supports."""
        return int(self._connection.pragma("user_version")), newest_version()

    def damage(self) -> list[str]:
        """Return the errors of SQLite's integrity check, which reads the whole file."""
        found = [str(text) for (text,) in self._connection.execute("PRAGMA integrity_check")]
        return [] if found == ["ok"] else found

    def has_queue(self) -> bool:
        """Return whether the file contains a complete queue: its creator may have been killed."""
        return bool(fetch(self._connection, _QUEUE))

    def find(self, uptime: Uptime) -> Findings:
        """Return the state of the queue."""
        ((settings, boot, repairs),) = fetch(self._connection, _QUEUE)
        running = self._connection.execute(_UNDER_LEASE).get
        expired, since = running, None
        if boot == uptime.boot:
            ((expired, until),) = fetch(self._connection, _EXPIRED, (uptime.at,))
            since = None if until is None else uptime.at - until
        return Findings(
            settings=settings,
            oldest_waiting_at=self._connection.execute(_OLDEST_WAITING).get,
            newest_at=self._connection.execute(_NEWEST).get,
            running=running,
            expired=expired,
            expired_since_us=since,
            repairs=repairs,
        )

    def epoch(self) -> tuple[int, bool]:
        """Return the epoch, and whether the file is a copy whose first write begins a new one."""
        ((epoch, is_copy),) = fetch(self._connection, _EPOCH)
        return epoch, bool(is_copy)

    def recount(self, advance: Callable[[int, int], None]) -> Iterator[Damage]:
        """Yield every stored value that does not agree with the documents."""
        return audit.recount(self._connection, advance)

    def contents(self) -> list[ContentRef]:
        """Return the contents outside the file that documents and results refer to."""
        return list(query.contents(self._connection))

    def log_bytes(self) -> int:
        log = self.path.with_name(f"{self.path.name}-wal")
        return log.stat().st_size if log.exists() else 0


@contextmanager
def examined(path: Path) -> Iterator[FileInspector]:
    """Open a queue's file for inspection; raise `StoreError` if it cannot be read."""
    refuse_foreign_file(path.absolute())
    with translated(path.absolute()):
        # Not read-only: a read-only connection cannot recover the log of a killed process.
        connection = apsw.Connection(str(path.absolute()), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(round(BUSY_S * 1000))
            connection.execute("PRAGMA query_only = ON; PRAGMA trusted_schema = OFF").fetchall()
            yield FileInspector(path.absolute(), connection)
        finally:
            connection.close(True)


# ── Snapshots and copies ─────────────────────────────────────────────────────────────────────────


@contextmanager
def snapshot_of(path: Path) -> Iterator[apsw.Connection]:
    """Begin a read transaction on a file that no process has open, such as a backup.

    Without a log the file is opened without locks and nothing is created beside it, so that a
    backup on a read-only medium can be read. With a log, SQLite creates an index of the log.
    """
    refuse_foreign_file(path)
    with translated(path), read_only(path) as connection:
        if not version_of(connection, str(path)):
            raise NoQueue(f"{path} is empty: it contains no queue")
        connection.execute("BEGIN")
        yield connection


@contextmanager
def read_only(path: Path) -> Iterator[apsw.Connection]:
    """Open a read-only connection; immutable, without locks, if there is no log."""
    connection = apsw.Connection(
        read_only_uri(path), flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    )
    try:
        yield connection
    finally:
        connection.close()


def read_only_uri(path: Path) -> str:
    """Return the name of a file for a connection that creates no file beside it, if possible."""
    log = Path(f"{path}-wal")
    is_complete = not (log.exists() and log.stat().st_size)
    return f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if is_complete else ''}"


def write_copy(
    snapshot: apsw.Connection, path: Path, progress: Callable[[float], None], *, marked: bool = True
) -> None:
    """Copy the file of a read transaction to a new path; call `progress` with the fraction done.

    Other connections can write to the file meanwhile; its write-ahead log grows until the copy
    ends. A `marked` copy begins a new epoch with its first write. When this returns, the copy is
    complete but not durable. A failed read raises the driver's error, which the caller translates
    with the name of the file.
    """
    try:
        copy = apsw.Connection(str(path))
    except apsw.Error as error:
        raise StoreError(f"{path} cannot be created: {error}") from error
    try:
        # No other process opens the copy before it is complete.
        copy.execute("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF").fetchall()
        with copy.backup("main", snapshot, "main") as backup:
            while not backup.done:
                backup.step(PAGES_AT_ONCE)
                progress(1 - backup.remaining / max(1, backup.page_count))
        if marked:
            copy.execute(_MARK)
        problems = [text for (text,) in copy.execute("PRAGMA integrity_check")]
    except apsw.FullError as error:
        raise StoreFull(f"the disk of {path} is full; the copy is not complete") from error
    except apsw.IOError as error:
        if getattr(error, "extendedresult", None) in _READ_FAILED:
            raise
        raise StoreError(f"{path} cannot be written: {error}") from error
    finally:
        copy.close()
    if problems != ["ok"]:
        raise apsw.CorruptError(problems[0])


# ── Replacement ──────────────────────────────────────────────────────────────────────────────────
#
# SQLite applies a write-ahead log to any file of the matching name: a new file beside the log of
# the old one would be damaged, and the old file without its log lacks the last transactions. So
# the log is checkpointed and removed first, under an exclusive lock; then one rename replaces the
# queue.


def refuse_open(path: Path) -> None:
    """Raise `StoreBusy` if another process has the file open. Outside WAL mode, as on a network
    file system, this detects a process only during a transaction."""
    with _locked(path):
        pass


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Lock the file exclusively, checkpointed and without a log, to rename another one over it.

    Raise `StoreBusy` if another process has it open. If the file is damaged, its log cannot be
    applied and is removed.
    """
    with translated(path):
        try:
            connection = _lock_exclusively(path)
        except apsw.BusyError as error:
            raise _in_use(path) from error
        except (apsw.CorruptError, apsw.NotADBError):
            connection = None
    if connection is None:
        with _locked(path):
            remove_beside(path)
            yield
        return
    try:
        remove_beside(path)
        yield
    finally:
        connection.close()


def _lock_exclusively(path: Path) -> apsw.Connection:
    """Return a connection with the exclusive lock, after a checkpoint."""
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
    """Take SQLite's lock without SQLite, which cannot open a damaged file. This process must have
    no connection to the file: closing a descriptor releases all its POSIX locks on the file."""
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


def remove_beside(path: Path) -> None:
    """Remove the files that SQLite keeps beside a database."""
    for ending in BESIDE:
        path.with_name(path.name + ending).unlink(missing_ok=True)
