"""One PostgreSQL database: connections, transactions, and errors in our own words.

Nothing here leaves a trace in a session: no SET, no session's locks, no names. So connections may
come from PgBouncer in transaction mode. Statements are prepared only on a connection that leads
straight to the server.
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.rows import tuple_row

from fairturn import crash
from fairturn.clock import stopwatch
from fairturn.errors import FairturnError, StoreError, StoreFull, StoreRefused, StoreUnavailable
from fairturn.stores.postgres.adapting import adapt
from fairturn.stores.postgres.addressing import parse
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
from fairturn.stores.postgres.pooling import CONNECT, Pool, PoolClosed, PoolTimeout
from fairturn.stores.values import Row

SCHEMA = "fairturn"
VERSION_MIN = 140000
POOL_MAX = 10
# How long a call waits for a connection, or for others, before it gives up.
WAIT_S = 10.0
_PAUSE_S = 0.01  # before trying again what somebody else holds
ATTEMPTS = 5  # at one transaction that others or a lost connection have ended

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

# Locks by agreement, until the end of the transaction. The order of all locks: that on settings,
# customers by name, that on limits, documents by number, the row of `queue`. Who holds that waits
# for no document; and who holds the limits for no customer, or a caller whose transaction has
# submitted and lasts would hold up every outcome.
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

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)
_NO_WAY_IN = re.compile(
    r'(?P<said>(?P<what>database|role) "[^"]*" does not exist'
    r"|password authentication failed|server does not support SSL)"
)

T = TypeVar("T")
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
        self._line = connection if isinstance(connection, Line) else None
        self._pipe: Pipe | None = None
        self._open: Pipe | None = None  # with something that comes with the next round trip

    def ask(self, statement: str, values: Values = ()) -> Answer:
        """Execute a statement. If there are several in a round trip, its rows come at the end."""
        statement = self._named(statement)
        if self._line is None:
            return self._cursor().execute(statement, values or None, binary=True)
        if self._pipe is not None:
            return self._pipe.add(statement, values)
        if self._open is None:
            return ask_alone(self._line, statement, values)
        pipe = self._open
        with self.together():
            return pipe.add(statement, values)

    def ask_later(self, statement: str, values: Values = ()) -> Answer:
        """A statement that goes along with a round trip; its rows come with the next one."""
        assert self._pipe is not None, "it is no part of a round trip"
        return self._pipe.add_later(self._named(statement), values)

    def fetch(self, statement: str, values: Values = ()) -> list[Row]:
        """All rows of a statement, at once: also if it is one of several in a round trip."""
        answer = self.ask(statement, values)
        if self._pipe is not None:
            self._pipe.exchange()
        return answer.fetchall()

    def send(self) -> None:
        """Let the server begin with those statements of a round trip that it was asked so far."""
        if self._pipe is not None:
            self._pipe.send()

    def fetch_last(self, statement: str, hinting: str, values: Sequence[Any]) -> list[Row]:
        """All rows of a statement that is a transaction, and the last one of its session.
        `hinting` is the same with `HINT_FIRST` in it; if the hint fails, that costs nothing else.
        """
        if self.hint is None:
            return self.fetch(statement, values)
        try:
            with self.together(last=True, hinted=self.hint_first):
                if self.hint_first:
                    told = self.ask(hinting, (self.hint, *values))
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
        if self._schema == SCHEMA:
            return statement
        return statement.replace(f"{SCHEMA}.", f"{self._schema}.")

    def _cursor(self) -> psycopg.Cursor[Row]:
        cursor = psycopg.Cursor(self.connection, row_factory=tuple_row)
        if self._line is None:
            adapt(cursor.adapters)
        return cursor

    @contextmanager
    def together(
        self,
        *,
        last: bool = False,
        hinted: bool = False,
        meanwhile: Callable[[], None] = nothing,
    ) -> Iterator[None]:
        """Statements that go to the server in one round trip; the hint follows the last one, unless
        it is among them. If there is one already, it is over when these are. `meanwhile` is called
        while the server is at work on them, and has what was asked for later."""
        if self._line is None:
            with self.connection.pipeline():
                yield
            meanwhile()
            return
        if self._pipe is not None:
            yield
            self._pipe.exchange()
            meanwhile()
            return
        pipe = self._pipe = self._open or Pipe(self._line)
        self._open = None
        try:
            yield
        except BaseException:
            pipe.drop()
            raise
        finally:
            self._pipe = None
        if pipe.close(self._afterwards(hinted=hinted) if last else (), meanwhile):
            self._open = pipe

    def roll_back(self) -> None:
        """End what was begun, also if something is on its way that was asked for later."""
        with suppress(psycopg.Error):
            self.catch_up()
        self.connection.rollback()

    def catch_up(self) -> None:
        """Wait for what was asked for later."""
        if self._pipe is not None:
            self._pipe.exchange()
        elif self._open is not None:
            with self.together():
                pass

    def _afterwards(self, *, hinted: bool) -> list[Afterwards]:
        """What follows a COMMIT."""
        following = []
        if self.hint is not None and not hinted:
            following.append(Afterwards(HINT, (self.hint,), may_fail=True))
        return [*following, _SYNC] if self.hint_first else following

    @contextmanager
    def commit(self, what: str, meanwhile: Callable[[], None] = nothing) -> Iterator[None]:
        """Statements that go to the server in one round trip, and a COMMIT after them."""
        crash.point(f"{what}-before-commit")
        with self.together(last=True, meanwhile=meanwhile):
            if self.hint_first:
                self.ask(f"SELECT {_SYNC_LATER}")
            yield
            self.committing = True
            self.ask(COMMIT)
        crash.point(f"{what}-after-commit")


class Database:
    """A database that answers, or an error that says why not."""

    def __init__(self, url: str, *, schema: str, pool_max: int, prepare: bool | None) -> None:
        if not _NAME.fullmatch(schema):
            raise ValueError(
                f"schema is {schema!r}; it must be a name of small letters, digits and underscores"
            )
        self.schema = schema
        self.conninfo, self.name = parse(url)
        self._prepare = prepare
        self._pid = os.getpid()
        self._pool_max = pool_max
        self._pool = Pool(self.conninfo, self._configure, pool_max)
        self.pooled = False  # whether something stands between us and the server
        self._look()

    def _look(self) -> None:
        """Connect once, so that what is wrong is said at once, and in full."""
        try:
            connection = self.connect()
            try:
                version = connection.info.server_version
                self._configure(connection)
            finally:
                connection.close()
        except psycopg.Error as error:
            raise self._refused(error) or self.translate(error) from error
        if version < VERSION_MIN:
            raise StoreRefused(
                f"{self.name} is PostgreSQL {version // 10000}.{version % 10000}; "
                f"fairturn needs version {VERSION_MIN // 10000} or newer"
            )

    def _refused(self, error: psycopg.Error) -> StoreRefused | None:
        """What is wrong with the address, if the server says so. The driver hands on no more than
        its words; where they are in another language, it is an error as any other."""
        why = _NO_WAY_IN.search(str(error))
        if why is None:
            return None
        remedy = "make it with: createdb" if why["what"] == "database" else "correct the address"
        return StoreRefused(f"{self.name} cannot be opened: {why['said']}; {remedy}")

    def connect(self, url: str | None = None) -> Line:
        """A connection of one's own."""
        conninfo = self.conninfo if url is None else parse(url)[0]
        return Line.connect(conninfo, **CONNECT)

    def _configure(self, connection: Line) -> None:
        """Prepare statements where they stay prepared. A pooler gives out a number of its own for
        the server's process, and each transaction may meet another one."""
        prepare = self._prepare
        if prepare is None:
            ((pid,),) = connection.execute("SELECT pg_backend_pid()").fetchall()
            self.pooled = pid != connection.info.backend_pid
            prepare = not self.pooled
        connection.prepares = prepare

    def session(self) -> "Lending":
        """A connection, given back afterwards without a transaction under way."""
        return Lending(self._pool, self)

    def transact(self, work: Callable[[Session], T]) -> T:
        """Run one transaction, which `work` begins and commits. What another transaction has ended
        or held up, or a connection that was lost before the COMMIT, is tried again."""
        begun, attempts = stopwatch(), 0
        while True:
            attempts += 1
            session: Session | None = None
            try:
                with self.session() as session:
                    return work(session)
            except FairturnError:
                raise
            except errors.LockNotAvailable as error:
                # Somebody else is about to commit, or to give up.
                if stopwatch() - begun > WAIT_S:
                    raise StoreUnavailable(
                        f"others have held what this call needs in {self.name} for {WAIT_S:g} s, "
                        "perhaps in a transaction that was not committed; try again"
                    ) from error
                time.sleep(_PAUSE_S)
            except psycopg.Error as error:
                if session is None or attempts == ATTEMPTS or not self._may_retry(error, session):
                    raise self.translate(error, session) from error

    def _may_retry(self, error: Exception, session: Session) -> bool:
        if isinstance(error, errors.SerializationFailure | errors.DeadlockDetected | Overtaken):
            return True
        if isinstance(error, errors.ReadOnlySqlTransaction):
            # It was the primary, and now another server is: new connections look for that.
            session.connection.close()
            self._pool.drop_idle()
            return True
        if session.committing or not isinstance(error, psycopg.OperationalError):
            return False
        if session.connection.broken or isinstance(error, _ENDED):
            session.connection.close()
            self._pool.drop_idle()  # the others may be lost too
            return True
        return False

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """One snapshot to read from."""
        try:
            with self.session() as session:
                try:
                    session.ask(BEGIN_SNAPSHOT)
                except psycopg.OperationalError:
                    # An idle connection may be lost; nothing was read from it.
                    session.connection.close()
                    self._pool.drop_idle()
                    with self.session() as another:
                        another.ask(BEGIN_SNAPSHOT)
                        yield another
                        another.ask(COMMIT)
                    return
                yield session
                session.ask(COMMIT)
        except psycopg.Error as error:
            raise self.translate(error) from error

    def close(self) -> None:
        if self._pid != os.getpid():
            return  # the connections are the parent's
        self._pool.close()

    def check_process(self) -> None:
        """Refuse to work in a process that was forked from the one that opened the database."""
        if self._pid != os.getpid():
            raise StoreError(
                "this process was forked from the one that opened the queue; "
                "open it anew here (connections do not survive a fork)"
            )

    def translate(self, error: Exception, session: Session | None = None) -> StoreError:
        """A driver's error as one of ours: it never leaves the store."""
        if isinstance(error, StoreError):
            return error
        if isinstance(error, PoolClosed):
            return StoreUnavailable(f"{self.name} was closed")
        if isinstance(error, PoolTimeout):
            return StoreUnavailable(
                f"all {self._pool_max} connections to {self.name} were in use for {WAIT_S:g} s; "
                "try again, or raise pool_max"
            )
        said = _said(error)
        if isinstance(error, errors.InsufficientPrivilege):
            return StoreRefused(
                f"the role at {self.name} may not do what a queue needs: {said}; grant it the "
                "rights that fairturn migrate --grant gives, or use another role"
            )
        if isinstance(error, errors.UndefinedTable | errors.InvalidSchemaName):
            return StoreRefused(
                f"{self.name} has no queue in its schema {self.schema}; make it with: "
                "fairturn migrate"
            )
        if isinstance(error, errors.ReadOnlySqlTransaction):
            return StoreUnavailable(
                f"{self.name} is read-only, as a standby is; name the primary, or wait until the "
                "failover is over"
            )
        if isinstance(error, errors.DiskFull):
            return StoreFull(f"the disk of {self.name} is full; nothing was stored by this call")
        if isinstance(error, psycopg.OperationalError):
            unsure = session is not None and session.committing
            after = (
                "perhaps after what it was to store was stored; try again with a key"
                if unsure
                else "try again later"
            )
            return StoreUnavailable(f"{self.name} cannot be reached, or gave up ({said}); {after}")
        return StoreError(f"{self.name}: {said}")


class Lending:
    """A connection for the time of a block. A generator would take three times as long."""

    __slots__ = ("_database", "_line", "_pool", "_session")

    def __init__(self, pool: Pool, database: Database) -> None:
        self._pool = pool
        self._database = database

    def __enter__(self) -> Session:
        self._database.check_process()
        self._line = self._pool.take(WAIT_S)
        self._session = Session(self._line, self._database.schema)
        return self._session

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                with suppress(psycopg.Error):
                    self._session.roll_back()
            else:
                self._session.catch_up()
        finally:
            self._pool.give_back(self._line)


class Overtaken(psycopg.DatabaseError):
    """What a transaction has read is no longer true; it is to begin anew."""


_ENDED = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.IdleInTransactionSessionTimeout,
)


def _said(error: Exception) -> str:
    """The first line of what the driver says."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return (primary or str(error).strip().partition("\n")[0] or type(error).__name__).strip()
