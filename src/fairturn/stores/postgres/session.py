"""A connection for the time of one call, and type adapters.

Every write is one function call: one transaction that the server executes without waiting for the
client. No call leaves session state (no SET, no session locks), so connections may come from
PgBouncer in transaction mode. Statements are prepared only on direct connections.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psycopg
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.rows import tuple_row
from psycopg.types.numeric import Int8BinaryDumper

from fairturn.stores import crash
from fairturn.stores.urls import SCHEMA
from fairturn.stores.values import Row

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
BEGIN_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
COMMIT = "COMMIT"
# In a transaction of its own, without a WAL flush: see notify.py.
NOTIFY = "SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, '')"

# An advisory lock, until the end of the transaction. ARCHITECTURE.md has the order of all locks.
LOCK_SETTINGS = "SELECT pg_advisory_xact_lock(hashtext('fairturn.'), 1)"

Connection = psycopg.Connection[Any]
Values = Sequence[Any] | dict[str, Any]
Answer = psycopg.Cursor[Row]


class Session:
    """A connection for the time of one call."""

    def __init__(self, connection: Connection, schema: str, *, own: bool = True) -> None:
        self.connection = connection
        self.unsure = False  # whether a change may be committed that a retry would make twice
        self._schema = schema
        self._own = own  # a caller's connection keeps its adapters

    def ask(self, statement: str, values: Values = ()) -> Answer:
        """Execute a statement. In a pipeline its rows arrive when the pipeline ends."""
        cursor = psycopg.Cursor(self.connection, row_factory=tuple_row)
        if not self._own:
            adapt(cursor.adapters)
        return cursor.execute(self._named(statement), values or None, binary=True)

    def fetch(self, statement: str, values: Values = ()) -> list[Row]:
        """Execute a statement and return all rows."""
        return self.ask(statement, values).fetchall()

    def copy(self, statement: str, types: Sequence[str], rows: Iterable[Row]) -> None:
        """Write rows into a table by COPY."""
        cursor = psycopg.Cursor(self.connection, row_factory=tuple_row)
        with cursor.copy(self._named(statement)) as copy:
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)

    def together(self) -> AbstractContextManager[psycopg.Pipeline]:
        """Send the statements of a block in one round trip."""
        return self.connection.pipeline()

    @contextmanager
    def commit(self, what: str) -> Iterator[None]:
        """Send the statements of a block, and a COMMIT after them, in one round trip."""
        crash.point(f"{what}-before-commit")
        with self.together():
            yield
            self.unsure = True
            self.ask(COMMIT)
        crash.point(f"{what}-after-commit")

    def _named(self, statement: str) -> str:
        """Replace the default schema in a statement by that of the queue."""
        if self._schema == SCHEMA:
            return statement
        return statement.replace(f"{SCHEMA}.", f"{self._schema}.")


class ListDumper(Dumper):
    """Dumps a list as an array literal; the statement casts it to its type.

    The driver's own dumper takes twice as long, and chooses the smallest type that holds all
    numbers of a list: a statement would be prepared again for each combination of types.
    """

    def dump(self, obj: list[Any]) -> bytes:
        first = next((value for value in obj if value is not None), None)
        if isinstance(first, str):
            return f"{{{','.join(map(_quoted, obj))}}}".encode()
        if isinstance(first, bytes):
            return f"{{{','.join(map(_hexadecimal, obj))}}}".encode()
        return f"{{{str(obj)[1:-1].replace('None', 'NULL')}}}".encode()


def _quoted(value: str | None) -> str:
    if value is None:
        return "NULL"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _hexadecimal(value: bytes | None) -> str:
    return "NULL" if value is None else f'"\\\\x{value.hex()}"'


def adapt(adapters: AdaptersMap) -> None:
    """Make a connection or a cursor send every number as int8 and every list as a literal."""
    adapters.register_dumper(int, Int8BinaryDumper)
    adapters.register_dumper(list, ListDumper)


ADAPTERS = AdaptersMap(psycopg.adapters)
adapt(ADAPTERS)
