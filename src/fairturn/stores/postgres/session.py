"""A connection for the time of one call: its statements, in as few round trips as possible.

Nothing here leaves a trace in the server's session: no SET, no session's locks, no names. So
connections may come from PgBouncer in transaction mode. Only on a connection that leads straight to
the server are statements prepared.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import errors
from psycopg.rows import tuple_row

from fairturn import crash
from fairturn.stores.postgres.adapting import adapt
from fairturn.stores.postgres.piping import (
    Afterwards,
    Line,
    NotSynced,
    Pipe,
    Result,
    Values,
    ask_alone,
    nothing,
)
from fairturn.stores.values import Row

SCHEMA = "fairturn"
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
BEGIN_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
COMMIT = "COMMIT"
# A commit that others see before it is on the disk, and what waits for the disk after it: the
# server's log is written in its order, so what follows a commit takes it along.
_SYNC_LATER = "set_config('synchronous_commit', 'off', true)"
_SYNC = Afterwards("SELECT pg_logical_emit_message(true, 'fairturn', '')", (), may_fail=False)
# A hint need not survive a crash, so nobody waits for the disk. As a part of a statement it is told
# when that one is committed, which does not wait for the disk, either.
HINT_FIRST = f"{_SYNC_LATER}, pg_notify(%s, '')"
HINT = f"SELECT {HINT_FIRST}"

# Locks by agreement, until the end of the transaction. ARCHITECTURE.md has the order of all locks.
# Who holds the row of `queue` waits for no document; and who holds the limits for no customer, or a
# caller whose transaction has submitted and lasts would hold up every outcome.
LOCK_SETTINGS = "SELECT pg_advisory_xact_lock(hashtext('fairturn.'), 1)"
SHARE_SETTINGS = "SELECT pg_advisory_xact_lock_shared(hashtext('fairturn.'), 1)"
LOCK_LIMITS = "SELECT pg_advisory_xact_lock(hashtext('fairturn.'), 2)"
# For the rest of a transaction: every statement has one right plan, by its indexes in loops. Else
# statistics of a table that was small when somebody looked would lead to plans that read all of it,
# the dead rows included; and a statement that was prepared would be planned anew for each value. To
# a server before 18 a plan that is forced seems so costly that it would compile it, each time for
# longer than a hundred claims take.
PLAN_BY_INDEXES = """
    set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
    set_config('enable_mergejoin', 'off', true), set_config('enable_bitmapscan', 'off', true),
    set_config('plan_cache_mode', 'force_generic_plan', true), set_config('jit', 'off', true)"""
PLAN = f"SELECT {PLAN_BY_INDEXES}"
SHARE_BOTH = f"""
    SELECT {PLAN_BY_INDEXES}, pg_advisory_xact_lock_shared(hashtext('fairturn.'), 1),
        pg_advisory_xact_lock_shared(hashtext('fairturn.'), 2)"""
LOCK_GATE = "SELECT pg_advisory_xact_lock(hashtext('fairturn.'), 3)"

Connection = psycopg.Connection[Any]
Answer = Result | psycopg.Cursor[Row]

# Errors with which a hint has nothing to do.
_NO_HINTS_FAULT = (
    NotSynced,
    errors.QueryCanceled,
    errors.LockNotAvailable,
    errors.SerializationFailure,
    errors.DeadlockDetected,
    errors.ReadOnlySqlTransaction,
)


class Session:
    """A connection for the time of one call."""

    def __init__(self, connection: Connection, schema: str) -> None:
        self.connection = connection
        self.committing = False  # whether a COMMIT may have reached the server
        self.hint: str | None = None  # a channel on which others are told of it
        self.hint_first = False  # whether they hear of it before it is on the disk
        self._schema = schema
        # One that is the caller's is not a line of ours, and stays as it is.
        self.line = connection if isinstance(connection, Line) else None
        self.pipe: Pipe | None = None  # the round trip that is under way
        self.open: Pipe | None = None  # with something that comes with the next round trip

    def ask(self, statement: str, values: Values = ()) -> Answer:
        """Execute a statement. If there are several in a round trip, its rows come at the end."""
        if self._schema != SCHEMA:
            statement = self._named(statement)
        if self.line is None:
            return self._cursor().execute(statement, values or None, binary=True)
        if self.pipe is not None:
            return self.pipe.add(statement, values)
        if self.open is None:
            return ask_alone(self.line, statement, values)
        pipe = self.open
        with self.together():
            return pipe.add(statement, values)

    def ask_later(self, statement: str, values: Values = ()) -> Answer:
        """A statement that goes along with a round trip; its rows come with the next one."""
        assert self.pipe is not None, "it is no part of a round trip"
        return self.pipe.add_later(self._named(statement), values)

    def fetch(self, statement: str, values: Values = ()) -> list[Row]:
        """All rows of a statement, at once: also if it is one of several in a round trip."""
        answer = self.ask(statement, values)
        if self.pipe is not None:
            self.pipe.exchange()
        return answer.fetchall()

    def send(self) -> None:
        """Let the server begin with those statements of a round trip that it was asked so far."""
        if self.pipe is not None:
            self.pipe.send()

    def fetch_last(self, statement: str, hinting: str, values: Sequence[Any]) -> list[Row]:
        """All rows of a statement that is a transaction, and the last one of its session.
        `hinting` is the same with `HINT_FIRST` behind it; if that fails, it costs nothing else.
        """
        if self.hint is None:
            return self.fetch(statement, values)
        try:
            with RoundTrip(self, afterwards=self._afterwards(hinted=self.hint_first)):
                if self.hint_first:
                    told = self.ask(hinting, (*values, self.hint))
                else:
                    told = self.ask(statement, values)
        except psycopg.Error as error:
            if not self.hint_first or self.connection.closed or isinstance(error, _NO_HINTS_FAULT):
                raise
            self.hint, self.hint_first = None, False
            return self.fetch(statement, values)
        return told.fetchall()

    def copy(
        self,
        statement: str,
        types: Sequence[str],
        rows: Iterable[Row],
        meanwhile: Callable[[], None] = nothing,
    ) -> None:
        """Put many rows into a table. `meanwhile` is called while the server is at work on them."""
        with self._cursor().copy(self._named(statement)) as copy:
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)
            meanwhile()

    def copy_blocks(
        self, statement: str, blocks: Iterable[bytes], meanwhile: Callable[[], None]
    ) -> None:
        """The same with rows as they go to the server: each block at once."""
        with self._cursor().copy(self._named(statement)) as copy:
            for block in blocks:
                copy.write(block)
            meanwhile()

    def _named(self, statement: str) -> str:
        """A statement on the schema of the queue."""
        return statement.replace(f"{SCHEMA}.", f"{self._schema}.")

    def _cursor(self) -> psycopg.Cursor[Row]:
        cursor = psycopg.Cursor(self.connection, row_factory=tuple_row)
        if self.line is None:
            adapt(cursor.adapters)
        return cursor

    def together(self, *, meanwhile: Callable[[], None] = nothing) -> "RoundTrip":
        """Statements that go to the server in one round trip. If there is one already, it is over
        when these are. `meanwhile` is called while the server is at work on them, and has what was
        asked for later."""
        return RoundTrip(self, meanwhile)

    def roll_back(self) -> None:
        """End what was begun, also if something is on its way that was asked for later."""
        with suppress(psycopg.Error):
            self.catch_up()
        self.connection.rollback()

    def catch_up(self) -> None:
        """Wait for what was asked for later."""
        if self.pipe is not None:
            self.pipe.exchange()
        elif self.open is not None:
            with self.together():
                pass

    def _afterwards(self, *, hinted: bool = False) -> list[Afterwards]:
        """What follows a COMMIT; the hint among it, unless it went out before."""
        following = []
        if self.hint is not None and not hinted:
            following.append(Afterwards(HINT, (self.hint,), may_fail=True))
        return [*following, _SYNC] if self.hint_first else following

    @contextmanager
    def commit(self, what: str, meanwhile: Callable[[], None] = nothing) -> Iterator[None]:
        """Statements that go to the server in one round trip, and a COMMIT after them."""
        crash.point(f"{what}-before-commit")
        with RoundTrip(self, meanwhile, self._afterwards()):
            if self.hint_first:
                self.ask(f"SELECT {_SYNC_LATER}")
            yield
            self.committing = True
            self.ask(COMMIT)
        crash.point(f"{what}-after-commit")


class RoundTrip:
    """Statements of a session that go to the server together. What is to be executed afterwards
    goes along; it is known before they are. A generator would take twice as long."""

    __slots__ = ("_afterwards", "_meanwhile", "_pipe", "_pipeline", "_session")

    def __init__(
        self,
        session: Session,
        meanwhile: Callable[[], None] = nothing,
        afterwards: Sequence[Afterwards] = (),
    ) -> None:
        self._session = session
        self._meanwhile = meanwhile
        self._afterwards = afterwards
        self._pipe: Pipe | None = None  # if this is not a part of another round trip
        self._pipeline: Any = None  # the driver's, on a connection of the caller

    def __enter__(self) -> None:
        session = self._session
        if session.line is None:
            self._pipeline = session.connection.pipeline()
            self._pipeline.__enter__()
        elif session.pipe is None:
            self._pipe = session.pipe = session.open or Pipe(session.line)
            session.open = None

    def __exit__(self, kind: type[BaseException] | None, *more: Any) -> None:
        session, pipe = self._session, self._pipe
        if self._pipeline is not None:
            self._pipeline.__exit__(kind, *more)
        elif pipe is None:
            if kind is None:
                assert session.pipe is not None, "the round trip around it has ended"
                session.pipe.exchange()
        else:
            session.pipe = None
            if kind is not None:
                pipe.drop()
            elif pipe.close(self._afterwards, self._meanwhile):
                session.open = pipe
            return
        if kind is None:
            self._meanwhile()


class Overtaken(psycopg.DatabaseError):
    """What a transaction has read is no longer true; it is to begin anew."""
