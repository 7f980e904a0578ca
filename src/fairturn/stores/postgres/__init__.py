"""The PostgreSQL store: one database, workers and submitters on any number of machines."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import psycopg

from fairturn.access.keys import AccessKey
from fairturn.clock import Clock, Uptime
from fairturn.errors import StoreError
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
from fairturn.stores import crash
from fairturn.stores.contract import UNREFERENCED_S
from fairturn.stores.ids import IdKey
from fairturn.stores.postgres import admin, query, snapshot
from fairturn.stores.postgres.attempts import attempts
from fairturn.stores.postgres.claim import BUDGET, PostgresClaimer
from fairturn.stores.postgres.connection import POOL_MAX, PostgresDatabase
from fairturn.stores.postgres.expire import expire
from fairturn.stores.postgres.finish import finish, renew
from fairturn.stores.postgres.load import LoadProgress, load
from fairturn.stores.postgres.notify import ChangeListener
from fairturn.stores.postgres.outages import outages, resume
from fairturn.stores.postgres.pool import Use
from fairturn.stores.postgres.rows import (
    ADD_QUEUE,
    QUEUE,
    TIMESTAMP,
    PostgresQueueRow,
    now_of,
    settings_columns,
    to_queue,
    uptime_of,
)
from fairturn.stores.postgres.schema import migrate_on_opening, newest, refuse_other
from fairturn.stores.postgres.session import Session
from fairturn.stores.postgres.submit import PostgresSubmitter
from fairturn.stores.transfer import ExportedQueue
from fairturn.stores.urls import SCHEMA
from fairturn.stores.values import SettingsCache

_LOG = logging.getLogger("fairturn.postgres")
_NOW = f"SELECT {TIMESTAMP}"


class PostgresStore:
    """A `QueueStore` in one schema of a database.

    Without `clock`, timestamps are those of the server. `migrate=False` refuses a missing or older
    schema, for roles that may not change it. `listen_url` bypasses a pooler for LISTEN; behind a
    pooler and without it, the store polls for changes once a second. `prepare` decides whether
    statements are prepared; by default they are unless a pooler is detected. `budget` is the number
    of documents or events that each step of a claim handles in one transaction.

    It has more than 20 methods because it implements all protocols of `stores/contract.py`; each
    method calls one function of the module for its step.
    """

    single_writer = False

    def __init__(
        self,
        url: str,
        *,
        settings: Settings | None = None,
        clock: Clock | None = None,
        key: int | None = None,
        schema: str = SCHEMA,
        migrate: bool = True,
        listen_url: str | None = None,
        pool_max: int = POOL_MAX,
        prepare: bool | None = None,
        random: Random | None = None,
        budget: int = BUDGET,
    ) -> None:
        self._clock = clock
        self._budget = budget
        self.url = url
        self._database = PostgresDatabase(url, schema=schema, pool_max=pool_max, prepare=prepare)
        self._cache = SettingsCache()
        random = random or Random()
        self._claimer = PostgresClaimer(self._database, clock, random, budget, self._note)
        self._submitter = PostgresSubmitter(self._database, clock, random, budget)
        try:
            self._create(settings, key, migrate=migrate)
            self._key = self._read_queue().key  # of ids; it never changes
            self._changes = ChangeListener(self._database, listen_url)
        except BaseException:
            self._database.close()
            raise

    def _create(self, settings: Settings | None, key: int | None, *, migrate: bool) -> None:
        """Migrate the schema if needed and allowed, and insert the row for a new queue."""
        database = self._database
        try:
            connection = database.connect()
            with connection:
                if refuse_other(connection, database, migrates=migrate) < newest():
                    migrate_on_opening(connection, database)
                session = Session(connection, database.schema)
                if not session.fetch(QUEUE):
                    first = settings_columns(settings or Settings())
                    crash.point("configure-before-commit")
                    session.ask(ADD_QUEUE, (*IdKey.new(key), *first))
                    crash.point("configure-after-commit")
        except psycopg.Error as error:
            raise database.translate(error) from error

    @property
    def name(self) -> str:
        """The database and its host, as messages show them."""
        return self._database.name

    # ── Settings ─────────────────────────────────────────────────────────────────────────────────

    def settings(self) -> Settings:
        return self._read_queue().settings

    def _read_queue(self) -> PostgresQueueRow:
        with self._database.reading() as session:
            return query.queue_row(session, self._cache)

    def configure(self, settings: Settings, *, expected: Settings | None = None) -> bool:
        given_now, uptime = now_of(self._clock), uptime_of(self._clock)
        version: int | None = None
        if expected is not None:
            queue = self._read_queue()
            if queue.settings != expected:
                return False
            version = queue.settings_version
        budget, result = self._budget, admin.ConfigureResult.AGAIN
        while result is admin.ConfigureResult.AGAIN:
            result = self._database.transact(
                lambda session: admin.configure(
                    session, settings, version, given_now=given_now, uptime=uptime, budget=budget
                )
            )
        if result is admin.ConfigureResult.STALE_VERSION:
            return False
        try:
            while not self._database.transact(lambda session: admin.convert(session, budget)):
                pass
        except StoreError as error:
            # The settings are in force, and claims convert the other customers.
            _LOG.warning("claims will convert the remaining flows to the new mode: %s", error)
        self._note()
        return True

    def adjust(
        self,
        customer: str,
        settings: CustomerSettings,
        *,
        expected: CustomerSettings | None = None,
    ) -> bool:
        given_now = now_of(self._clock)
        applied = self._database.transact(
            lambda session: admin.adjust(session, customer, settings, expected, given_now)
        )
        self._note()
        return applied

    def configure_kind(
        self, kind: str, settings: KindSettings, *, expected: KindSettings | None = None
    ) -> bool:
        applied = self._database.transact(
            lambda session: admin.configure_kind(session, kind, settings, expected)
        )
        self._note()
        return applied

    # ── The path of a document ───────────────────────────────────────────────────────────────────

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        if connection is not None:
            return self._submitter.submit_with(connection, documents, self._key)
        receipts = self._submitter.submit(documents, self._key)
        self._note()
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
        return self._claimer.claim(
            n,
            worker=worker,
            lease_us=lease_us,
            kinds=kinds,
            at_most=at_most,
            outcomes=outcomes,
            key=self._key,
        )

    def sync(self) -> None:
        """Do nothing: every claim is durable when it returns."""

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
        uptime = uptime_of(self._clock)
        at = uptime.at if uptime else None
        return self._database.transact(
            lambda session: renew(
                session, self._key, fences, progress, checkpoints, lease_us=lease_us, at=at
            ),
            Use.WORK,
        )

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        check_outcomes(outcomes)
        given_now = now_of(self._clock)
        lost = self._database.transact(
            lambda session: finish(session, self._key, outcomes, given_now), Use.WORK
        )
        self._note()
        return lost

    def cancel(self, ids: Sequence[str]) -> list[State | None]:
        given_now = now_of(self._clock)
        states = self._database.transact(
            lambda session: admin.cancel(session, ids, self._key, given_now)
        )
        self._note()
        return states

    def retry(self, ids: Sequence[str], *, expires_at: int | None = None) -> list[State | None]:
        given_now = now_of(self._clock)
        states = self._database.transact(
            lambda session: admin.retry(session, ids, self._key, expires_at, given_now)
        )
        self._note()
        return states

    def expire(self, limit: int = EXPIRE_MAX) -> int:
        check_expire(limit)
        given_now = now_of(self._clock)
        recorded, more = 0, True
        while more and recorded < limit:
            most = limit - recorded
            expired, more = self._database.transact(
                lambda session, most=most: expire(session, most, given_now)  # type: ignore[misc]
            )
            recorded += expired
        if recorded:
            self._note()
        return recorded

    def resume(self, service: str) -> bool:
        given_now = now_of(self._clock)
        was_held = self._database.transact(lambda session: resume(session, service, given_now))
        if was_held:
            self._note()
        return was_held

    def probe(self) -> None:
        self._database.transact(admin.probe)

    def begin_epoch(self) -> None:
        self._database.transact(lambda session: session.fetch("SELECT fairturn.begin_epoch()"))
        self._note()

    # ── Queries ──────────────────────────────────────────────────────────────────────────────────

    def find(
        self,
        filter: Filter,
        *,
        after: str | None = None,
        size: int = 100,
        reach: int | None = None,
    ) -> Page:
        with self._database.reading() as session:
            return query.find(session, self._key, filter, after, size, reach=reach)

    def read(self, id: str) -> Stored | None:
        with self._database.reading() as session:
            return query.read(session, self._key, id)

    def attempts(self, id: str, *, values: bool = False) -> list[AttemptRecord] | None:
        with self._database.reading() as session:
            return attempts(session, self._key, id, values)

    def customers(
        self, *, names: Sequence[str] | None = None, after: str | None = None, size: int = 100
    ) -> CustomerPage:
        with self._read_transaction() as (session, queue, now):
            return query.customers(session, queue, now, names=names, after=after, size=size)

    def summary(self) -> Summary:
        return self._database.transact(lambda session: query.summary(session, alone=True))

    def outages(self) -> list[ServiceOutage]:
        with self._read_transaction() as (session, _, now):
            return outages(session, now)

    def kinds(self) -> list[Kind]:
        with self._database.reading() as session:
            return query.kinds(session)

    def lanes(self, *, size: int = 24, kind: str | None = None) -> Lanes:
        with self._read_transaction() as (session, queue, now):
            uptime = uptime_of(self._clock) or Uptime("server", now)
            return snapshot.lanes(session, queue, size, kind, now=now, uptime=uptime)

    def snapshot(self, id: str) -> DocumentSnapshot | None:
        with self._read_transaction() as (session, queue, now):
            uptime = uptime_of(self._clock) or Uptime("server", now)
            return snapshot.read_snapshot(session, queue, id, now, uptime)

    def workers(self) -> list[WorkerHeartbeat]:
        with self._database.reading() as session:
            return admin.workers(session)

    def sign_on(
        self,
        worker: str,
        slots: int,
        kinds: Sequence[str] | None = None,
        *,
        needs: Mapping[str, Sequence[str]] = NO_NEEDS,
    ) -> None:
        check_needs(needs)
        given_now = now_of(self._clock)
        self._database.transact(
            lambda session: admin.sign_on(
                session, worker, slots, kinds, needs=needs, given_now=given_now
            )
        )

    def sign_off(self, worker: str) -> None:
        self._database.transact(lambda session: admin.sign_off(session, worker))

    def oldest_waiting(self) -> Mapping[int, int]:
        with self._database.reading() as session:
            return admin.oldest_waiting(session)

    @contextmanager
    def _read_transaction(self) -> Iterator[tuple[Session, PostgresQueueRow, int]]:
        """Yield a session that reads one snapshot, the row of the queue, and the present time."""
        with self._database.reading() as session:
            with session.together():
                queue_cursor = session.ask(QUEUE)
                now_cursor = session.ask(_NOW, (now_of(self._clock),))
            ((now,),) = now_cursor.fetchall()
            yield session, to_queue(queue_cursor.fetchall()[0], self._cache), now

    # ── Access keys ──────────────────────────────────────────────────────────────────────────────

    def add_key(self, key: AccessKey) -> None:
        self._database.transact(lambda session: admin.add_key(session, key))
        self._note()

    def access_key(self, id: str) -> AccessKey | None:
        with self._database.reading() as session:
            return admin.find_key(session, id)

    def access_keys(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> list[AccessKey]:
        with self._database.reading() as session:
            return admin.page_of_keys(session, customer, after, size)

    def end_key(self, id: str, at: int) -> AccessKey | None:
        key = self._database.transact(lambda session: admin.end_key(session, id, at))
        self._note()
        return key

    def note_use(self, id: str, at: int) -> None:
        self._database.transact(lambda session: admin.note_use(session, id, at))

    # ── Prune, purge, load ───────────────────────────────────────────────────────────────────────

    def prune(self, *, documents_max: int = 1_000) -> list[str] | None:
        given_now, settings = now_of(self._clock), self.settings()
        contents = self._database.transact(
            lambda session: admin.prune(session, settings, given_now, documents_max)
        )
        if contents is not None:
            self._note()
        return contents

    def purge(self, customer: str) -> list[str]:
        given_now = now_of(self._clock)
        contents: list[str] = []
        done = False
        while not done:
            batch, done = self._database.transact(
                lambda session: admin.purge(session, customer, given_now)
            )
            contents += batch
            self._note()
        return contents

    def unreferenced(
        self, content_names: Sequence[str], *, timeout_s: float = UNREFERENCED_S
    ) -> list[str]:
        return admin.unreferenced(self._database.reading, content_names, timeout_s)

    def load(self, exported: ExportedQueue, progress: LoadProgress) -> None:
        """Load all of another queue into this one. Raise `StoreRefused` if it was ever used."""
        self._database.transact(lambda session: load(session, self.name, exported, progress))
        self._key = self._read_queue().key
        self._note()

    # ── Changes ──────────────────────────────────────────────────────────────────────────────────

    def version(self) -> int:
        return self._changes.version()

    def wait(self, version: int, timeout_s: float, *, certain: bool = True) -> int:
        if not certain:
            return self._changes.wait_for_wakeup(version, timeout_s)
        return self._changes.wait(version, timeout_s)

    def _note(self) -> None:
        self._changes.note()

    def close(self) -> None:
        self._changes.close()
        self._database.close()
