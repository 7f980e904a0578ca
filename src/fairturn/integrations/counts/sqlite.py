"""Counts in an SQLite file of their own, for applications on one machine."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from fairturn.clock import Clock, SystemClock
from fairturn.errors import StoreError, StoreRefused, StoreUnavailable
from fairturn.integrations.counts import TIMEOUT_S, Answer
from fairturn.priority import Count, Rule
from fairturn.stores.sqlite.schema import network_below, refuse_engine

APPLICATION_ID = 0x46544331  # "FTC1", in the header of the file
FORGOTTEN_AT_ONCE = 10

_SCHEMA = f"""
    CREATE TABLE IF NOT EXISTS counts (
        customer TEXT PRIMARY KEY,
        value INTEGER NOT NULL,
        updated_at INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS counts_by_age ON counts (updated_at);
    PRAGMA application_id = {APPLICATION_ID};
"""
_READ = "SELECT value, updated_at FROM counts WHERE customer = ?"
_WRITE = """
    INSERT INTO counts (customer, value, updated_at) VALUES (?1, ?2, ?3)
    ON CONFLICT (customer) DO UPDATE SET value = ?2, updated_at = ?3
"""
_EVICT = """
    DELETE FROM counts WHERE customer IN
        (SELECT customer FROM counts WHERE updated_at < ? LIMIT ?)
"""  # counts_by_age


class SqliteCounts:
    """Counts in a file, which is created if it is missing. A power failure may lose the last
    counts."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rule: Rule | None = None,
        clock: Clock | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._path = Path(path).absolute()
        self._rule = rule or Rule()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._connection: apsw.Connection | None = None
        self._pid = os.getpid()

    def begin(self, customer: str) -> Answer:
        with self._writing() as connection:
            now = self._clock.now()
            found = connection.execute(_READ, (customer,)).fetchone()
            last = None if found is None else Count(*found)
            count = self._rule.check(last, now)
            connection.execute(_WRITE, (customer, *count))
            if count.value == 0:
                # Each new count evicts some that would be reset.
                old = now - self._rule.reset_interval_us
                connection.execute(_EVICT, (old, FORGOTTEN_AT_ONCE))
        return lambda: count.value

    def concerns(self) -> list[str]:
        with self._writing():
            return []

    def close(self) -> None:
        if self._connection is not None and self._pid == os.getpid():
            self._connection.close()
        self._connection = None

    @contextmanager
    def _writing(self) -> Iterator[apsw.Connection]:
        with self._lock:
            try:
                connection = self._open()
                connection.execute("BEGIN IMMEDIATE")
                yield connection
                connection.execute("COMMIT")
            except BaseException as error:
                # Also after KeyboardInterrupt: an open transaction would block all publishers.
                if self._connection is not None and self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                if isinstance(error, apsw.Error):
                    raise self._translate(error) from error
                raise

    def _open(self) -> apsw.Connection:
        if self._connection is not None and self._pid == os.getpid():
            return self._connection
        refuse_engine(apsw.sqlite_lib_version())
        network = network_below(self._path)
        if network:
            raise StoreRefused(
                f"{self._path} lies on a {network} file system, where locks of SQLite are not "
                "reliable; use a local disk, or Redis or PostgreSQL for several machines"
            )
        connection = apsw.Connection(str(self._path))
        connection.set_busy_timeout(round(self._timeout_s * 1000))
        with connection:  # one snapshot: another process may be making this schema now
            application = connection.pragma("application_id")
            used = application or connection.execute("SELECT count(*) FROM sqlite_schema").get
        if used and application != APPLICATION_ID:
            connection.close()
            raise StoreRefused(
                f"{self._path} is a database of another application and was not changed; "
                "use a separate file for the counts"
            )
        connection.execute("PRAGMA journal_mode = wal").fetchall()
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT")
        self._connection, self._pid = connection, os.getpid()
        return connection

    def _translate(self, error: apsw.Error) -> StoreError:
        if isinstance(error, apsw.BusyError | apsw.LockedError):
            return StoreUnavailable(
                f"{self._path} was locked by another writer for {self._timeout_s * 1000:.0f} ms"
            )
        if isinstance(error, apsw.CantOpenError | apsw.ReadOnlyError | apsw.NotADBError):
            return StoreRefused(f"{self._path} cannot be used for counts: {error}")
        return StoreUnavailable(f"{self._path} is unavailable: {error}")
