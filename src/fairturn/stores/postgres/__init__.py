"""The shared store: one PostgreSQL database, any number of machines."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from secrets import randbits
from typing import Any

import psycopg

from fairturn import crash, ids
from fairturn.access import AccessKey
from fairturn.clock import Clock, Uptime
from fairturn.errors import StoreUnavailable
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
)
from fairturn.situation import Seen, Situation
from fairturn.store import Payloads
from fairturn.stores.postgres import (
    admitting,
    changing,
    forgetting,
    lanes,
    loading,
    migrating,
    reading,
    situating,
)
from fairturn.stores.postgres.alone import Wanted
from fairturn.stores.postgres.claiming import Claiming, Given
from fairturn.stores.postgres.database import POOL_MAX, Database
from fairturn.stores.postgres.outcomes import Finishing, all_completed, finish, renew
from fairturn.stores.postgres.pooling import Use
from fairturn.stores.postgres.rows import (
    ADD_QUEUE,
    MOMENT,
    QUEUE,
    QueueRow,
    settings_columns,
    to_queue,
)
from fairturn.stores.postgres.session import SCHEMA, Session
from fairturn.stores.postgres.sharing import NUMBER_BITS
from fairturn.stores.postgres.submitting import Submitting
from fairturn.stores.postgres.watching import Watching
from fairturn.stores.values import SettingsCache
from fairturn.stores.whole import Whole

_NOW = f"SELECT {MOMENT}"


class PostgresStore:
    """A store in one schema of a database.

    Without a clock the moments are those of the server. `migrate=False` refuses a schema that is
    not there or is older, for roles that may not change it. `listen_url` is where to listen for
    changes, past a pooler; without it, and behind one, changes of others are looked for once in a
    second. `prepare` decides whether statements are prepared; by default that is so where nothing
    stands between us and the server.
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
    ) -> None:
        self._clock = clock
        self.url = url
        self._database = Database(url, schema=schema, pool_max=pool_max, prepare=prepare)
        self._cache = SettingsCache()
        self._random = random or Random()
        self._submitting = Submitting(self._cache, self._random)
        self._claiming = Claiming(self._cache)
        self._claim_lock = threading.Lock()
        self._untold = False  # whether nobody was told yet of a claim
        self._make(settings, key, migrate=migrate)
        self._known = self._read_queue()
        self._watching = Watching(self._database, listen_url)

    def _make(self, settings: Settings | None, key: int | None, *, migrate: bool) -> None:
        """Bring the schema up, if that is allowed and needed, and make the queue."""
        database = self._database
        try:
            connection = database.connect()
            with connection:
                version = migrating.version_of(connection, database.schema)
                if migrate and version < migrating.newest():
                    migrating.migrate_on_opening(connection, database)
                else:
                    migrating.refuse_other(version, database.name, database.schema)
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
            self._known = reading.queue_row(session, self._cache)
            return self._known

    def configure(self, settings: Settings) -> None:
        moment, uptime = self._moment(), self._uptime()
        self._database.transact(
            lambda session: changing.configure(session, self._cache, settings, moment, uptime)
        )
        self._read_queue()
        self._note()

    def adjust(self, customer: str, settings: CustomerSettings) -> None:
        moment = self._moment()
        self._database.transact(
            lambda session: changing.adjust(session, customer, settings, moment)
        )
        self._note()

    # ── The road ─────────────────────────────────────────────────────────────────────────────────

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        moment = self._moment()
        if connection is not None:
            return self._submit_with(connection, documents, moment)
        documents = list(documents)
        alone = len(documents) == 1 and documents[0].parent is None

        def submit(session: Session) -> list[Receipt]:
            self._watching.go_along(session)
            if alone:
                receipts = self._submit_one(session, documents[0], moment)
            else:
                receipts = self._submitting.submit(
                    session, documents, self._known, moment, own=True
                )
            self._watching.note(hinted=session.hint is not None)
            return receipts

        return self._database.transact(submit)

    def submit_payloads(self, payloads: Payloads) -> list[Receipt]:
        moment = self._moment()

        def submit(session: Session) -> list[Receipt]:
            self._watching.go_along(session)
            receipts = self._submitting.submit_payloads(session, payloads, self._known, moment)
            self._watching.note(hinted=session.hint is not None)
            return receipts

        return self._database.transact(submit)

    def _submit_one(
        self, session: Session, document: NewDocument, moment: int | None
    ) -> list[Receipt]:
        crash.point("submit-before-commit")
        known = self._known
        receipts, version = self._submitting.submit_one(session, document, known, moment)
        crash.point("submit-after-commit")
        if version != known.settings_version:
            self._known = to_queue(session.fetch(QUEUE)[0], self._cache)
        return receipts

    def _submit_with(
        self, connection: Any, documents: Sequence[NewDocument], moment: int | None
    ) -> list[Receipt]:
        """In the transaction of the caller, who decides whether the documents exist."""
        if not isinstance(connection, psycopg.Connection):
            raise TypeError(
                f"connection is a {type(connection).__name__}; it must be a psycopg.Connection "
                "to the database of the queue"
            )
        session = Session(connection, self._database.schema)
        try:
            if not connection.autocommit:
                session.ask(
                    "SELECT 1"
                )  # so that the next line sets a savepoint, and commits nothing
            with connection.transaction():
                return self._submitting.submit(
                    session, list(documents), self._known, moment, own=False
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
        self._database.check_process()
        if outcomes and self._claiming.shares(n):
            return self._finish_and_share(n, worker, lease_us, outcomes)
        wanted = Wanted(n, worker, lease_us, self._moment(), self._uptime())

        def claim(session: Session) -> Given:
            try:
                if not outcomes and self._claiming.shares(n):
                    number = self._random.getrandbits(NUMBER_BITS)
                    return self._claiming.share(session, wanted, number, self._known.key)
                known = self._known
                return self._claiming.claim(session, wanted, Finishing(outcomes, known), known)
            except BaseException:
                self._claiming.forget()
                raise

        with self._claim_lock:
            given = self._transact(claim, Use.CLAIMS)
        self._known = given.queue or self._known
        if given.changed:
            if synced or outcomes:
                self._note()
            else:
                self._untold = True
        return Claimed(given.claims, given.lost)

    def _finish_and_share(
        self, n: int, worker: str, lease_us: int, outcomes: Sequence[Outcome]
    ) -> Claimed:
        """Record outcomes before a wait for others. They are recorded then, whatever comes after:
        who asks for documents again hears of what is wrong."""
        lost = self.finish(outcomes)
        try:
            claims, _ = self.claim(n, worker=worker, lease_us=lease_us)
        except StoreUnavailable:
            claims = []
        return Claimed(claims, lost)

    def sync(self) -> None:
        """Every claim is synced when it returns: workers on other machines outlive the server. Only
        to tell others of it can wait until the handlers begin."""
        if self._untold:
            self._untold = False
            self._watching.note_later()

    def _transact(self, work: Any, use: Use) -> Any:
        """A transaction that depends on the settings that this process knows."""

        def refreshed(session: Session) -> Any:
            try:
                return work(session)
            except psycopg.DatabaseError:
                if not session.connection.closed:
                    session.roll_back()
                    self._known = to_queue(session.fetch(QUEUE)[0], self._cache)
                raise

        return self._database.transact(refreshed, use)

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
            lambda session: renew(
                session, self._known.key, fences, progress, lease_us=lease_us, at=at
            )
        )

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        check_outcomes(outcomes)
        moment = self._moment()

        def work(session: Session) -> list[Fence]:
            finishing = Finishing(outcomes, self._known)
            row = finish(session, finishing, moment, self._cache)
            finishing.settle(to_queue(row, self._cache))
            return finishing.lost

        lost: list[Fence] = self._transact(work, Use.OUTCOMES)
        if all_completed(outcomes):
            self._watching.note_ends()
        else:  # something waits again, perhaps
            self._note()
        return lost

    def cancel(self, ids: Sequence[str]) -> list[State | None]:
        moment, key = self._moment(), self._known.key
        states = self._database.transact(
            lambda session: changing.cancel(session, self._cache, ids, key, moment)
        )
        self._note()
        return states

    def retry(self, ids: Sequence[str]) -> list[State | None]:
        moment, key = self._moment(), self._known.key
        states = self._database.transact(
            lambda session: changing.retry(session, self._cache, ids, key, moment)
        )
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
        with self._database.reading() as session:
            return reading.find(session, self._known.key, filter, after, size, reach=reach)

    def read(self, id: str) -> Stored | None:
        with self._database.reading() as session:
            return reading.read(session, self._known.key, id)

    def customers(
        self, *, names: Sequence[str] | None = None, after: str | None = None, size: int = 100
    ) -> CustomerPage:
        with self._looking() as (session, queue, now):
            return reading.customers(session, queue, now, names=names, after=after, size=size)

    def summary(self) -> Summary:
        return self._database.transact(lambda session: reading.summary(session, alone=True))

    def lanes(self, *, size: int = 24) -> Lanes:
        with self._looking() as (session, queue, now):
            uptime = self._uptime() or Uptime("server", now)
            return lanes.lanes(session, queue, size, now, uptime)

    def situation(self, id: str) -> Situation | None:
        with self._looking() as (session, queue, now):
            uptime = self._uptime() or Uptime("server", now)
            return situating.situation(session, queue, id, now, uptime)

    def workers(self) -> list[Seen]:
        with self._database.reading() as session:
            return admitting.workers(session)

    def oldest_waiting(self) -> Mapping[int, int]:
        with self._database.reading() as session:
            return admitting.oldest_waiting(session)

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
        self._database.transact(lambda session: admitting.add(session, key))
        self._note()

    def access_key(self, id: str) -> AccessKey | None:
        with self._database.reading() as session:
            return admitting.find(session, id)

    def access_keys(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> list[AccessKey]:
        with self._database.reading() as session:
            return admitting.page(session, customer, after, size)

    def end_key(self, id: str, at: int) -> AccessKey | None:
        key = self._database.transact(lambda session: admitting.end(session, id, at))
        self._note()
        return key

    def note_use(self, id: str, at: int) -> None:
        self._database.transact(lambda session: admitting.use(session, id, at))

    # ── Forgetting ───────────────────────────────────────────────────────────────────────────────

    def prune(self, *, documents_max: int = 1_000) -> list[str] | None:
        moment = self._moment()
        contents = self._database.transact(
            lambda session: forgetting.prune(session, self._cache, moment, documents_max)
        )
        if contents is not None:
            self._note()
        return contents

    def purge(self, customer: str) -> list[str]:
        moment = self._moment()
        contents = self._database.transact(
            lambda session: forgetting.purge(session, customer, moment)
        )
        self._note()
        return contents

    def unreferenced(self, content_names: Sequence[str]) -> list[str]:
        with self._database.reading() as session:
            return forgetting.unreferenced(session, content_names)

    def load(self, whole: Whole, progress: loading.Progress) -> None:
        """Fill this queue, which must be new, with all of another one."""
        self._database.transact(lambda session: loading.load(session, self.name, whole, progress))
        self._read_queue()
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
