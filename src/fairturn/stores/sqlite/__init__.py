"""The embedded store: one SQLite file, several processes, nothing to install."""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import randbits
from typing import Any

from fairturn import ids
from fairturn.access.keys import AccessKey
from fairturn.clock import NO_BOOT, Clock, SystemClock, Uptime, stopwatch
from fairturn.errors import StoreBusy, StoreError
from fairturn.explain.snapshot import Seen, Situation
from fairturn.model import (
    NO_PROGRESS,
    Claimed,
    CustomerPage,
    CustomerSettings,
    Fence,
    Filter,
    Lanes,
    NewDocument,
    Outcome,
    Page,
    Progress,
    Receipt,
    Renewed,
    Settings,
    State,
    Stored,
    Summary,
    check_claim,
    check_lease,
    check_outcomes,
    weight_in_thousandths,
)
from fairturn.scheduling.flows import Changed, FlowMismatch
from fairturn.stores.contract import UNREFERENCED_S
from fairturn.stores.sqlite import (
    access,
    finish,
    lanes,
    mode_change,
    query,
    repair,
    retention,
    snapshot,
)
from fairturn.stores.sqlite.claim import Claiming
from fairturn.stores.sqlite.connection import Database
from fairturn.stores.sqlite.copy import Snapshot
from fairturn.stores.sqlite.finish import report_cancels
from fairturn.stores.sqlite.rows import (
    COUNT_COUNTED,
    FORGET_TURNS,
    QueueRow,
    record,
    row_to_write,
)
from fairturn.stores.sqlite.submit import Submitting
from fairturn.stores.values import SettingsCache

_LOG = logging.getLogger(__name__)

_POLL_S = 0.03  # at 20 ms the polls alone took 1.1 % of a core
_QUIET_S = 0.004  # without a change, then the disk is not waited for

_ADD_QUEUE = "INSERT OR IGNORE INTO queue (one, settings, id_key) VALUES (1, ?, ?)"
_HAS_QUEUE = "SELECT count(*) FROM queue"
_CONFIGURE = "UPDATE queue SET settings = ?"
_ADJUST = """
    INSERT INTO customers (number, name, weight, running_max, paused, counted)
    VALUES ((SELECT next_customer FROM queue), ?1, ?2, ?3, ?4, ?3 IS NOT NULL)
    ON CONFLICT (name) DO UPDATE SET
        weight = excluded.weight, running_max = excluded.running_max, paused = excluded.paused,
        counted = max(counted, excluded.counted)
    RETURNING number"""
_CUSTOMER_SETTINGS = "SELECT weight, running_max, paused FROM customers WHERE name = ?"
_COUNT_REPAIR = "UPDATE queue SET repairs = repairs + 1"
_USE_CUSTOMER = "UPDATE queue SET next_customer = max(next_customer, ? + 1)"


class SqliteStore:
    """A store in one file."""

    one_writer = True

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
        # Taken by itself, because a condition's own `with` keeps it if a signal interrupts that.
        self._change_lock = threading.RLock()
        self._changed = threading.Condition(self._change_lock)
        self._version = 0
        self._claiming = Claiming()
        self._submitting = Submitting(self._database, self._cache, self._clock.now)
        with self._database.reading() as connection:
            made = connection.execute(_HAS_QUEUE).get
        if not made:
            first = (settings or Settings()).to_json()
            with self._database.writing("configure") as connection:
                connection.execute(_ADD_QUEUE, (first, randbits(ids.BITS) if key is None else key))

    @property
    def path(self) -> Path:
        """The file."""
        return self._database.path

    # ── Settings ─────────────────────────────────────────────────────────────────────────────────

    def settings(self) -> Settings:
        with self._database.reading() as connection:
            return QueueRow(connection, self._cache).settings

    def configure(self, settings: Settings, *, expected: Settings | None = None) -> bool:
        with self._database.writing("configure") as connection:
            queue = row_to_write(connection, self._cache)
            if expected is not None and expected != queue.settings:
                return False
            if settings.mode is not queue.settings.mode:
                now, uptime = self._clock.now(), self._clock.uptime()
                mode_change.rebuild(connection, queue, settings, now, uptime)
            connection.execute(_CONFIGURE, (settings.to_json(),))
            connection.execute(FORGET_TURNS)
        self._note()
        return True

    def adjust(
        self,
        customer: str,
        settings: CustomerSettings,
        *,
        expected: CustomerSettings | None = None,
    ) -> bool:
        values = _customer_columns(settings)
        with self._database.writing("configure") as connection:
            if expected is not None:
                known = connection.execute(_CUSTOMER_SETTINGS, (customer,)).fetchone()
                if (known or _customer_columns(CustomerSettings())) != _customer_columns(expected):
                    return False
            number = connection.execute(_ADJUST, (customer, *values)).get
            connection.execute(_USE_CUSTOMER, (number,))
            connection.execute(COUNT_COUNTED)
            record(connection, self._clock.now(), [Changed(number, *values)])
        self._note()
        return True

    # ── The road ─────────────────────────────────────────────────────────────────────────────────

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        if connection is not None:
            raise ValueError("a queue in an SQLite file cannot take part in your transaction")
        receipts = self._submitting.submit(documents)
        self._note()
        return receipts

    def claim(
        self,
        n: int,
        *,
        worker: str,
        lease_us: int,
        outcomes: Sequence[Outcome] = (),
        synced: bool = True,
    ) -> Claimed:
        check_claim(n, worker, lease_us)
        check_outcomes(outcomes)
        repaired: set[int] = set()
        while True:
            try:
                return self._claim(n, worker, lease_us, outcomes, synced=synced)
            except FlowMismatch as mismatch:
                if mismatch.customer in repaired:
                    raise StoreError(f"{self.path}: {mismatch}, even after a repair") from mismatch
                repaired.add(mismatch.customer)
                self._repair(mismatch)

    def _repair(self, mismatch: FlowMismatch) -> None:
        """Rebuild the flows of one customer, so that claims go on with all customers."""
        _LOG.warning("%s: %s; they are rebuilt", self.path, mismatch)
        with self._database.writing("claim") as connection:
            repair.repair_customers(connection, [mismatch.customer], self._clock.now())
            connection.execute(_COUNT_REPAIR)

    def _claim(
        self,
        n: int,
        worker: str,
        lease_us: int,
        outcomes: Sequence[Outcome],
        *,
        synced: bool,
    ) -> Claimed:
        # Without a boot id no claim can tell that a power cut has undone others.
        synced = synced or bool(outcomes) or self._clock.uptime().boot == NO_BOOT
        try:
            with self._database.writing("claim", synced=synced) as connection:
                before = connection.total_changes()
                queue = row_to_write(connection, self._cache)
                now, uptime = self._clock.now(), self._clock.uptime()
                # A power cut may undo claims only of a boot, and of an epoch, that are on the disk:
                # otherwise the next one would begin at the same fence.
                is_first = bool(queue.is_copy) or queue.boot != uptime.boot
                lost = self._finish(connection, queue, outcomes, now, uptime)
                claims = self._claiming.claim(
                    connection,
                    queue,
                    n,
                    worker=worker,
                    lease_us=lease_us,
                    now=now,
                    uptime=uptime,
                )
                cancelled = report_cancels(connection, queue)
                changed = connection.total_changes() != before
        except BaseException:
            self._claiming.forget()
            raise
        if is_first:
            self._database.sync(always=True)
        if changed:
            self._note()
        return Claimed(claims, lost, cancelled)

    def sync(self) -> None:
        self._database.sync()

    def begin_epoch(self) -> None:
        with self._database.writing("configure") as connection:
            QueueRow(connection, self._cache).begin_epoch(connection)
        self._database.sync(always=True)
        self._note()

    def renew(
        self,
        fences: Sequence[Fence],
        *,
        lease_us: int,
        progress: Mapping[Fence, Progress] = NO_PROGRESS,
    ) -> Renewed:
        check_lease(lease_us)
        with self._database.writing("renew") as connection:
            queue = row_to_write(connection, self._cache)
            lease_until = self._clock.uptime().at + lease_us
            return finish.renew(connection, queue, fences, lease_until, progress)

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        check_outcomes(outcomes)
        with self._database.writing("finish") as connection:
            queue = row_to_write(connection, self._cache)
            now, uptime = self._clock.now(), self._clock.uptime()
            lost = self._finish(connection, queue, outcomes, now, uptime)
        self._note()
        return lost

    def _finish(
        self, connection: Any, queue: QueueRow, ended: Sequence[Outcome], now: int, uptime: Uptime
    ) -> list[Fence]:
        return finish.finish(connection, queue, ended, now, uptime) if ended else []

    def cancel(self, ids: Sequence[str]) -> list[State | None]:
        with self._database.writing("cancel") as connection:
            queue = row_to_write(connection, self._cache)
            states = finish.cancel(connection, queue, ids, self._clock.now())
        self._note()
        return states

    def retry(self, ids: Sequence[str]) -> list[State | None]:
        with self._database.writing("retry") as connection:
            queue = row_to_write(connection, self._cache)
            states = finish.retry(connection, queue, ids, self._clock.now())
        self._note()
        return states

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
    def snapshot(self) -> Iterator[Snapshot]:
        """The file as it is now, for as long as the block runs; other processes go on writing."""
        with self._database.reading() as connection:
            yield Snapshot(connection)

    def lanes(self, *, size: int = 24) -> Lanes:
        now, uptime = self._clock.now(), self._clock.uptime()
        with self._database.reading() as connection:
            queue = QueueRow(connection, self._cache)
            return lanes.lanes(connection, queue, size, now, uptime)

    def situation(self, id: str) -> Situation | None:
        now, uptime = self._clock.now(), self._clock.uptime()
        with self._database.reading() as connection:
            queue = QueueRow(connection, self._cache)
            return snapshot.situation(connection, queue, id, now, uptime)

    def workers(self) -> list[Seen]:
        with self._database.reading() as connection:
            return access.workers(connection)

    def sign_on(self, worker: str, slots: int) -> None:
        with self._database.writing("configure", synced=False) as connection:
            access.sign_on(connection, Seen(worker, self._clock.now(), slots))

    def sign_off(self, worker: str) -> None:
        with self._database.writing("configure") as connection:
            access.sign_off(connection, worker)

    def oldest_waiting(self) -> Mapping[int, int]:
        with self._database.reading() as connection:
            return access.oldest_waiting(connection)

    # ── Access keys ──────────────────────────────────────────────────────────────────────────────

    def add_key(self, key: AccessKey) -> None:
        with self._database.writing("configure") as connection:
            access.add(connection, key)
        self._note()

    def access_key(self, id: str) -> AccessKey | None:
        with self._database.reading() as connection:
            return access.find(connection, id)

    def access_keys(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> list[AccessKey]:
        with self._database.reading() as connection:
            return access.page(connection, customer, after, size)

    def end_key(self, id: str, at: int) -> AccessKey | None:
        with self._database.writing("configure") as connection:
            key = access.end(connection, id, at)
        self._note()
        return key

    def note_use(self, id: str, at: int) -> None:
        with self._database.writing("configure") as connection:
            access.use(connection, id, at)

    # ── Forgetting ───────────────────────────────────────────────────────────────────────────────

    def prune(self, *, documents_max: int = 1_000) -> list[str] | None:
        with self._database.writing("prune") as connection:
            queue = row_to_write(connection, self._cache)
            contents = retention.prune(connection, queue, self._clock.now(), documents_max)
        if contents is not None:
            self._note()
        return contents

    def purge(self, customer: str) -> list[str]:
        with self._database.writing("prune") as connection:
            queue = row_to_write(connection, self._cache)
            contents = retention.purge(connection, queue, customer, self._clock.now())
            access.forget(connection, customer)
        self._note()
        return contents

    def unreferenced(
        self, content_names: Sequence[str], *, timeout_s: float = UNREFERENCED_S
    ) -> list[str]:
        with self._database.reading() as connection:
            left = retention.unreferenced(connection, content_names)
        if not left:
            return left
        # The write lock excludes a transaction in flight that is about to refer to one of them.
        with self._database.holding() as connection:
            return retention.unreferenced(connection, left)

    # ── Changes ──────────────────────────────────────────────────────────────────────────────────

    def version(self) -> int:
        return self._version + self._database.changes_elsewhere()

    def wait(self, version: int, timeout_s: float, *, certain: bool = True) -> int:
        """This process's own changes wake at once; those of others within the poll of 30 ms."""
        until = stopwatch() + timeout_s
        while True:
            seen = self._version
            try:
                current = seen + self._database.changes_elsewhere(max(0.0, until - stopwatch()))
            except StoreBusy:
                return version  # a thread of this process waits for the lock of another process
            left = until - stopwatch()
            if current != version or left <= 0:
                return current
            long = self._database.log_is_long
            with self._change_lock:
                changed = self._version != seen or self._changed.wait(
                    min(left, _QUIET_S if long else _POLL_S)
                )
            if long and not changed:
                self._database.write_log()

    def _note(self) -> None:
        with self._change_lock:
            self._version += 1
            self._changed.notify_all()

    def interrupt(self) -> None:
        """End every wait for a lock that is under way with `StoreBusy`. From any thread, or from a
        signal handler."""
        self._database.interrupt()

    def check(self) -> None:
        """Raise the error of the last call that met a damaged page, if one did."""
        if self._database.damage is not None:
            raise self._database.damage

    def close(self) -> None:
        self._database.close()


def _customer_columns(settings: CustomerSettings) -> tuple[int, int | None, bool]:
    return weight_in_thousandths(settings.weight), settings.limit, settings.paused
