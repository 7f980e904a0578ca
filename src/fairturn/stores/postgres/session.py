"""A connection for the time of one call.

Every write operation is one function call, and so one transaction that the server executes without
waiting for the client. Nothing here leaves a trace in the server's session: no SET, no session
locks. So connections may come from PgBouncer in transaction mode; only on a connection that leads
straight to the server are statements prepared.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from fairturn import crash
from fairturn.stores.postgres.adapters import adapt
from fairturn.stores.values import Row

SCHEMA = "fairturn"
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
BEGIN_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
COMMIT = "COMMIT"
# In a transaction of its own, and without waiting for the disk: a NOTIFY in a transaction that does
# would let all commits of the server wait for each other.
NOTIFY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, '')"

# Advisory locks, until the end of the transaction. ARCHITECTURE.md has the order of all locks.
LOCK_SETTINGS = "SELECT pg_advisory_xact_lock(hashtext('fairturn.'), 1)"

Connection = psycopg.Connection[Any]
Values = Sequence[Any] | dict[str, Any]
Answer = psycopg.Cursor[Row]


class Session:
    """A connection for the time of one call."""

    def __init__(self, connection: Connection, schema: str, *, own: bool = True) -> None:
        self.connection = connection
        self.unsure = False  # whether something may have been committed that a repeat would repeat
        self._schema = schema
        self._own = own  # one of the caller's keeps its adapters

    def ask(self, statement: str, values: Values = ()) -> Answer:
        """Execute a statement. In a pipeline its rows come at the end."""
        cursor = psycopg.Cursor(self.connection, row_factory=tuple_row)
        if not self._own:
            adapt(cursor.adapters)
        return cursor.execute(self._named(statement), values or None, binary=True)

    def fetch(self, statement: str, values: Values = ()) -> list[Row]:
        """All rows of a statement."""
        return self.ask(statement, values).fetchall()

    def copy(self, statement: str, types: Sequence[str], rows: Iterable[Row]) -> None:
        """Put many rows into a table."""
        cursor = psycopg.Cursor(self.connection, row_factory=tuple_row)
        with cursor.copy(self._named(statement)) as copy:
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)

    def together(self) -> AbstractContextManager[psycopg.Pipeline]:
        """Statements that go to the server in one round trip."""
        return self.connection.pipeline()

    @contextmanager
    def commit(self, what: str) -> Iterator[None]:
        """Statements that go to the server in one round trip, and a COMMIT after them."""
        crash.point(f"{what}-before-commit")
        with self.together():
            yield
            self.unsure = True
            self.ask(COMMIT)
        crash.point(f"{what}-after-commit")

    def _named(self, statement: str) -> str:
        """A statement on the schema of the queue."""
        if self._schema == SCHEMA:
            return statement
        return statement.replace(f"{SCHEMA}.", f"{self._schema}.")
