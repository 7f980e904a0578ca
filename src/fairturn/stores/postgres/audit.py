"""The checks of `fairturn doctor` on a server: the recount (`functions/audit.sql`) and its repairs
(`functions/repair.sql`)."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import psycopg

from fairturn.clock import SERVER_NOW
from fairturn.model import ContentRef
from fairturn.stores.inspection import Damage, Damages, Findings
from fairturn.stores.postgres.admin import REPAIR_CUSTOMERS, REPAIR_QUEUE
from fairturn.stores.postgres.claim import BUDGET
from fairturn.stores.postgres.connection import POOL_MAX, PostgresDatabase
from fairturn.stores.postgres.schema import newest, version_of
from fairturn.stores.postgres.session import BEGIN_SNAPSHOT, COMMIT, Session
from fairturn.stores.urls import SCHEMA
from fairturn.stores.values import RUNNING, WAITING, Row

STEPS = ("queue", "flows", "customers", "documents", "leases")
BATCH = 100  # customers, leases or rows that one transaction repairs, under the lock of the queue
_PAGE = 1_000

_DECLARE = """
    DECLARE damages NO SCROLL CURSOR FOR
    SELECT a.kind, a.customer, c.name, a.place, a.stored, a.truth
    FROM fairturn.audit_{step}() a LEFT JOIN fairturn.customers c ON c.number = a.customer"""
_FETCH = f"FETCH {_PAGE} FROM damages"
_CLOSE = "CLOSE damages"

_REPAIR_LEASES = "SELECT fairturn.repair_leases(%s::int8[], %s::int8[], %s::int4)"
_REPAIR_ROWS = "SELECT fairturn.repair_rows(%s::int8[])"


def recount(session: Session, advance: Callable[[int, int], None]) -> Iterator[Damage]:
    """Yield every derived value that does not agree with the documents, in the snapshot of the
    session."""
    for done, step in enumerate(STEPS):
        advance(done, len(STEPS))
        session.ask(_DECLARE.format(step=step))
        while rows := session.fetch(_FETCH):
            yield from (Damage(*row) for row in rows)
        session.ask(_CLOSE)
    advance(len(STEPS), len(STEPS))


def repair(
    url: str, schema: str | None, damages: Damages, advance: Callable[[int, int], None]
) -> None:
    """Repair what a recount has found. Other processes use the queue between two batches."""
    database = PostgresDatabase(url, schema=schema or SCHEMA, pool_max=POOL_MAX, prepare=False)
    calls: list[tuple[str, Row]] = []
    if damages.queue:
        calls.append((REPAIR_QUEUE, (BUDGET,)))
    calls += [(_REPAIR_LEASES, (b, [], BUDGET)) for b in _batches(damages.fences)]
    calls += [(_REPAIR_LEASES, ([], b, BUDGET)) for b in _batches(damages.unleased)]
    calls += [(REPAIR_CUSTOMERS, (b, BUDGET)) for b in _batches(damages.customers)]
    calls += [(_REPAIR_ROWS, (b,)) for b in _batches(damages.orphans)]
    try:
        for done, (statement, values) in enumerate(calls):
            advance(done, len(calls))
            while not _call(database, statement, values):
                pass  # the call only applied events
    finally:
        database.close()


def _call(database: PostgresDatabase, statement: str, values: Row) -> bool:
    def work(session: Session) -> bool:
        ((done,),) = session.fetch(statement, values)
        return bool(done)

    return database.transact(work)


def _batches(numbers: Iterable[int]) -> Iterator[list[int]]:
    left = iter(sorted(numbers))
    while batch := list(islice(left, BATCH)):
        yield batch


_VERSION = "SELECT current_setting('server_version')"
# By the primary key: the scan for the oldest waiting document passes the ended ones before it.
_QUEUE = f"""
    SELECT settings, {SERVER_NOW}, (
            SELECT submitted_at FROM fairturn.documents WHERE state = {WAITING}
            ORDER BY number LIMIT 1), (
            SELECT submitted_at FROM fairturn.documents ORDER BY number DESC LIMIT 1), (
            SELECT coalesce(sum(running), 0)::bigint FROM fairturn.leases), (
            SELECT repairs FROM fairturn.scheduler_states ORDER BY version DESC LIMIT 1)
    FROM fairturn.queue"""
# By leases_until. A renewal extends only the expiry in the document's row.
_EXPIRED = f"""
    SELECT count(*), min(d.lease_until)
    FROM fairturn.leases l JOIN fairturn.documents d ON d.number = ANY (l.documents)
    WHERE l.until < %(now)s AND d.state = {RUNNING} AND d.fence = l.fence
        AND d.lease_until < %(now)s"""
# By documents_content, results_content and attempts_content.
_CONTENTS = """
    SELECT content_name, size_bytes, sha256 FROM fairturn.documents WHERE content_name IS NOT NULL
    UNION ALL
    SELECT content_name, size_bytes, sha256 FROM fairturn.results WHERE content_name IS NOT NULL
    UNION ALL
    SELECT content_name, size_bytes, sha256 FROM fairturn.attempts WHERE content_name IS NOT NULL"""
_CONTENTS_KNOWN = f"SELECT count(*) FROM ({_CONTENTS}) c"
# The owner of a schema may migrate it; a new one needs CREATE on the database.
_MAY_MIGRATE = """
    SELECT coalesce(
        (SELECT pg_has_role(nspowner, 'USAGE') FROM pg_namespace WHERE nspname = %s),
        has_database_privilege(current_database(), 'CREATE'))"""
_SEES_OTHERS = "SELECT pg_has_role('pg_read_all_stats', 'USAGE')"
# Columns of other roles' transactions are NULL without pg_read_all_stats.
_OLDEST = f"""
    SELECT max({SERVER_NOW} - (extract(epoch FROM xact_start) * 1000000)::bigint)
    FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)"""


class ServerInspector:
    """A queue on a server, read in one snapshot."""

    def __init__(self, session: Session, schema: str) -> None:
        self._session = session
        self._schema = schema

    def server(self) -> str:
        """Return the name and version of the server."""
        ((version,),) = self._session.fetch(_VERSION)
        return f"PostgreSQL {version}"

    def schema(self) -> tuple[int, int]:
        """Return the schema version, and the one of this release."""
        version = version_of(self._session.connection, self._schema)
        return version, newest()

    def may_make(self) -> bool:
        """Return whether the role may create or migrate the schema."""
        ((may,),) = self._session.fetch(_MAY_MIGRATE, (self._schema,))
        return bool(may)

    def oldest_transaction_us(self) -> int | None:
        """Return the age of the oldest visible transaction that prevents VACUUM from removing
        rows."""
        ((age,),) = self._session.fetch(_OLDEST)
        return None if age is None else int(age)

    def sees_others(self) -> bool:
        """Return whether the role may see the transactions of other roles."""
        ((sees,),) = self._session.fetch(_SEES_OTHERS)
        return bool(sees)

    def contents(self) -> list[ContentRef]:
        """Return the contents of documents and results that are outside the database."""
        return [ContentRef(*row) for row in self._session.fetch(_CONTENTS)]

    def contents_known(self) -> int:
        """Return the number of these contents."""
        ((known,),) = self._session.fetch(_CONTENTS_KNOWN)
        return int(known)

    def find(self) -> tuple[Findings, int] | None:
        """Return the findings and the server's present time; None if the schema exists and no
        process has opened the queue yet."""
        rows = self._session.fetch(_QUEUE)
        if not rows:
            return None
        ((settings, now, oldest, newest, running, repairs),) = rows
        ((expired, until),) = self._session.fetch(_EXPIRED, {"now": now})
        since = None if until is None else now - until
        return Findings(settings, oldest, newest, running, expired, since, repairs), now

    def recount(self, advance: Callable[[int, int], None]) -> Iterator[Damage]:
        return recount(self._session, advance)


@contextmanager
def examined(url: str, schema: str | None = None) -> Iterator[ServerInspector]:
    """Inspect a queue on a server, in one snapshot. Raise `StoreError` if that is impossible."""
    schema = schema or SCHEMA
    database = PostgresDatabase(url, schema=schema, pool_max=POOL_MAX, prepare=False)
    try:
        connection = database.connect()
        with connection:
            session = Session(connection, schema)
            session.ask(BEGIN_SNAPSHOT)
            yield ServerInspector(session, schema)
            session.ask(COMMIT)
    except psycopg.Error as error:
        raise database.translate(error) from error
    finally:
        database.close()
