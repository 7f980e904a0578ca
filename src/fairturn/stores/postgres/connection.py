"""One PostgreSQL database: connections, transactions, and errors in our own words."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors

from fairturn.clock import stopwatch
from fairturn.errors import (
    FairturnError,
    NoQueue,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from fairturn.stores.postgres.adapters import ADAPTERS
from fairturn.stores.postgres.dsn import parse
from fairturn.stores.postgres.pool import Connection, PoolClosed, Pools, PoolTimeout, Use
from fairturn.stores.postgres.session import BEGIN_SNAPSHOT, COMMIT, Session

VERSION_MIN = 140000
POOL_MAX = 10
# How long a call waits for a connection, or for locks, before it gives up.
WAIT_S = 10.0
# The server ends a wait for a lock after this. All functions of the schema hold their locks only
# while they execute; a caller's own transaction may hold the row of a customer for longer.
LOCK_TIMEOUT = "5s"
SUBMIT_LOCK_TIMEOUT = "2s"
SETTINGS_LOCK_TIMEOUT = "100ms"
_PAUSE_S = 0.01  # before a call that was refused a lock is repeated
ATTEMPTS = 5  # at one transaction that another one, or a lost connection, has ended

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)
# What does not become better by waiting, in the words of the driver or the server.
_NO_WAY_IN = re.compile(
    r'(?P<said>(?P<what>database|role) "[^"]*" does not exist|password authentication failed'
    r'|role "[^"]*" is not permitted to log in|(?P<password>no password supplied)'
    r"|server does not support SSL|no pg_hba.conf entry|pg_hba.conf rejects connection"
    r'|invalid port number: "\d*"|invalid \w+ value: "[^"]*"|bad value for \w+'
    r'|definition of service "[^"]*" not found)'
)

_ISOLATION = """
    SELECT current_setting('transaction_isolation'), format(
        'ALTER ROLE %I IN DATABASE %I SET default_transaction_isolation = %L',
        session_user, current_database(), 'read committed')"""
_ISOLATIONS = ("read committed", "read uncommitted")  # PostgreSQL treats both alike

# The driver logs what a lost connection has interrupted; the calls report it.
_SILENT = logging.NullHandler()

T = TypeVar("T")


class Database:
    """A database that answers, or an error that says why not."""

    def __init__(self, url: str, *, schema: str, pool_max: int, prepare: bool | None) -> None:
        if not _NAME.fullmatch(schema):
            raise ValueError(
                f"schema is {schema!r}; it must be a name of small letters, digits and underscores"
            )
        logging.getLogger("psycopg").addHandler(_SILENT)
        self.schema = schema
        self.conninfo, self.name = parse(url)
        self.role = "of the address"  # until a connection was made
        self._prepare = prepare
        self._pid = os.getpid()
        self._pool_max = pool_max
        self._pool = Pools(self._connect_configured, pool_max)
        self.pooled = False  # whether something stands between us and the server
        self._look()

    def _look(self) -> None:
        """Connect once, so that what is wrong is said at once, and in full."""
        try:
            connection = self.connect()
            try:
                version, self.role = connection.info.server_version, connection.info.user
                self._configure(connection)
                ((isolation, remedy),) = connection.execute(_ISOLATION, prepare=False).fetchall()
            finally:
                connection.close()
        except psycopg.Error as error:
            raise self._refused(error) or self.translate(error) from error
        if version < VERSION_MIN:
            raise StoreRefused(
                f"{self.name} is PostgreSQL {version // 10000}.{version % 10000}; "
                f"fairturn needs version {VERSION_MIN // 10000} or newer"
            )
        if isolation not in _ISOLATIONS:
            # A call is one statement in its own transaction. Only the session could choose another
            # isolation level for it, and behind a pooler each call may have another session.
            raise StoreRefused(
                f"default_transaction_isolation is {isolation!r} for the role {self.role} in "
                f"{self.name}; a queue needs 'read committed'. Change it, and connect again: "
                f"{remedy}"
            )

    def _refused(self, error: psycopg.Error) -> StoreRefused | None:
        """What is wrong with the address, if the server says so. The driver hands on no more than
        its words; where they are in another language, it is an error as any other."""
        why = _NO_WAY_IN.search(str(error))
        if why is None:
            return None
        remedy = "correct the address"
        if why["what"] == "database":
            remedy = "make it with createdb, or correct the address"
        elif why["password"]:
            remedy = "name it in ~/.pgpass, in PGPASSWORD or in the address"
        elif "pg_hba" in why["said"]:
            remedy = "let it in, in the server's pg_hba.conf, or correct the address"
        refused = NoQueue if why["what"] == "database" else StoreRefused
        return refused(f"{self.name} cannot be opened: {why['said']}; {remedy}")

    def connect(self, url: str | None = None) -> Connection:
        """A connection of the caller's own."""
        conninfo = self.conninfo if url is None else parse(url)[0]
        return psycopg.Connection.connect(conninfo, autocommit=True, context=ADAPTERS)

    def _connect_configured(self) -> Connection:
        connection = self.connect()
        try:
            self._configure(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _configure(self, connection: Connection) -> None:
        """Prepare statements where they stay prepared. A pooler reports a process number of its
        own, and each transaction may meet another server process."""
        prepare = self._prepare
        if prepare is None:
            ((pid,),) = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchall()
            self.pooled = pid != connection.info.backend_pid
            prepare = not self.pooled
        connection.prepare_threshold = 0 if prepare else None

    @contextmanager
    def session(self, use: Use = Use.OTHER) -> Iterator[Session]:
        """A connection, given back afterwards without an open transaction."""
        self.check_process()
        connection = self._pool.take(use, WAIT_S)
        try:
            yield Session(connection, self.schema)
        except BaseException:
            with suppress(psycopg.Error):
                connection.rollback()
            raise
        finally:
            self._pool.give_back(use, connection)

    def transact(
        self, work: Callable[[Session], T], use: Use = Use.OTHER, *, wait_s: float = WAIT_S
    ) -> T:
        """Run one transaction, which `work` begins and commits. It is repeated if another
        transaction has ended it or held its locks, for `wait_s` at most, or if the connection was
        lost and a repeat is harmless."""
        begun, attempts = stopwatch(), 0
        while True:
            attempts += 1
            session: Session | None = None
            try:
                with self.session(use) as session:
                    return work(session)
            except FairturnError:
                raise
            except errors.LockNotAvailable as error:
                if stopwatch() - begun > wait_s:
                    raise StoreUnavailable(
                        f"other transactions have held locks that this call needs in {self.name} "
                        f"for {wait_s:g} s, perhaps one that was not committed; try again"
                    ) from error
                time.sleep(_PAUSE_S)
            except psycopg.Error as error:
                if session is None or attempts == ATTEMPTS or not self._may_retry(error, session):
                    raise self.translate(error, session) from error

    def _may_retry(self, error: Exception, session: Session) -> bool:
        if isinstance(error, errors.SerializationFailure | errors.DeadlockDetected):
            return True
        if isinstance(error, errors.ReadOnlySqlTransaction):
            # It was the primary, and now another server is: new connections look for that.
            session.connection.close()
            self._pool.drop_idle()
            return True
        if session.unsure or not isinstance(error, psycopg.OperationalError):
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
                f"all connections to {self.name} were in use for {WAIT_S:g} s; try again, or "
                f"raise pool_max ({self._pool_max})"
            )
        words = said(error)
        if isinstance(error, errors.InsufficientPrivilege):
            return StoreRefused(
                f"the role {self.role} may not do what a queue needs in {self.name}: {words}; "
                f"{_give_the_right(self.role)}"
            )
        if isinstance(error, errors.UndefinedTable | errors.InvalidSchemaName):
            return NoQueue(
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
            unsure = session is not None and session.unsure
            after = (
                "perhaps after what it was to store was stored; try again with a key"
                if unsure
                else "try again later"
            )
            return StoreUnavailable(f"{self.name} cannot be reached, or gave up ({words}); {after}")
        return StoreError(f"{self.name}: {words}")

    def translate_of_caller(
        self, error: psycopg.Error, connection: psycopg.Connection[Any]
    ) -> StoreError:
        """The same for a connection of the caller's: what is wrong is wrong with that, and what is
        to be repeated is the caller's transaction."""
        words = said(error)
        if connection.closed:
            return StoreUnavailable(
                f"the connection that was handed in is closed ({words}); repeat the transaction on "
                "another one"
            )
        role = connection.info.user
        if isinstance(error, errors.InsufficientPrivilege):
            return StoreRefused(
                f"the role {role} of the connection may not do what a queue needs: {words}; "
                f"{_give_the_right(role)}"
            )
        if isinstance(error, errors.UndefinedTable | errors.InvalidSchemaName):
            return StoreRefused(
                f"the connection leads to the database {connection.info.dbname}, which has no "
                f"queue in its schema {self.schema}; hand in one to {self.name}"
            )
        if isinstance(error, errors.ReadOnlySqlTransaction):
            return StoreRefused("the transaction of the connection is read-only; begin another one")
        if isinstance(error, errors.SerializationFailure | errors.DeadlockDetected):
            return StoreUnavailable(
                f"the transaction of the connection cannot go on ({words}); roll it back, and "
                "repeat all of it"
            )
        return self.translate(error)


_ENDED = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.IdleInTransactionSessionTimeout,
)


def _give_the_right(role: str) -> str:
    return f"the database's owner gives it the right with: fairturn migrate --grant {role}"


def said(error: Exception) -> str:
    """The first line of what the driver says."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return (primary or str(error).strip().partition("\n")[0] or type(error).__name__).strip()
