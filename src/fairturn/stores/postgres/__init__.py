"""The shared store: one PostgreSQL database, any number of machines."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from secrets import randbits
from typing import Any
from uuid import UUID

import psycopg

from fairturn import crash, ids
from fairturn.access.keys import AccessKey
from fairturn.clock import Clock, Uptime, stopwatch
from fairturn.errors import QueueFull, StoreError, StoreUnavailable
from fairturn.explain.snapshot import Seen, Situation
from fairturn.model import (
    NO_PROGRESS,
    Claim,
    Claimed,
    CustomerPage,
    CustomerSettings,
    Document,
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
)
from fairturn.stores.contract import UNREFERENCED_S
from fairturn.stores.postgres import access, admin, bulk_load, lanes, query, retention, snapshot
from fairturn.stores.postgres.claim import BUDGET, BUDGET_MIN, Granted, Request, claim
from fairturn.stores.postgres.connection import POOL_MAX, WAIT_S, Database
from fairturn.stores.postgres.finish import finish, renew
from fairturn.stores.postgres.gate import CustomerGate
from fairturn.stores.postgres.notify import Watching
from fairturn.stores.postgres.pool import Use
from fairturn.stores.postgres.rows import (
    ADD_QUEUE,
    MOMENT,
    QUEUE,
    QueueRow,
    settings_columns,
    to_queue,
)
from fairturn.stores.postgres.schema import migrate_on_opening, newest, refuse_other, version_of
from fairturn.stores.postgres.session import SCHEMA, Session
from fairturn.stores.postgres.submit import CHECK_EPOCH, NewEpoch, submit
from fairturn.stores.transfer import Whole
from fairturn.stores.values import SettingsCache

_LOG = logging.getLogger("fairturn.postgres")
_NOW = f"SELECT {MOMENT}"
REPAIRS_MAX = 10  # customers whose counters one claim has rebuilt
REPAIR_PAUSE_S = 60.0  # after a repair that did not get its locks
RECOUNT_EVERY_S = 60.0  # how often a full queue is recounted, at most


class PostgresStore:
    """A store in one schema of a database.

    Without a clock the moments are those of the server. `migrate=False` refuses a schema that is
    not there or is older, for roles that may not change it. `listen_url` is where to listen for
    changes, past a pooler; without it, and behind one, changes of others are looked for once in a
    second. `prepare` decides whether statements are prepared; by default that is so where nothing
    stands between us and the server. `budget` is how many documents or events each step of a claim
    handles in one transaction.
    """

    one_writer = False

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
        if budget < BUDGET_MIN:
            raise ValueError(f"budget is {budget}; it must be at least {BUDGET_MIN}")
        self._clock = clock
        self._budget = budget
        self._repair_after_s = 0.0  # by the stopwatch
        self._recount_after_s = 0.0
        self.url = url
        self._database = Database(url, schema=schema, pool_max=pool_max, prepare=prepare)
        self._cache = SettingsCache()
        self._random = random or Random()
        self._gate = CustomerGate()
        try:
            self._make(settings, key, migrate=migrate)
            self._key = self._read_queue().key  # of ids; it never changes
            self._watching = Watching(self._database, listen_url)
        except BaseException:
            self._database.close()
            raise

    def _make(self, settings: Settings | None, key: int | None, *, migrate: bool) -> None:
        """Bring the schema up, if that is allowed and needed, and make the queue."""
        database = self._database
        try:
            connection = database.connect()
            with connection:
                version = version_of(connection, database.schema)
                if migrate and version < newest():
                    migrate_on_opening(connection, database)
                else:
                    refuse_other(version, database.name, database.schema)
                session = Session(connection, database.schema)
                if not session.fetch(QUEUE):
                    first = settings_columns(settings or Settings())
                    crash.point("configure-before-commit")
                    drawn = randbits(ids.BITS) if key is None else key
                    session.ask(ADD_QUEUE, (drawn, *first))
                    crash.point("configure-after-commit")
        except psycopg.Error as error:
            raise database.translate(error) from error

    @property
    def name(self) -> str:
        """The database, for people."""
        return self._database.name

    # ── Settings ─────────────────────────────────────────────────────────────────────────────────

    def settings(self) -> Settings:
        return self._read_queue().settings

    def _read_queue(self) -> QueueRow:
        with self._database.reading() as session:
            return query.queue_row(session, self._cache)

    def configure(self, settings: Settings, *, expected: Settings | None = None) -> bool:
        moment, uptime = self._moment(), self._uptime()
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
                    session, settings, version, moment=moment, uptime=uptime, budget=budget
                )
            )
        if result is admin.ConfigureResult.STALE_VERSION:
            return False
        try:
            while not self._database.transact(lambda session: admin.convert(session, budget)):
                pass
        except StoreError as error:
            # The settings are in force, and claims convert the other customers.
            _LOG.warning("the flows of the new mode are left to claims: %s", error)
        self._note()
        return True

    def adjust(
        self,
        customer: str,
        settings: CustomerSettings,
        *,
        expected: CustomerSettings | None = None,
    ) -> bool:
        moment = self._moment()
        applied = self._database.transact(
            lambda session: admin.adjust(session, customer, settings, expected, moment)
        )
        self._note()
        return applied

    # ── The road ─────────────────────────────────────────────────────────────────────────────────

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        moment = self._moment()
        if connection is not None:
            return self._submit_with(connection, documents, moment)
        with self._gate.passed((each.customer for each in documents), WAIT_S):
            try:
                receipts = self._submit(documents, moment)
            except QueueFull as full:
                if full.limit != "waiting_max" or not self._recount():
                    raise
                receipts = self._submit(documents, moment)
        self._note()
        return receipts

    def _submit(self, documents: Sequence[NewDocument], moment: int | None) -> list[Receipt]:
        return self._in_this_epoch(
            lambda: self._database.transact(
                lambda session: submit(session, documents, self._key, moment, self._random)
            )
        )

    def _recount(self) -> bool:
        """Correct the counters of a full queue if they are wrong; returns whether they were.

        It runs at most once in `RECOUNT_EVERY_S`. The check takes no lock: a queue that is really
        full is never locked for it.
        """
        now = stopwatch()
        if now < self._recount_after_s:
            return False
        self._recount_after_s = now + RECOUNT_EVERY_S
        try:
            with self._database.reading() as session:
                if not admin.has_wrong_counters(session):
                    return False
            return self._database.transact(
                lambda session: admin.repair_queue(session, self._budget), wait_s=0
            )
        except StoreError as error:
            _LOG.warning("cannot recount the full queue yet: %s", error)
            return False

    def _in_this_epoch(self, submit: Callable[[], list[Receipt]]) -> list[Receipt]:
        """Repeat a submission after a new epoch has begun, in a transaction of our own: a caller's
        would hold the lock of claims."""
        try:
            return submit()
        except NewEpoch:
            self._database.transact(lambda session: session.fetch(CHECK_EPOCH))
        try:
            return submit()
        except NewEpoch:
            raise StoreUnavailable(
                "a new epoch has begun since the transaction of the connection; roll it back, and "
                "repeat all of it"
            ) from None

    def _submit_with(
        self, connection: Any, documents: Sequence[NewDocument], moment: int | None
    ) -> list[Receipt]:
        """In the caller's transaction, which decides whether the documents exist."""
        if not isinstance(connection, psycopg.Connection):
            raise TypeError(
                f"connection is a {type(connection).__name__}; it must be a psycopg.Connection "
                "to the database of the queue"
            )
        session = Session(connection, self._database.schema, own=False)
        try:
            if not connection.autocommit:
                session.ask("SELECT 1")  # begins a transaction: the next line sets a savepoint
            with connection.transaction():
                return self._in_this_epoch(
                    lambda: submit(session, documents, self._key, moment, self._random)
                )
        except psycopg.Error as error:
            raise self._database.translate_of_caller(error, connection) from error

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
        claims: list[Claim] = []
        lost: list[Fence] = []
        cancelled: list[Document] = []
        has_committed = False
        while True:
            request = Request(
                str(UUID(int=self._random.getrandbits(128), version=4)),
                n - len(claims),
                worker,
                lease_us,
                self._moment(),
                self._uptime(),
                self._budget,
            )
            try:
                granted = self._claim(request, outcomes)
            except StoreError:
                if not has_committed:
                    raise
                return Claimed(claims, lost, cancelled)  # the next call raises the error
            has_committed = True
            claims += granted.claims
            lost += granted.lost
            cancelled += granted.cancelled
            outcomes = ()
            if not granted.more or len(claims) == n:
                return Claimed(claims, lost, cancelled)

    def _claim(self, request: Request, outcomes: Sequence[Outcome]) -> Granted:
        granted = self._database.transact(
            lambda session: claim(session, request, self._key, outcomes), Use.WORK
        )
        if granted.suspects:
            self._repair(granted.suspects)
        if granted.changed:
            self._note()
        return granted

    def _repair(self, customers: Sequence[int]) -> None:
        """Rebuild the counters of a few customers, without waiting for locks: the claim that found
        them holds leases. Later claims find the others again."""
        now = stopwatch()
        if now < self._repair_after_s:
            return
        some = customers[:REPAIRS_MAX]
        try:
            for _ in range(REPAIRS_MAX):
                if self._database.transact(
                    lambda session: admin.repair(session, some, self._budget), wait_s=0
                ):
                    _LOG.warning("rebuilt the flows and counters of %d customers", len(some))
                    return
        except StoreError as error:
            _LOG.warning("cannot rebuild the counters of %d customers yet: %s", len(some), error)
        self._repair_after_s = now + REPAIR_PAUSE_S

    def sync(self) -> None:
        """Every claim is durable when it returns."""

    def renew(
        self,
        fences: Sequence[Fence],
        *,
        lease_us: int,
        progress: Mapping[Fence, Progress] = NO_PROGRESS,
    ) -> Renewed:
        check_lease(lease_us)
        uptime = self._uptime()
        at = uptime.at if uptime else None
        return self._database.transact(
            lambda session: renew(session, self._key, fences, progress, lease_us=lease_us, at=at),
            Use.WORK,
        )

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        check_outcomes(outcomes)
        moment = self._moment()
        lost = self._database.transact(
            lambda session: finish(session, self._key, outcomes, moment), Use.WORK
        )
        self._note()
        return lost

    def cancel(self, ids: Sequence[str]) -> list[State | None]:
        moment = self._moment()
        states = self._database.transact(
            lambda session: admin.cancel(session, ids, self._key, moment)
        )
        self._note()
        return states

    def retry(self, ids: Sequence[str]) -> list[State | None]:
        moment = self._moment()
        states = self._database.transact(
            lambda session: admin.retry(session, ids, self._key, moment)
        )
        self._note()
        return states

    def begin_epoch(self) -> None:
        self._database.transact(lambda session: session.fetch("SELECT fairturn.begin_epoch()"))
        self._note()

    # ── Reading ──────────────────────────────────────────────────────────────────────────────────

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

    def customers(
        self, *, names: Sequence[str] | None = None, after: str | None = None, size: int = 100
    ) -> CustomerPage:
        with self._looking() as (session, queue, now):
            return query.customers(session, queue, now, names=names, after=after, size=size)

    def summary(self) -> Summary:
        return self._database.transact(lambda session: query.summary(session, alone=True))

    def lanes(self, *, size: int = 24) -> Lanes:
        with self._looking() as (session, queue, now):
            uptime = self._uptime() or Uptime("server", now)
            return lanes.lanes(session, queue, size, now, uptime)

    def situation(self, id: str) -> Situation | None:
        with self._looking() as (session, queue, now):
            uptime = self._uptime() or Uptime("server", now)
            return snapshot.situation(session, queue, id, now, uptime)

    def workers(self) -> list[Seen]:
        with self._database.reading() as session:
            return access.workers(session)

    def sign_on(self, worker: str, slots: int) -> None:
        moment = self._moment()
        self._database.transact(lambda session: access.sign_on(session, worker, slots, moment))

    def sign_off(self, worker: str) -> None:
        self._database.transact(lambda session: access.sign_off(session, worker))

    def oldest_waiting(self) -> Mapping[int, int]:
        with self._database.reading() as session:
            return access.oldest_waiting(session)

    @contextmanager
    def _looking(self) -> Iterator[tuple[Session, QueueRow, int]]:
        """A snapshot, the queue's row in it, and the moment."""
        with self._database.reading() as session:
            with session.together():
                told = session.ask(QUEUE)
                told_now = session.ask(_NOW, (self._moment(),))
            ((now,),) = told_now.fetchall()
            yield session, to_queue(told.fetchall()[0], self._cache), now

    # ── Access keys ──────────────────────────────────────────────────────────────────────────────

    def add_key(self, key: AccessKey) -> None:
        self._database.transact(lambda session: access.add(session, key))
        self._note()

    def access_key(self, id: str) -> AccessKey | None:
        with self._database.reading() as session:
            return access.find(session, id)

    def access_keys(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> list[AccessKey]:
        with self._database.reading() as session:
            return access.page(session, customer, after, size)

    def end_key(self, id: str, at: int) -> AccessKey | None:
        key = self._database.transact(lambda session: access.end(session, id, at))
        self._note()
        return key

    def note_use(self, id: str, at: int) -> None:
        self._database.transact(lambda session: access.use(session, id, at))

    # ── Forgetting ───────────────────────────────────────────────────────────────────────────────

    def prune(self, *, documents_max: int = 1_000) -> list[str] | None:
        moment, settings = self._moment(), self.settings()
        contents = self._database.transact(
            lambda session: retention.prune(session, settings, moment, documents_max)
        )
        if contents is not None:
            self._note()
        return contents

    def purge(self, customer: str) -> list[str]:
        moment = self._moment()
        contents: list[str] = []
        done = False
        while not done:
            batch, done = self._database.transact(
                lambda session: retention.purge(session, customer, moment)
            )
            contents += batch
            self._note()
        return contents

    def unreferenced(
        self, content_names: Sequence[str], *, timeout_s: float = UNREFERENCED_S
    ) -> list[str]:
        return retention.unreferenced(self._database.reading, content_names, timeout_s)

    def load(self, whole: Whole, progress: bulk_load.Progress) -> None:
        """Fill this queue, which must be new, with all of another one."""
        self._database.transact(lambda session: bulk_load.load(session, self.name, whole, progress))
        self._key = self._read_queue().key
        self._note()

    # ── Changes ──────────────────────────────────────────────────────────────────────────────────

    def version(self) -> int:
        return self._watching.version()

    def wait(self, version: int, timeout_s: float, *, certain: bool = True) -> int:
        if not certain:
            return self._watching.hear(version, timeout_s)
        return self._watching.wait(version, timeout_s)

    def _note(self) -> None:
        self._watching.note()

    def close(self) -> None:
        self._watching.close()
        self._database.close()

    # ── The time ─────────────────────────────────────────────────────────────────────────────────

    def _moment(self) -> int | None:
        return None if self._clock is None else self._clock.now()

    def _uptime(self) -> Uptime | None:
        return None if self._clock is None else self._clock.uptime()
