"""One SQLite file: its connections, durable transactions, and error mapping.

Each process has one connection that writes, guarded by a lock, and a connection for each concurrent
reader. A call waits up to `BUSY_S` for the locks of other threads and processes, in slices of
`_SLICE_S`, between which Python handles signals and `interrupt` takes effect.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import apsw

from fairturn.clock import stopwatch
from fairturn.errors import StoreBusy, StoreError, StoreFull, StoreRefused, StoreUnavailable
from fairturn.stores import crash
from fairturn.stores.sqlite.schema import (
    migrate,
    network_below,
    refuse_engine,
    refuse_foreign_file,
    refuse_network,
)

BUSY_S = 30.0
_SLICE_S = 0.05
ERASE_S = 2.0  # `truncate_log` blocks writers while it waits for readers
SYNCHRONOUS = ("FULL", "NORMAL")
# With less than this free, submissions are rejected, so that outcomes can still be written.
RESERVE_BYTES = 8 * 1_048_576
# A write-ahead log of this length is checkpointed by an idle thread, and one of the maximum by the
# thread that commits.
LOG_PAGES = 4_000
LOG_PAGES_MAX = 6_000
_SETUP = """
    PRAGMA foreign_keys = ON;
    PRAGMA trusted_schema = OFF;
    PRAGMA cell_size_check = ON;
    PRAGMA mmap_size = 0;
    PRAGMA cache_size = -16384;
    PRAGMA temp_store = MEMORY;
    PRAGMA journal_size_limit = 67108864;
    PRAGMA secure_delete = ON;
"""


class _LockTimeout:
    """The end of one call's waits for locks: `BUSY_S` after its start, or an interrupt."""

    def __init__(self, interrupts: Callable[[], int], since_s: float | None = None) -> None:
        self._interrupts = interrupts
        self._seen = interrupts()
        self._until_s = (stopwatch() if since_s is None else since_s) + BUSY_S

    @property
    def is_over(self) -> bool:
        return stopwatch() >= self._until_s or self._interrupts() != self._seen

    def wait(self, calls: int) -> bool:
        """SQLite's busy handler: sleep, and return whether to retry."""
        if self.is_over:
            return False
        time.sleep(min(_SLICE_S, 0.001 * (calls + 1), max(0.0, self._until_s - stopwatch())))
        return True


class Database:
    """An open file with the schema of this release. It has more than 15 attributes and 20 methods
    because connections, locks and fsync depend on each other."""

    def __init__(self, path: Path, *, synchronous: str, allow_network: bool) -> None:
        if synchronous not in SYNCHRONOUS:
            raise ValueError(f"synchronous is {synchronous!r}; it must be FULL or NORMAL")
        refuse_engine(apsw.sqlite_lib_version())
        self.path = path.absolute()
        self._log = f"{self.path}-wal"
        self._synchronous = synchronous
        self._network = network_below(self.path)
        refuse_network(path, self._network, allowed=allow_network)
        self._pid = os.getpid()
        self._lock = threading.RLock()  # of the writer
        # Never held during disk I/O, so that readers do not block on a writer's fsync. Lock order:
        # `_lock` first.
        self._connections_lock = threading.RLock()
        # With a write-ahead log, a commit without fsync is atomic, but a power cut may undo it.
        self._may_sync_later = synchronous == "FULL" and not self._network
        self._syncs = True  # whether commits call fsync now
        self._unsynced = False
        self.log_is_long = False
        self.damage: StoreError | None = None  # the last error of this process that means damage
        self._interrupts = 0
        self._idle_readers: list[apsw.Connection] = []
        self._all: list[apsw.Connection] = []
        self._closed = False
        refuse_foreign_file(self.path)
        # Only the owner may read a new file. SQLite gives its -wal and -shm files the same mode.
        with suppress(OSError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            with self._translated():
                self._writer = self._connect(self._new_timeout())
                self._writer.set_wal_hook(self._after_commit)
                migrate(self._writer, str(path))
        except BaseException:
            self.close()
            raise

    def _connect(self, timeout: _LockTimeout) -> apsw.Connection:
        inode = self._inode()
        connection = apsw.Connection(str(self.path))
        self._all.append(connection)
        connection.set_busy_handler(timeout.wait)
        self._refuse_replaced(connection, inode)
        # Query plans must not depend on bound values: SQLite would compile a statement again for
        # other values, which is up to ten times slower (decision 0003).
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        connection.execute(_SETUP).fetchall()  # a pragma that returns rows blocks those after it
        _use_journal(connection, "delete" if self._network else "wal", timeout)
        connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        return connection

    def _inode(self) -> int | None:
        with suppress(OSError):
            return self.path.stat().st_ino
        return None

    def _refuse_replaced(self, connection: apsw.Connection, inode: int | None) -> None:
        """Raise `StoreUnavailable` if `fairturn restore` has replaced the file during the wait for
        its lock. SQLite would write the log of the new file into the old one, even on close."""
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.execute("SELECT 1 FROM sqlite_schema").fetchone()  # takes the lock
        if self._inode() != inode:
            self._all.remove(connection)
            connection.close()
            raise StoreUnavailable(f"{self.path} was replaced while it was opened; try again")
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)

    def _translated(self) -> AbstractContextManager[None]:
        return translated(self.path, self._note_damage)

    def _note_damage(self, error: StoreError) -> None:
        self.damage = error

    def _new_timeout(self, since_s: float | None = None) -> _LockTimeout:
        return _LockTimeout(lambda: self._interrupts, since_s)

    def interrupt(self) -> None:
        """Raise `StoreBusy` in every call that is waiting for a lock."""
        self._interrupts += 1

    @contextmanager
    def _locked_writer(self, timeout: _LockTimeout) -> Iterator[apsw.Connection]:
        """Lock the connection that writes."""
        try:
            while not self._closed and not self._lock.acquire(timeout=_SLICE_S):
                if timeout.is_over:
                    raise translate(apsw.BusyError("database is locked"), self.path)
            if self._closed:
                raise StoreUnavailable(f"{self.path} was closed")
            self._writer.set_busy_handler(timeout.wait)
            yield self._writer
        finally:
            # The lock is not held after a timeout, but may be if a signal interrupted `acquire`.
            with suppress(RuntimeError):
                self._lock.release()

    @contextmanager
    def writing(
        self, what: str, *, synced: bool = True, since_s: float | None = None
    ) -> Iterator[apsw.Connection]:
        """Run a write transaction, which is rolled back if the block raises.

        With `synced=False` a power cut may undo it until the next synced transaction or `sync`. The
        timeout for locks starts at `since_s`, or now. `what` names the crash points.
        """
        self.check_process()
        timeout = self._new_timeout(since_s)
        with self._translated(), self._locked_writer(timeout) as writer, self._fsync(synced):
            try:
                writer.execute("BEGIN IMMEDIATE")
                yield writer
                crash.point(f"{what}-before-commit")
                writer.execute("COMMIT")
                crash.point(f"{what}-after-commit")
            except BaseException:
                _roll_back(writer)
                raise

    @contextmanager
    def holding(self) -> Iterator[apsw.Connection]:
        """Run a read transaction under the write lock."""
        self.check_process()
        with self._translated(), self._locked_writer(self._new_timeout(None)) as writer:
            try:
                writer.execute("BEGIN IMMEDIATE")
                yield writer
            finally:
                _roll_back(writer)

    @contextmanager
    def _fsync(self, synced: bool) -> Iterator[None]:
        """Commit without fsync if the caller and the journal allow it; under the lock."""
        if synced or not self._may_sync_later:
            yield
            return
        self._writer.execute("PRAGMA synchronous = NORMAL")
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True
            self._writer.execute("PRAGMA synchronous = FULL")

    def _after_commit(self, writer: apsw.Connection, name: str, pages: int) -> int:
        """SQLite's WAL hook, called after each commit that has changed the file."""
        self._unsynced = self._unsynced or not self._syncs
        self.log_is_long = pages >= LOG_PAGES
        if pages >= LOG_PAGES_MAX:
            _checkpoint(writer)
        return apsw.SQLITE_OK

    def checkpoint(self) -> None:
        """Checkpoint the write-ahead log without blocking writers."""
        self.log_is_long = False
        with self.reading() as connection:
            _checkpoint(connection)

    def truncate_log(self) -> bool:
        """Checkpoint and truncate the write-ahead log, so that neither it nor the file contains
        deleted rows. Return False if a reader or another process prevents it for `ERASE_S`."""
        if self._network:
            return True  # its journal is deleted after each transaction
        timeout = self._new_timeout(stopwatch() + ERASE_S - BUSY_S)
        with self._translated(), self._locked_writer(timeout) as writer:
            try:
                writer.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except apsw.BusyError:
                return False
            return True

    def sync(self, *, always: bool = False) -> None:
        """Make all commits durable; with `always` also those of `synchronous` NORMAL."""
        left = always and self._synchronous == "NORMAL" and not self._network
        if not (self._unsynced or left):
            return
        with self._connections_lock:
            if self._closed:
                return  # closing checkpoints the log, unless another process has the file open
            self._unsynced = False
        try:
            descriptor = os.open(self._log, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._unsynced = True
            raise StoreUnavailable(f"{self._log} cannot be synced: {error.strerror}") from error

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """Run a read transaction on one snapshot."""
        self.check_process()
        with self._translated():
            connection = self._take_reader()
            try:
                connection.execute("BEGIN")
                yield connection
                connection.execute("COMMIT")
            except apsw.ConnectionClosedError as error:
                raise StoreUnavailable(f"{self.path} was closed") from error
            finally:
                self._give_back(connection)

    def _take_reader(self) -> apsw.Connection:
        """Return an idle connection, or a new one."""
        timeout = self._new_timeout()
        with self._connections_lock:
            if self._closed:
                raise StoreUnavailable(f"{self.path} was closed")
            if not self._idle_readers:
                return self._connect(timeout)
            connection = self._idle_readers.pop()
            connection.set_busy_handler(timeout.wait)
            return connection

    def _give_back(self, connection: apsw.Connection) -> None:
        """Return a connection to the pool, or close it if an error has left it in a transaction."""
        with self._connections_lock:
            if self._closed:
                return
            if connection.in_transaction:
                self._all.remove(connection)
                connection.close(True)
            else:
                self._idle_readers.append(connection)

    def changes_elsewhere(self, wait_s: float | None = None) -> int:
        """Return a number that changes when another connection has written. Waits for a writing
        thread up to `wait_s`, or up to `BUSY_S`."""
        self.check_process()
        since_s = None if wait_s is None else stopwatch() + wait_s - BUSY_S
        with self._translated(), self._locked_writer(self._new_timeout(since_s)) as writer:
            version: int = writer.execute("PRAGMA data_version").get
            return version

    def refuse_if_full(self, size_bytes: int) -> None:
        """Raise `StoreFull` if a submission of this size would use the reserve of the disk."""
        free = free_bytes(self.path)
        if free < RESERVE_BYTES + 2 * size_bytes:
            raise StoreFull(
                f"the disk of {self.path} has {free / 1_048_576:.1f} MiB left, of which "
                f"{RESERVE_BYTES // 1_048_576} MiB are kept for outcomes; make room and try again"
            )

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # closing in a forked child would drop the parent's locks
        self._closed = True  # before the interrupt, because later calls must not wait
        self.interrupt()
        with self._lock, self._connections_lock:
            for connection in self._all:
                connection.close()
            self._all.clear()

    def check_process(self) -> None:
        """Raise `StoreError` in a process that was forked from the one that opened the file."""
        if self._pid != os.getpid():
            raise StoreError(
                "this process was forked from the one that opened the queue; "
                "open it again in this process (SQLite handles do not survive a fork)"
            )


def _roll_back(writer: apsw.Connection) -> None:
    """Roll back the open transaction, if any. After some errors SQLite has already rolled it back,
    and ROLLBACK may re-raise the error from an unfinished statement."""
    with suppress(apsw.Error):
        if writer.in_transaction:
            writer.execute("ROLLBACK")
    if writer.in_transaction:
        writer.execute("ROLLBACK")


def _checkpoint(connection: apsw.Connection) -> None:
    with suppress(apsw.Error):  # another process checkpoints, or the next call raises the error
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)


def _use_journal(connection: apsw.Connection, journal: str, timeout: _LockTimeout) -> None:
    """Switch the journal mode, with retries: SQLite does not call the busy handler here."""
    calls = 0
    while connection.execute("PRAGMA journal_mode").get != journal:
        try:
            if connection.execute(f"PRAGMA journal_mode = {journal}").get != journal:
                raise StoreRefused(
                    f"SQLite cannot use a {journal} journal for {connection.filename}; "
                    "use a local disk"
                )
        except apsw.BusyError:
            calls += 1
            if not timeout.wait(calls):
                raise


# With less than this free, an I/O error means a full disk: SQLite cannot create -shm and -wal.
FREE_BYTES_MIN = 128 * 1024


@contextmanager
def translated(
    path: Path, on_damage: Callable[[StoreError], None] = lambda error: None
) -> Iterator[None]:
    """Raise the driver's errors as ours, after calling `on_damage` for those that mean damage."""
    try:
        yield
    except apsw.Error as error:
        ours = translate(error, path)
        if isinstance(error, apsw.CorruptError | apsw.NotADBError):
            on_damage(ours)
        raise ours from error


def translate(error: apsw.Error, path: Path) -> StoreError:
    """Return the error of our tree for a driver's error."""
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
    """Return the free bytes for this user on the file system of the path."""
    try:
        stat = os.statvfs(path.parent)
    except OSError as error:
        raise StoreError(f"the folder {path.parent} cannot be used: {error.strerror}") from error
    return stat.f_bavail * stat.f_frsize


_LOCKS = Path("/proc/locks")
_WAL_WRITE_BYTE = 120  # WAL_WRITE_LOCK in the -shm file
_RESERVED_BYTE = 0x40000001  # RESERVED_BYTE in the database file


class Holder(NamedTuple):
    """A process that holds the write lock."""

    pid: int
    name: str
    is_stopped: bool  # by SIGSTOP, a terminal or a debugger

    def __str__(self) -> str:
        stopped = ", which is stopped" if self.is_stopped else ""
        return f"process {self.pid} ({self.name}{stopped})"


def are_listed() -> bool:
    """Return whether this platform lists locks and the processes that hold them."""
    return _LOCKS.exists()


def holder_of(path: Path) -> Holder | None:
    """Return the process that holds the write lock of a database; None if there is none, or if it
    is in another PID namespace, such as another container."""
    wanted = [
        (*identity, str(byte))
        for name, byte in ((f"{path}-shm", _WAL_WRITE_BYTE), (str(path), _RESERVED_BYTE))
        if (identity := _identity(name)) is not None
    ]
    for pid, mode, (device, inode), byte in _listed():
        if mode == "WRITE" and {(device, inode, byte), ("", inode, byte)} & {*wanted}:
            return _described(pid)
    return None


def user_of(path: Path) -> Holder | None:
    """Return a process that has a database open, or None, as `holder_of` does. With a write-ahead
    log, every connection holds a lock on the database file."""
    wanted = _identity(str(path))
    for pid, _, (device, inode), _ in _listed():
        if wanted in ((device, inode), ("", inode)):
            return _described(pid)
    return None


def _listed() -> Iterator[tuple[int, str, tuple[str, str], str]]:
    """Yield the locks that processes hold: pid, READ or WRITE, device and inode, first byte."""
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # 1: POSIX  ADVISORY  WRITE 1234 fe:00:2147372 120 120; a waiting lock has "->" before it.
        fields = line.split()
        if len(fields) == 8 and fields[1] == "POSIX":
            device, _, inode = fields[5].rpartition(":")
            yield int(fields[4]), fields[3], (device, inode), fields[6]


def _identity(name: str) -> tuple[str, str] | None:
    """Return the device and the inode of a file in the format of /proc/locks. The device is empty
    where `stat` may return another one than the kernel, as on btrfs and overlay file systems."""
    try:
        stat = Path(name).stat()
    except OSError:
        return None
    major, minor = os.major(stat.st_dev), os.minor(stat.st_dev)
    return f"{major:02x}:{minor:02x}" if major else "", str(stat.st_ino)


def _described(pid: int) -> Holder:
    # The command line is not read, because it may contain passwords.
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return Holder(pid, "ended", is_stopped=False)
    name, _, rest = stat.partition("(")[2].rpartition(")")
    return Holder(pid, name, is_stopped=rest.split()[0] in "Tt")
