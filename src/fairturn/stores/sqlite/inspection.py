"""What can be said about a file from outside: nothing is made, migrated or changed by asking."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from fairturn.clock import Uptime
from fairturn.model import ContentRef
from fairturn.stores.inspection import Damage, Findings
from fairturn.stores.sqlite import audit
from fairturn.stores.sqlite.connection import BUSY_S, refuse_foreign_file
from fairturn.stores.sqlite.copy import Snapshot
from fairturn.stores.sqlite.errors import translated
from fairturn.stores.sqlite.rows import fetch
from fairturn.stores.sqlite.schema import migrations
from fairturn.stores.values import RUNNING, WAITING

_QUEUE = "SELECT settings, boot, repairs FROM queue"
_EPOCH = "SELECT epoch, is_copy FROM queue"
# By the primary key, up to the first: what has ended comes before it and is walked over.
_OLDEST_WAITING = f"""
    SELECT submitted_at FROM documents WHERE state = {WAITING} ORDER BY number LIMIT 1"""
_NEWEST = "SELECT submitted_at FROM documents ORDER BY number DESC LIMIT 1"
# By leases_until; whether a lease ran out is in the document's own row.
_RUN_OUT = f"""
    SELECT count(*), min(d.lease_until) FROM leases l, json_each(l.documents) j
        JOIN documents d ON d.number = j.value
    WHERE l.until < ?1 AND d.state = {RUNNING} AND d.fence = l.fence AND d.lease_until < ?1"""
_UNDER_LEASE = "SELECT coalesce(sum(running), 0) FROM leases"


class Examiner:
    """A file that is looked at."""

    def __init__(self, path: Path, connection: apsw.Connection) -> None:
        self.path = path
        self._connection = connection

    def schema(self) -> tuple[int, int]:
        """The version of the file's schema, and the newest that this fairturn knows."""
        return int(self._connection.pragma("user_version")), migrations()[-1][0]

    def damage(self) -> list[str]:
        """What SQLite's own check finds wrong; it reads the whole file."""
        found = [str(text) for (text,) in self._connection.execute("PRAGMA integrity_check")]
        return [] if found == ["ok"] else found

    def has_queue(self) -> bool:
        """Whether the process that made the file has finished that."""
        return bool(fetch(self._connection, _QUEUE))

    def find(self, uptime: Uptime) -> Findings:
        """What the file says about itself."""
        ((settings, boot, repairs),) = fetch(self._connection, _QUEUE)
        running = self._connection.execute(_UNDER_LEASE).get
        run_out, since = running, None
        if boot == uptime.boot:
            ((run_out, until),) = fetch(self._connection, _RUN_OUT, (uptime.at,))
            since = None if until is None else uptime.at - until
        return Findings(
            settings=settings,
            oldest_waiting_at=self._connection.execute(_OLDEST_WAITING).get,
            newest_at=self._connection.execute(_NEWEST).get,
            running=running,
            run_out=run_out,
            run_out_since_us=since,
            repairs=repairs,
        )

    def epoch(self) -> tuple[int, bool]:
        """The number of the epoch, and whether the file is a copy whose first write begins one."""
        ((epoch, is_copy),) = fetch(self._connection, _EPOCH)
        return epoch, bool(is_copy)

    def recount(self, advance: Callable[[int, int], None]) -> Iterator[Damage]:
        """Every stored value that does not agree with the documents."""
        return audit.recount(self._connection, advance)

    def contents(self) -> list[ContentRef]:
        """Every content outside the file that a document or a result is."""
        return list(Snapshot(self._connection).contents())

    def log_bytes(self) -> int:
        """The size of the write-ahead log."""
        log = self.path.with_name(f"{self.path.name}-wal")
        return log.stat().st_size if log.exists() else 0


@contextmanager
def examined(path: Path) -> Iterator[Examiner]:
    """Look at a file that is a queue; a `StoreError` says why it cannot be."""
    refuse_foreign_file(path.absolute())
    with translated(path.absolute()):
        # Not read-only: that could not recover the log of a process that was killed.
        connection = apsw.Connection(str(path.absolute()), flags=apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_timeout(round(BUSY_S * 1000))
            connection.execute("PRAGMA query_only = ON; PRAGMA trusted_schema = OFF").fetchall()
            yield Examiner(path.absolute(), connection)
        finally:
            connection.close(True)
