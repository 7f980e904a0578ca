"""What can be said about a queue on a server from outside: nothing is made or changed by asking."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg

from fairturn.clock import SERVER_NOW
from fairturn.model import ContentRef
from fairturn.stores.inspection import Damage, Findings
from fairturn.stores.postgres import audit
from fairturn.stores.postgres.connection import POOL_MAX, Database
from fairturn.stores.postgres.schema import newest, version_of
from fairturn.stores.postgres.session import BEGIN_SNAPSHOT, COMMIT, SCHEMA, Session
from fairturn.stores.values import RUNNING, WAITING

_VERSION = "SELECT current_setting('server_version')"
# By the primary key, up to the first: what has ended comes before it and is walked over.
_QUEUE = f"""
    SELECT settings, {SERVER_NOW}, (
            SELECT submitted_at FROM fairturn.documents WHERE state = {WAITING}
            ORDER BY number LIMIT 1), (
            SELECT submitted_at FROM fairturn.documents ORDER BY number DESC LIMIT 1), (
            SELECT coalesce(sum(running), 0)::bigint FROM fairturn.leases), (
            SELECT repairs FROM fairturn.turns ORDER BY version DESC LIMIT 1)
    FROM fairturn.queue"""
# By leases_until; whether a lease ran out is in the document's own row.
_RUN_OUT = f"""
    SELECT count(*), min(d.lease_until)
    FROM fairturn.leases l JOIN fairturn.documents d ON d.number = ANY (l.documents)
    WHERE l.until < %(now)s AND d.state = {RUNNING} AND d.fence = l.fence
        AND d.lease_until < %(now)s"""
# By documents_content and results_content.
_CONTENTS = """
    SELECT content_name, size_bytes, sha256 FROM fairturn.documents WHERE content_name IS NOT NULL
    UNION ALL
    SELECT content_name, size_bytes, sha256 FROM fairturn.results WHERE content_name IS NOT NULL"""
_CONTENTS_KNOWN = f"SELECT count(*) FROM ({_CONTENTS}) c"
# Whoever owns a schema may change it, and whoever may make one in a database may make the first.
_MAY_MAKE = """
    SELECT coalesce(
        (SELECT pg_has_role(nspowner, 'USAGE') FROM pg_namespace WHERE nspname = %s),
        has_database_privilege(current_database(), 'CREATE'))"""
_SEES_OTHERS = "SELECT pg_has_role('pg_read_all_stats', 'USAGE')"
# What the role may not see of others' transactions is NULL.
_OLDEST = f"""
    SELECT max({SERVER_NOW} - (extract(epoch FROM xact_start) * 1000000)::bigint)
    FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)"""


class Examiner:
    """A server that is looked at."""

    def __init__(self, session: Session, schema: str) -> None:
        self._session = session
        self._schema = schema

    def server(self) -> str:
        """Which PostgreSQL it is."""
        ((version,),) = self._session.fetch(_VERSION)
        return f"PostgreSQL {version}"

    def schema(self) -> tuple[int, int]:
        """The version of the schema, and the newest that this fairturn knows."""
        version = version_of(self._session.connection, self._schema)
        return version, newest()

    def may_make(self) -> bool:
        """Whether the role may make the schema, or bring it up."""
        ((may,),) = self._session.fetch(_MAY_MAKE, (self._schema,))
        return bool(may)

    def oldest_transaction_us(self) -> int | None:
        """For how long the oldest transaction that keeps rows alive is open, as far as one sees."""
        ((age,),) = self._session.fetch(_OLDEST)
        return None if age is None else int(age)

    def sees_others(self) -> bool:
        """Whether the role may see the transactions of others."""
        ((sees,),) = self._session.fetch(_SEES_OTHERS)
        return bool(sees)

    def contents(self) -> list[ContentRef]:
        """Every content outside the database that a document or a result is."""
        return [ContentRef(*row) for row in self._session.fetch(_CONTENTS)]

    def contents_known(self) -> int:
        """How many there are of them."""
        ((known,),) = self._session.fetch(_CONTENTS_KNOWN)
        return int(known)

    def find(self) -> tuple[Findings, int] | None:
        """What the queue says about itself, and the moment on the server; None if there is only a
        schema, and nobody has opened the queue yet."""
        rows = self._session.fetch(_QUEUE)
        if not rows:
            return None
        ((settings, now, oldest, newest, running, repairs),) = rows
        ((run_out, until),) = self._session.fetch(_RUN_OUT, {"now": now})
        since = None if until is None else now - until
        return Findings(settings, oldest, newest, running, run_out, since, repairs), now

    def recount(self, advance: Callable[[int, int], None]) -> Iterator[Damage]:
        """Every stored value that does not agree with the documents."""
        return audit.recount(self._session, advance)


@contextmanager
def examined(url: str, schema: str = SCHEMA) -> Iterator[Examiner]:
    """Look at a queue on a server; a `StoreError` says why it cannot be."""
    database = Database(url, schema=schema, pool_max=POOL_MAX, prepare=False)
    try:
        connection = database.connect()
        with connection:
            session = Session(connection, schema)
            session.ask(BEGIN_SNAPSHOT)
            yield Examiner(session, schema)
            session.ask(COMMIT)
    except psycopg.Error as error:
        raise database.translate(error) from error
    finally:
        database.close()
