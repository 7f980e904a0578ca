"""Databases with an empty queue's schema in them, each a copy of one that was migrated once."""

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

from fairturn.stores.postgres import migrating
from tests.servers import postgres

_numbers = count()


@cache
def _template() -> str:
    """The name of the template, made by the first process of the run that needs one."""
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
                migrating.migrate(connection, unfinished, "fairturn")
            server.execute(
                sql.SQL("ALTER DATABASE {} RENAME TO {}").format(
                    sql.Identifier(unfinished), sql.Identifier(name)
                )
            )
        Path(making.name).unlink(missing_ok=True)
    return name


class Databases:
    """Databases for one test, dropped at its end."""

    def __init__(self) -> None:
        self._server = postgres.of_this_run()
        self._names: list[str] = []

    def new(self, *, empty: bool = False) -> str:
        """The address of a new database: with an empty queue's schema, or really empty."""
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
            self._server.drop(name)
