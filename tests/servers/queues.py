"""Databases with the schema of an empty queue, each a copy of one that was migrated once."""

import atexit
import fcntl
import os
import tempfile
from functools import cache
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg
from psycopg import sql

from fairturn.stores.postgres import schema
from tests.servers import postgres

_numbers = count()


@cache
def _template() -> str:
    """Return the name of the template, created by the first process of the run that needs it."""
    server = postgres.of_this_run()
    name = f"fairturn_template_{server.pid or os.getpid()}"
    with (Path(tempfile.gettempdir()) / f"{name}.lock").open("w") as making:
        fcntl.flock(making, fcntl.LOCK_EX)
        known = server.execute(
            sql.SQL("SELECT 1 FROM pg_database WHERE datname = {}").format(sql.Literal(name))
        )
        if not known:
            unfinished = f"{name}_unfinished"
            server.drop(unfinished)
            with psycopg.connect(server.create(unfinished), autocommit=True) as connection:
                schema.migrate(connection, unfinished, "fairturn")
            server.execute(
                sql.SQL("ALTER DATABASE {} RENAME TO {}").format(
                    sql.Identifier(unfinished), sql.Identifier(name)
                )
            )
        Path(making.name).unlink(missing_ok=True)
    return name


class Databases:
    """Databases for one test, dropped at its end. If they are used only through a store, they can
    be `recycled`: emptied and reused by a later test, because creating and dropping one takes
    longer than most tests."""

    def __init__(self, *, recycled: bool = False) -> None:
        self._server = postgres.of_this_run()
        self._names: list[str] = []
        self._recycled = recycled

    def new(self, *, empty: bool = False) -> str:
        """Return the URL of a new database: with an empty queue's schema, or without one."""
        if self._recycled and not empty and _stock():
            self._names.append(_stock().pop())
            return self._server.url(self._names[-1])
        name = f"fairturn_{os.getpid()}_{next(_numbers)}"
        self._names.append(name)
        return self._server.create(name, "template1" if empty else _template())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name in self._names:
            if self._recycled and kind is None and _emptied(self._server.url(name)):
                _stock().append(name)
            else:
                self._server.drop(name)


# ── As new ───────────────────────────────────────────────────────────────────────────────────────

_SIZE_BYTES_MAX = 4_000_000  # of dead rows
_SIZE = """
    SELECT sum(pg_total_relation_size(oid)) FROM pg_class
    WHERE relnamespace = 'fairturn'::regnamespace AND relkind = 'r'"""
_NAMES = """
    SELECT relname FROM pg_class
    WHERE relnamespace = 'fairturn'::regnamespace AND relkind = %s"""


@cache
def _stock() -> list[str]:
    """The databases of this process that are as new."""
    names: list[str] = []
    server = postgres.of_this_run()

    @atexit.register
    def drop_all() -> None:
        for name in names:
            server.drop(name)

    return names


@cache
def _first_rows() -> tuple[str, dict[str, bytes]]:
    """Return the statement that empties every table and resets every sequence as in the template,
    and its rows."""
    with psycopg.connect(postgres.of_this_run().url(_template())) as connection:
        tables, sequences = (
            [name for (name,) in connection.execute(_NAMES, (kind,)).fetchall()] for kind in "rS"
        )
        rows = {}
        for name in tables:
            with connection.cursor().copy(f"COPY fairturn.{name} TO STDOUT") as copy:
                rows[name] = b"".join(copy)
        clear = [f"DELETE FROM fairturn.{name}" for name in tables]
        for name in sequences:
            ((value, called),) = connection.execute(
                f"SELECT last_value, is_called FROM fairturn.{name}"
            ).fetchall()
            clear.append(f"SELECT setval('fairturn.{name}', {value}, {called})")
    return ";".join(clear), {name: some for name, some in rows.items() if some}


def _emptied(url: str) -> bool:
    """Empty a database; return whether it is as new: unlocked and small."""
    clear, rows = _first_rows()
    try:
        with psycopg.connect(url, options="-c lock_timeout=1s") as connection:
            connection.execute(clear)
            for name, some in rows.items():
                with connection.cursor().copy(f"COPY fairturn.{name} FROM STDIN") as copy:
                    copy.write(some)
            ((size_bytes,),) = connection.execute(_SIZE).fetchall()
    except psycopg.Error:
        return False
    return bool(size_bytes <= _SIZE_BYTES_MAX)
