"""One SQLite file: opening it safely, its connections, and transactions that are durable.

Several processes may use one file. In each, one connection writes, behind a lock, and every reader
has a connection to itself. A call waits for the locks of other threads and processes `BUSY_S`
seconds in all, in short slices: between them Python handles signals, and `interrupt` ends the wait.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import apsw

from fairturn import crash
from fairturn.clock import stopwatch
from fairturn.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable
from fairturn.stores.sqlite.errors import free_bytes, translate, translated
from fairturn.stores.sqlite.schema import APPLICATION_ID, migrate

BUSY_S = 30.0
_SLICE_S = 0.05  # the longest part of a wait in which neither a signal nor `interrupt` is seen
SYNCHRONOUS = ("FULL", "NORMAL")
# Submissions stop while less than this is free, so that outcomes can still be written.
RESERVE_BYTES = 8 * 1_048_576
# A log of so many pages is written into the file as soon as nobody waits for the disk; one that
# becomes longer, by whoever has made it so.
LOG_PAGES = 4_000
LOG_PAGES_MAX = 6_000
# The header of a database file: what it begins with, and where in it two numbers stand.
_MAGIC = b"SQLite format 3\x00"
_HEADER_BYTES, _COOKIE_AT, _APPLICATION_AT = 100, 40, 68
_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "fuse", "afs", "ceph")

_SETUP = """
    PRAGMA foreign_keys = ON;
    PRAGMA trusted_schema = OFF;
    PRAGMA cell_size_check = ON;
    PRAGMA mmap_size = 0;
    PRAGMA cache_size = -16384;
    PRAGMA temp_store = MEMORY;
    PRAGMA journal_size_limit = 67108864;
"""


class _Patience:
    """How long one call waits for locks: until `BUSY_S` after its beginning, or an interrupt."""

    def __init__(self, interrupts: Callable[[], int], since_s: float | None = None) -> None:
        self._interrupts = interrupts
        self._seen = interrupts()
        self._until_s = (stopwatch() if since_s is None else since_s) + BUSY_S

    @property
    def is_over(self) -> bool:
        return stopwatch() >= self._until_s or self._interrupts() != self._seen

    def wait(self, calls: int) -> bool:
        """SQLite's busy handler: wait a moment, and return whether to try again."""
        if self.is_over:
            return False
        time.sleep(min(_SLICE_S, 0.001 * (calls + 1), max(0.0, self._until_s - stopwatch())))
        return True


class Database:
    """A file with the schema of this version, or an error that says why not."""

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
        # Of the list of connections. No disk is waited for under it, so readers do not wait for a
        # writer's fsync. A thread that takes both takes the writer's first.
        self._shelf = threading.RLock()
        # With a log, a commit is whole without an fsync; it may only be undone by a power cut.
        self._may_sync_later = synchronous == "FULL" and not self._network
        self._syncs = True  # whether commits wait for the disk at the moment
        self._unsynced = False
        self.log_is_long = False
        self.damage: StoreError | None = None  # the last that a call of this process met
        self._interrupts = 0
        self._idle_readers: list[apsw.Connection] = []
        self._all: list[apsw.Connection] = []
        self._closed = False
        refuse_foreign_file(self.path)
        # Documents are private: only the owner may read a new file. SQLite gives the files beside
        # it the same mode.
        with suppress(OSError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            with self._translated():
                self._writer = self._connect(self._new_patience())
                self._writer.set_wal_hook(self._wrote)
                migrate(self._writer, str(path))
        except BaseException:
            self.close()
            raise

    def _connect(self, patience: _Patience) -> apsw.Connection:
        inode = self._inode()
        connection = apsw.Connection(str(self.path))
        self._all.append(connection)
        connection.set_busy_handler(patience.wait)
        self._refuse_replaced(connection, inode)
        # The plan never depends on a bound value. Otherwise SQLite compiles a statement anew each
        # time that it is bound to other values, which makes it up to ten times slower.
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        connection.execute(_SETUP).fetchall()  # a pragma that answers holds up those after it
        _use_journal(connection, "delete" if self._network else "wal", patience)
        connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        return connection

    def _inode(self) -> int | None:
        with suppress(OSError):
            return self.path.stat().st_ino
        return None

    def _refuse_replaced(self, connection: apsw.Connection, inode: int | None) -> None:
        """Refuse a file that `fairturn restore` has replaced while this process waited for its
        lock: SQLite would write the log of the new file into the old one, also on closing."""
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        connection.execute("SELECT 1 FROM sqlite_schema").fetchone()  # with the lock, from now on
        if self._inode() != inode:
            self._all.remove(connection)
            connection.close()
            raise StoreUnavailable(f"{self.path} was replaced while it was opened; try again")
        connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)

    def _translated(self) -> AbstractContextManager[None]:
        return translated(self.path, self._note_damage)

    def _note_damage(self, error: StoreError) -> None:
        self.damage = error

    def _new_patience(self, since_s: float | None = None) -> _Patience:
        return _Patience(lambda: self._interrupts, since_s)

    def interrupt(self) -> None:
        """End every wait for a lock that is under way with `StoreBusy`."""
        self._interrupts += 1

    @contextmanager
    def _writing(self, patience: _Patience) -> Iterator[apsw.Connection]:
        """The connection that writes, for one thread at a time."""
        try:
            while not self._closed and not self._lock.acquire(timeout=_SLICE_S):
                if patience.is_over:
                    raise translate(apsw.BusyError("database is locked"), self.path)
            if self._closed:
                raise StoreUnavailable(f"{self.path} was closed")
            self._writer.set_busy_handler(patience.wait)
            yield self._writer
        finally:
            # Not held if the wait was ended; a signal can end it just after the lock was taken.
            with suppress(RuntimeError):
                self._lock.release()

    @contextmanager
    def writing(
        self, what: str, *, synced: bool = True, since_s: float | None = None
    ) -> Iterator[apsw.Connection]:
        """One transaction that writes: committed when the block ends, undone if it raises. If it
        need not be `synced`, a power cut may undo it until the next one, or `sync`. The wait for
        the lock counts from `since_s`, or from now."""
        self.check_process()
        patience = self._new_patience(since_s)
        with self._translated(), self._writing(patience) as writer, self._lightly(synced):
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
        """One transaction that only reads, under the write lock."""
        self.check_process()
        with self._translated(), self._writing(self._new_patience(None)) as writer:
            try:
                writer.execute("BEGIN IMMEDIATE")
                yield writer
            finally:
                _roll_back(writer)

    @contextmanager
    def _lightly(self, synced: bool) -> Iterator[None]:
        """Let a commit go without an fsync, where that is possible; under the lock."""
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

    def _wrote(self, writer: apsw.Connection, name: str, pages: int) -> int:
        """A commit has made the log this long. One that has changed nothing does not come here."""
        self._unsynced = self._unsynced or not self._syncs
        self.log_is_long = pages >= LOG_PAGES
        if pages >= LOG_PAGES_MAX:
            _write_log(writer)
        return apsw.SQLITE_OK

    def write_log(self) -> None:
        """Write the log into the file, beside other writers."""
        self.log_is_long = False
        with self.reading() as connection:
            _write_log(connection)

    def sync(self, *, always: bool = False) -> None:
        """Let everything that was committed survive a power cut; with `always` also what commits
        of `synchronous` NORMAL have left to the next checkpoint."""
        left = always and self._synchronous == "NORMAL" and not self._network
        if not (self._unsynced or left):
            return
        with self._shelf:
            if self._closed:
                return  # closing has written the log into the file, or another process has it
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
        """One snapshot to read from."""
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
        """A connection that no other thread reads from; as many are made as read at once."""
        patience = self._new_patience()
        with self._shelf:
            if self._closed:
                raise StoreUnavailable(f"{self.path} was closed")
            if not self._idle_readers:
                return self._connect(patience)
            connection = self._idle_readers.pop()
            connection.set_busy_handler(patience.wait)
            return connection

    def _give_back(self, connection: apsw.Connection) -> None:
        """Keep a connection for the next reader, unless an error has left it in a transaction."""
        with self._shelf:
            if self._closed:
                return
            if connection.in_transaction:
                self._all.remove(connection)
                connection.close(True)
            else:
                self._idle_readers.append(connection)

    def changes_elsewhere(self, wait_s: float | None = None) -> int:
        """A number that changes when another connection has written. A thread that writes is waited
        for: `wait_s` at most, or as long as any call waits."""
        self.check_process()
        since_s = None if wait_s is None else stopwatch() + wait_s - BUSY_S
        with self._translated(), self._writing(self._new_patience(since_s)) as writer:
            version: int = writer.execute("PRAGMA data_version").get
            return version

    def refuse_if_full(self, size_bytes: int) -> None:
        """Refuse a submission while the disk has only the reserve left."""
        free = free_bytes(self.path)
        if free < RESERVE_BYTES + 2 * size_bytes:
            raise StoreFull(
                f"the disk of {self.path} has {free / 1_048_576:.1f} MiB left, of which "
                f"{RESERVE_BYTES // 1_048_576} MiB are kept for outcomes; make room and try again"
            )

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # closing in a forked child would drop the parent's locks
        self._closed = True  # before the interrupt: a call that begins after it must not wait
        self.interrupt()
        with self._lock, self._shelf:
            for connection in self._all:
                connection.close()
            self._all.clear()

    def check_process(self) -> None:
        """Refuse to work in a process that was forked from the one that opened the file."""
        if self._pid != os.getpid():
            raise StoreError(
                "this process was forked from the one that opened the queue; "
                "open it anew here (SQLite handles do not survive a fork)"
            )


def _roll_back(writer: apsw.Connection) -> None:
    """Undo the transaction under way. SQLite has undone it already after some errors, and reports
    the error of an unfinished statement once more."""
    with suppress(apsw.Error):
        if writer.in_transaction:
            writer.execute("ROLLBACK")
    if writer.in_transaction:
        writer.execute("ROLLBACK")


def _write_log(connection: apsw.Connection) -> None:
    with suppress(apsw.Error):  # somebody else does it; or the next one says what is wrong
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)


def _use_journal(connection: apsw.Connection, journal: str, patience: _Patience) -> None:
    """Switch the journal of a new file. SQLite calls no busy handler here, so we do."""
    calls = 0
    while connection.execute("PRAGMA journal_mode").get != journal:
        try:
            answer = connection.execute(f"PRAGMA journal_mode = {journal}").get
            if answer != journal:
                raise StoreRefused(
                    f"{connection.filename} lies where SQLite cannot keep a {journal} journal; "
                    "use a local disk"
                )
        except apsw.BusyError:
            calls += 1
            if not patience.wait(calls):
                raise


def refuse_engine(version: str) -> None:
    """Refuse an SQLite with the WAL-reset bug, which loses committed writes when a commit and a
    checkpoint overlap: 3.7.0 to 3.51.2, apart from 3.50.7 and 3.44.6 and their successors."""
    number = tuple(int(part) for part in version.split(".")[:3])
    if number >= (3, 51, 3) or number < (3, 7, 0):
        return
    if number[:2] in ((3, 50), (3, 44)) and number >= {50: (3, 50, 7), 44: (3, 44, 6)}[number[1]]:
        return
    raise StoreRefused(
        f"SQLite {version} can lose committed writes (the WAL-reset bug); "
        "install a newer apsw: python -m pip install -U apsw"
    )


def refuse_foreign_file(path: Path) -> None:
    """Look before SQLite does: opening some files as a database would already write to them."""
    if not path.parent.is_dir():
        raise StoreRefused(f"the folder {path.parent} does not exist; make it first")
    if path.is_dir():
        raise StoreRefused(f"{path} is a folder, not a database")
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreRefused(f"{path} cannot be read: {error.strerror}") from error
    if not header:
        return
    page_bytes = int.from_bytes(header[16:18], "big")
    if header[:16] != _MAGIC or page_bytes & (page_bytes - 1) or len(header) < _HEADER_BYTES:
        raise StoreRefused(f"{path} is not a database; it was left untouched")
    schema_cookie, application = (
        int.from_bytes(header[at : at + 4], "big") for at in (_COOKIE_AT, _APPLICATION_AT)
    )
    if application != APPLICATION_ID and (application or schema_cookie):
        raise StoreRefused(f"{path} is a database of another program; it was left untouched")


def refuse_network(path: Path, network: str | None, *, allowed: bool) -> None:
    """Refuse a path on a network file system, unless that is allowed."""
    if network and not allowed:
        raise StoreRefused(
            f"{path} lies on a {network} file system, where locks of SQLite are not "
            "reliable; use a local disk, or PostgreSQL for several machines "
            "(allow_network=True takes the risk, slowly)"
        )


def network_below(path: Path) -> str | None:
    """The type of a network or virtual file system below the path, where that can be seen."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return None
    parent = str(path.parent.resolve())
    best, kind = "", ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        if (parent + "/").startswith(mount.rstrip("/") + "/") and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind if kind.split(".")[0] in _NETWORK else None
