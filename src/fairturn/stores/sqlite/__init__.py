"""The embedded store: one SQLite file, several processes, nothing to install.

`SqliteStore` opens transactions and calls the module of each operation: `submit.py`, `claim.py`,
`finish.py`, `cancel.py`, `expire.py`, `query.py`, `snapshot.py`, `admin.py`.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from fairturn.access.keys import AccessKey
from fairturn.clock import Clock, SystemClock, stopwatch
from fairturn.errors import StoreBusy, StoreError
from fairturn.explain.snapshot import DocumentSnapshot, WorkerHeartbeat
from fairturn.model import (
    EXPIRE_MAX,
    NO_CAPS,
    NO_CHECKPOINTS,
    NO_NEEDS,
    NO_PROGRESS,
    AttemptRecord,
    Claimed,
    CustomerPage,
    CustomerSettings,
    Fence,
    Filter,
    Kind,
    KindSettings,
    Lanes,
    NewDocument,
    Outcome,
    Page,
    Progress,
    Receipt,
    Renewed,
    ServiceOutage,
    Settings,
    State,
    Stored,
    Summary,
    check_checkpoints,
    check_claim,
    check_expire,
    check_lease,
    check_needs,
    check_outcomes,
)
from fairturn.stores.contract import UNREFERENCED_S
from fairturn.stores.ids import IdKey
from fairturn.stores.sqlite import admin, cancel, expire, finish, outages, query, snapshot
from fairturn.stores.sqlite.claim import Claimer, ClaimRequest
from fairturn.stores.sqlite.connection import BUSY_S, Database
from fairturn.stores.sqlite.rows import QueueRow, row_to_write
from fairturn.stores.sqlite.submit import GroupCommit
from fairturn.stores.values import SettingsCache

_LOG = logging.getLogger(__name__)

PROBE_S = 1.0  # that `probe` waits for the lock of another process
_POLL_S = 0.03  # polling every 20 ms took 1.1 % of a core
_CHECKPOINT_POLL_S = 0.004  # a long log is checkpointed after this time without a change

_ADD_QUEUE = """
    INSERT OR IGNORE INTO queue (one, settings, id_secret, id_key, ids_from)
    VALUES (1, ?, ?, ?, ?)"""
_HAS_QUEUE = "SELECT count(*) FROM queue"


class SqliteStore:
    """A store in one SQLite file. It has more than 20 methods because the contract has."""

    single_writer = True

    def __init__(
        self,
        path: str | Path,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
        key: int | None = None,
        synchronous: str = "FULL",
        allow_network: bool = False,
    ) -> None:
        self._clock = clock or SystemClock()
        self._database = Database(Path(path), synchronous=synchronous, allow_network=allow_network)
        self._cache = SettingsCache()
        # `with` on a condition can leave its lock held if a signal interrupts it, so callers lock
        # this one themselves.
        self._change_lock = threading.RLock()
        self._changed = threading.Condition(self._change_lock)
        self._version = 0
        self._claimer = Claimer(self._database, self._cache, self._clock)
        self._group_commit = GroupCommit(self._database, self._cache, self._clock.now)
        with self._database.reading() as connection:
            exists = connection.execute(_HAS_QUEUE).get
        if not exists:
            initial = (settings or Settings()).to_json()
            with self._database.writing("configure") as connection:
                connection.execute(_ADD_QUEUE, (initial, *IdKey.new(key)))

    @property
    def path(self) -> Path:
        return self._database.path

    # ── Settings ─────────────────────────────────────────────────────────────────────────────────

    def settings(self) -> Settings:
        with self._database.reading() as connection:
            return QueueRow(connection, self._cache).settings

    def configure(self, settings: Settings, *, expected: Settings | None = None) -> bool:
        with self._database.writing("configure") as connection:
            queue = row_to_write(connection, self._cache)
            now, uptime = self._clock.now(), self._clock.uptime()
            changed = admin.configure(connection, queue, settings, expected, now=now, uptime=uptime)
        if changed:
            self._notify()
        return changed

    def adjust(
        self,
        customer: str,
        settings: CustomerSettings,
        *,
        expected: CustomerSettings | None = None,
    ) -> bool:
        with self._database.writing("configure") as connection:
            changed = admin.adjust(connection, customer, settings, expected, self._clock.now())
        if changed:
            self._notify()
        return changed

    def configure_kind(
        self, kind: str, settings: KindSettings, *, expected: KindSettings | None = None
    ) -> bool:
        with self._database.writing("configure") as connection:
            changed = admin.configure_kind(connection, kind, settings, expected)
        if changed:
            self._notify()
        return changed

    # ── The path of a document ───────────────────────────────────────────────────────────────────

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        if connection is not None:
            raise ValueError("a queue in an SQLite file cannot join a transaction; omit connection")
        receipts = self._group_commit.submit(documents)
        self._notify()
        return receipts

    def claim(
        self,
        n: int,
        *,
        worker: str,
        lease_us: int,
        kinds: Sequence[str] | None = None,
        at_most: Mapping[str, int] = NO_CAPS,
        outcomes: Sequence[Outcome] = (),
        synced: bool = True,
    ) -> Claimed:
        check_claim(n, worker, lease_us)
        check_outcomes(outcomes)
        wanted = ClaimRequest(n, kinds, at_most, worker, lease_us)
        claimed, changed = self._claimer.claim(wanted, outcomes, synced=synced)
        if changed:
            self._notify()
        return claimed

    def sync(self) -> None:
        self._database.sync()

    def probe(self) -> None:
        self._database.refuse_if_full(0)
        since_s = stopwatch() + PROBE_S - BUSY_S
        with self._database.writing("configure", synced=False, since_s=since_s) as connection:
            admin.probe(connection, self._clock.now())

    def begin_epoch(self) -> None:
        with self._database.writing("configure") as connection:
            QueueRow(connection, self._cache).begin_epoch(connection)
        self._database.sync(always=True)
        self._notify()

    def renew(
        self,
        fences: Sequence[Fence],
        *,
        lease_us: int,
        progress: Mapping[Fence, Progress] = NO_PROGRESS,
        checkpoints: Mapping[Fence, str] = NO_CHECKPOINTS,
    ) -> Renewed:
        check_lease(lease_us)
        check_checkpoints(checkpoints.values())
        with self._database.writing("renew") as connection:
            queue = row_to_write(connection, self._cache)
            lease_until = self._clock.uptime().at + lease_us
            return finish.renew(
                connection, queue, fences, lease_until, progress=progress, checkpoints=checkpoints
            )

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        check_outcomes(outcomes)
        with self._database.writing("finish") as connection:
            queue = row_to_write(connection, self._cache)
            now, uptime = self._clock.now(), self._clock.uptime()
            lost = finish.finish(connection, queue, outcomes, now, uptime)
        self._notify()
        return lost

    def cancel(self, ids: Sequence[str]) -> list[State | None]:
        with self._database.writing("cancel") as connection:
            queue = row_to_write(connection, self._cache)
            states = cancel.cancel(connection, queue, ids, self._clock.now())
        self._notify()
        return states

    def retry(self, ids: Sequence[str], *, expires_at: int | None = None) -> list[State | None]:
        with self._database.writing("retry") as connection:
            queue = row_to_write(connection, self._cache)
            states = cancel.retry(connection, queue, ids, expires_at, self._clock.now())
        self._notify()
        return states

    def expire(self, limit: int = EXPIRE_MAX) -> int:
        check_expire(limit)
        recorded = expire.expire(self._database, self._cache, self._clock, limit)
        if recorded:
            self._notify()
        return recorded

    def resume(self, service: str) -> bool:
        with self._database.writing("configure") as connection:
            queue = row_to_write(connection, self._cache)
            was_held = outages.resume(connection, queue, service, self._clock.now())
        if was_held:
            self._notify()
        return was_held

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────

    def find(
        self,
        filter: Filter,
        *,
        after: str | None = None,
        size: int = 100,
        reach: int | None = None,
    ) -> Page:
        with self._database.reading() as connection:
            queue = QueueRow(connection, self._cache)
            return query.find(connection, queue, filter, after, size, reach=reach)

    def read(self, id: str) -> Stored | None:
        with self._database.reading() as connection:
            return query.read(connection, QueueRow(connection, self._cache), id)

    def attempts(self, id: str, *, values: bool = False) -> list[AttemptRecord] | None:
        with self._database.reading() as connection:
            return query.attempts(connection, QueueRow(connection, self._cache), id, values=values)

    def outages(self) -> list[ServiceOutage]:
        with self._database.reading() as connection:
            return outages.outages(connection, self._clock.now())

    def customers(
        self, *, names: Sequence[str] | None = None, after: str | None = None, size: int = 100
    ) -> CustomerPage:
        with self._database.reading() as connection:
            queue = QueueRow(connection, self._cache)
            now = self._clock.now()
            return query.customers(connection, queue, now, names=names, after=after, size=size)

    def summary(self) -> Summary:
        with self._database.reading() as connection:
            return query.summary(connection, QueueRow(connection, self._cache))

    @contextmanager
    def read_transaction(self) -> Iterator[apsw.Connection]:
        """Open a read transaction on the file, for `maintenance/`. It does not block writers."""
        with self._database.reading() as connection:
            connection.execute(_HAS_QUEUE).fetchall()  # BEGIN is deferred until the first read
            yield connection

    def kinds(self) -> list[Kind]:
        with self._database.reading() as connection:
            return query.kinds(connection, QueueRow(connection, self._cache))

    def lanes(self, *, size: int = 24, kind: str | None = None) -> Lanes:
        now, uptime = self._clock.now(), self._clock.uptime()
        with self._database.reading() as connection:
            queue = QueueRow(connection, self._cache)
            return snapshot.lanes(connection, queue, size, kind, now=now, uptime=uptime)

    def snapshot(self, id: str) -> DocumentSnapshot | None:
        now, uptime = self._clock.now(), self._clock.uptime()
        with self._database.reading() as connection:
            queue = QueueRow(connection, self._cache)
            return snapshot.read_snapshot(connection, queue, id, now, uptime)

    def workers(self) -> list[WorkerHeartbeat]:
        with self._database.reading() as connection:
            return admin.workers(connection)

    def sign_on(
        self,
        worker: str,
        slots: int,
        kinds: Sequence[str] | None = None,
        *,
        needs: Mapping[str, Sequence[str]] = NO_NEEDS,
    ) -> None:
        check_needs(needs)
        served = None if kinds is None else tuple(sorted(set(kinds)))
        with self._database.writing("configure", synced=False) as connection:
            seen = WorkerHeartbeat(worker, self._clock.now(), slots, served)
            admin.sign_on(connection, seen, needs)

    def sign_off(self, worker: str) -> None:
        with self._database.writing("configure") as connection:
            admin.sign_off(connection, worker)

    def oldest_waiting(self) -> Mapping[int, int]:
        with self._database.reading() as connection:
            return query.oldest_waiting(connection)

    # ── Access keys ──────────────────────────────────────────────────────────────────────────────

    def add_key(self, key: AccessKey) -> None:
        with self._database.writing("configure") as connection:
            admin.add_key(connection, key)
        self._notify()

    def access_key(self, id: str) -> AccessKey | None:
        with self._database.reading() as connection:
            return admin.find_key(connection, id)

    def access_keys(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> list[AccessKey]:
        with self._database.reading() as connection:
            return admin.list_keys(connection, customer, after, size)

    def end_key(self, id: str, at: int) -> AccessKey | None:
        with self._database.writing("configure") as connection:
            key = admin.revoke_key(connection, id, at)
        self._notify()
        return key

    def note_use(self, id: str, at: int) -> None:
        with self._database.writing("configure") as connection:
            admin.record_key_use(connection, id, at)

    # ── Retention ────────────────────────────────────────────────────────────────────────────────

    def prune(self, *, documents_max: int = 1_000) -> list[str] | None:
        with self._database.writing("prune") as connection:
            queue = row_to_write(connection, self._cache)
            contents = admin.prune(connection, queue, self._clock.now(), documents_max)
            is_erased = admin.is_erased(connection)
        if not is_erased:
            self._erase()
        if contents is not None:
            self._notify()
        return contents

    def purge(self, customer: str) -> list[str]:
        with self._database.writing("prune") as connection:
            queue = row_to_write(connection, self._cache)
            contents = admin.purge(connection, queue, customer, self._clock.now())
        self._erase()
        self._notify()
        return contents

    def _erase(self) -> None:
        """Remove the rows that a purge deleted from the write-ahead log. Errors are logged, not
        raised: the purge is durable, and its caller needs the list of stored files to delete."""
        try:
            if self._database.truncate_log():
                with self._database.writing("prune") as connection:
                    admin.note_erased(connection)
                return
            reason = "another process or thread reads an earlier version"
        except StoreError as error:
            reason = str(error)
        _LOG.warning(
            "the write-ahead log of %s still contains deleted rows (%s); the next prune tries "
            "again",
            self.path,
            reason,
        )

    def unreferenced(
        self, content_names: Sequence[str], *, timeout_s: float = UNREFERENCED_S
    ) -> list[str]:
        with self._database.reading() as connection:
            unused = admin.unreferenced(connection, content_names)
        if not unused:
            return unused
        # Under the write lock, no transaction in flight can add a reference to one of them.
        with self._database.holding() as connection:
            return admin.unreferenced(connection, unused)

    # ── Changes ──────────────────────────────────────────────────────────────────────────────────

    def version(self) -> int:
        return self._version + self._database.changes_elsewhere()

    def wait(self, version: int, timeout_s: float, *, certain: bool = True) -> int:
        """Changes of this process wake the caller at once, those of others at the next poll."""
        until = stopwatch() + timeout_s
        while True:
            seen = self._version
            try:
                current = seen + self._database.changes_elsewhere(max(0.0, until - stopwatch()))
            except StoreBusy:
                return version  # a thread of this process is waiting for another process's lock
            left = until - stopwatch()
            if current != version or left <= 0:
                return current
            long = self._database.log_is_long
            with self._change_lock:
                changed = self._version != seen or self._changed.wait(
                    min(left, _CHECKPOINT_POLL_S if long else _POLL_S)
                )
            if long and not changed:
                self._database.checkpoint()

    def _notify(self) -> None:
        with self._change_lock:
            self._version += 1
            self._changed.notify_all()

    def interrupt(self) -> None:
        self._database.interrupt()

    def check(self) -> None:
        if self._database.damage is not None:
            raise self._database.damage

    def close(self) -> None:
        self._database.close()
