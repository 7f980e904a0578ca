"""One SQLite file: opening it safely, its connections, and transactions that are durable.

Several processes may use one file. In each, one connection writes, behind a lock, and whoever reads
has another one to itself meanwhile.
"""

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path

import apsw

from fairturn import crash
from fairturn.clock import stopwatch
from fairturn.errors import StoreError, StoreFull, StoreRefused, StoreUnavailable

APPLICATION_ID = 0x46544E31  # "FTN1", in the header of the file
BUSY_MS = 30_000
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

_SETUP = f"""
    PRAGMA busy_timeout = {BUSY_MS};
    PRAGMA foreign_keys = ON;
    PRAGMA trusted_schema = OFF;
    PRAGMA cell_size_check = ON;
    PRAGMA mmap_size = 0;
    PRAGMA cache_size = -16384;
    PRAGMA temp_store = MEMORY;
    PRAGMA journal_size_limit = 67108864;
"""


class Database:
    """A file with the schema of this version, or an error that says why not."""

    def __init__(self, path: Path, *, synchronous: str, allow_network: bool) -> None:
        if synchronous not in SYNCHRONOUS:
            raise ValueError(f"synchronous is {synchronous!r}; it must be FULL or NORMAL")
        refuse_engine(apsw.sqlite_lib_version())
        self.path = path.absolute()
        self._folder = str(self.path.parent)
        self._synchronous = synchronous
        self._network = network_below(self.path)
        if self._network and not allow_network:
            raise StoreRefused(
                f"{path} lies on a {self._network} file system, where locks of SQLite are not "
                "reliable; use a local disk, or PostgreSQL for several machines "
                "(allow_network=True takes the risk, slowly)"
            )
        self._pid = os.getpid()
        self._lock = threading.RLock()  # of the writer
        # Of the connections. Nobody waits for a disk with it, so whoever reads does not wait for
        # the fsync of whoever writes. Who takes both takes the writer's first.
        self._shelf = threading.RLock()
        # With a log, a commit is whole without an fsync; it may only be forgotten in a power cut.
        self._may_sync_later = synchronous == "FULL" and not self._network
        self._syncs = True  # whether commits wait for the disk at the moment
        self._unsynced = False
        self.log_is_long = False
        self._idle_readers: list[apsw.Connection] = []
        self._all: list[apsw.Connection] = []
        self._closed = False
        refuse_foreign_file(self.path)
        # What customers send is nobody else's: only the owner may read a new file. SQLite gives the
        # files beside it the same mode.
        with suppress(OSError):
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            self._writer = self._connect()
            self._writer.set_wal_hook(self._wrote)
            migrate(self._writer, str(path))
        except apsw.Error as error:
            self.close()
            raise self.translate(error) from error
        except StoreError:
            self.close()
            raise

    def _connect(self) -> apsw.Connection:
        connection = apsw.Connection(str(self.path))
        self._all.append(connection)
        # The plan never depends on a bound value. Otherwise SQLite compiles a statement anew each
        # time that it is bound to other values, which makes it up to ten times slower.
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        connection.execute(_SETUP).fetchall()  # a pragma that answers holds up those after it
        _use_journal(connection, "delete" if self._network else "wal")
        connection.execute(f"PRAGMA synchronous = {self._synchronous}")
        return connection

    @contextmanager
    def writing(self, what: str, *, synced: bool = True) -> Iterator[apsw.Connection]:
        """One transaction that writes: committed when the block ends, undone if it raises. If it
        need not be `synced`, a power cut may undo it until the next one, or `sync`."""
        self.check_process()
        with self._lock, self._lightly(synced):
            if self._closed:
                raise StoreUnavailable(f"{self.path} was closed")
            writer = self._writer
            try:
                writer.execute("BEGIN IMMEDIATE")
                yield writer
                crash.point(f"{what}-before-commit")
                writer.execute("COMMIT")
                crash.point(f"{what}-after-commit")
            except BaseException as error:
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
                if isinstance(error, apsw.Error):
                    raise self.translate(error) from error
                raise

    @contextmanager
    def _lightly(self, synced: bool) -> Iterator[None]:
        """Let a commit go without an fsync, where that is possible; under the lock."""
        if synced or self._closed or not self._may_sync_later:
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
        """A commit has made the log so long. One that has changed nothing does not come here."""
        self._unsynced = self._unsynced or not self._syncs
        self.log_is_long = pages >= LOG_PAGES
        if pages >= LOG_PAGES_MAX:
            _write_log(writer)
        return apsw.SQLITE_OK

    def write_log(self) -> None:
        """Write the log into the file, beside whoever writes."""
        self.log_is_long = False
        with self.reading() as connection:
            _write_log(connection)

    def sync(self) -> None:
        """Let everything that was committed survive a power cut."""
        if not self._unsynced:
            return
        with self._lock:
            if self._closed:
                return  # closing has written the log into the file, or another process has it
            log = self._writer.filename_wal
            self._unsynced = False
        try:
            descriptor = os.open(log, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._unsynced = True
            raise StoreUnavailable(f"{log} cannot be synced: {error.strerror}") from error

    @contextmanager
    def holding(self) -> Iterator[apsw.Connection]:
        """One transaction that only reads, and lets nobody write until the block ends."""
        self.check_process()
        with self._lock:
            try:
                self._writer.execute("BEGIN IMMEDIATE")
                yield self._writer
            except apsw.Error as error:
                raise self.translate(error) from error
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """One snapshot to read from."""
        self.check_process()
        connection = self._take_reader()
        try:
            connection.execute("BEGIN")
            yield connection
        except apsw.ConnectionClosedError as error:
            raise StoreUnavailable(f"{self.path} was closed") from error
        except apsw.Error as error:
            raise self.translate(error) from error
        finally:
            with self._shelf:
                if not self._closed:
                    if connection.in_transaction:
                        connection.execute("COMMIT")
                    self._idle_readers.append(connection)

    def _take_reader(self) -> apsw.Connection:
        """A connection that nobody reads from at the moment; as many are made as read at once."""
        with self._shelf:
            if self._closed:
                raise StoreUnavailable(f"{self.path} was closed")
            try:
                return self._idle_readers.pop() if self._idle_readers else self._connect()
            except apsw.Error as error:
                raise self.translate(error) from error

    def changes_elsewhere(self) -> int:
        """A number that changes when another connection has written."""
        self.check_process()
        with self._lock:
            if self._closed:
                raise StoreUnavailable(f"{self.path} was closed")
            try:
                version: int = self._writer.execute("PRAGMA data_version").get
            except apsw.Error as error:
                raise self.translate(error) from error
            return version

    def refuse_if_full(self, size_bytes: int) -> None:
        """Refuse a submission while the disk has only the reserve left."""
        stat = os.statvfs(self._folder)
        free = stat.f_bavail * stat.f_frsize
        if free < RESERVE_BYTES + 2 * size_bytes:
            raise StoreFull(
                f"the disk of {self.path} has {free / 1_048_576:.1f} MiB left, of which "
                f"{RESERVE_BYTES // 1_048_576} MiB are kept for outcomes; make room and try again"
            )

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # closing in a forked child would drop the parent's locks
        with self._lock, self._shelf:
            self._closed = True
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

    def translate(self, error: apsw.Error) -> StoreError:
        """A driver's error as one of ours: it never leaves the store."""
        if isinstance(error, apsw.FullError):
            return StoreFull(f"the disk of {self.path} is full; nothing was stored by this call")
        if isinstance(error, apsw.NotADBError):
            return StoreRefused(f"{self.path} is not a database; it was left untouched")
        if isinstance(error, apsw.BusyError | apsw.LockedError):
            return StoreUnavailable(
                f"{self.path} was locked by another process for {BUSY_MS // 1000} s; try again"
            )
        if isinstance(error, apsw.CantOpenError | apsw.ReadOnlyError | apsw.PermissionsError):
            return StoreRefused(f"{self.path} cannot be opened for writing: {error}")
        if isinstance(error, apsw.CorruptError):
            return StoreError(f"{self.path} is damaged ({error}); restore it from a backup")
        return StoreError(f"{self.path}: {error}")


def _write_log(connection: apsw.Connection) -> None:
    with suppress(apsw.Error):  # somebody else does it; or the next one says what is wrong
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)


def _use_journal(connection: apsw.Connection, journal: str) -> None:
    """Switch the journal of a new file. SQLite does not wait for others here, so we do."""
    until = stopwatch() + BUSY_MS / 1000
    while connection.execute("PRAGMA journal_mode").get != journal:
        try:
            answer = connection.execute(f"PRAGMA journal_mode = {journal}").get
            if answer != journal:
                raise StoreRefused(
                    f"{connection.filename} lies where SQLite cannot keep a {journal} journal; "
                    "use a local disk"
                )
        except apsw.BusyError:
            if stopwatch() > until:
                raise
            time.sleep(0.01)


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


def migrations() -> list[tuple[int, str]]:
    """The numbered steps from an empty file to this version's schema."""
    folder = resources.files("fairturn.stores.sqlite") / "migrations"
    steps = []
    for entry in folder.iterdir():
        match = re.fullmatch(r"(\d{4})_\w+\.sql", entry.name)
        if match:
            steps.append((int(match[1]), entry.read_text(encoding="utf-8")))
    return sorted(steps)


def migrate(connection: apsw.Connection, name: str) -> None:
    """Bring the file to this version's schema, one transaction a step; refuse a newer one."""
    steps = migrations()
    newest = steps[-1][0]
    connection.execute("BEGIN")  # one snapshot: another process may be making this schema now
    try:
        version = _schema(connection, name, newest)
    finally:
        connection.execute("COMMIT")
    for number, script in steps if version < newest else ():
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _schema(connection, name, newest) < number:
                connection.execute(script)
                connection.execute(f"PRAGMA user_version = {number}")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                crash.point("migrate-before-commit")
            connection.execute("COMMIT")
            crash.point("migrate-after-commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _schema(connection: apsw.Connection, name: str, newest: int) -> int:
    version = int(connection.pragma("user_version"))
    application = int(connection.pragma("application_id"))
    tables = connection.execute("SELECT count(*) FROM sqlite_schema").get
    if application != APPLICATION_ID and (tables or application or version):
        raise StoreRefused(f"{name} is a database of another program; it was left untouched")
    if version > newest:
        raise StoreRefused(
            f"{name} has schema {version} and this fairturn knows schemas up to {newest}; "
            "install the newer fairturn that made it (the file was left untouched)"
        )
    return version
