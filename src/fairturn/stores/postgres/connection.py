"""One PostgreSQL database: connections, transactions, retries and the mapping of errors."""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from fairturn.clock import stopwatch
from fairturn.errors import (
    FairturnError,
    NoQueue,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from fairturn.stores.postgres.pool import Connection, PoolClosed, Pools, PoolTimeout, Use
from fairturn.stores.postgres.session import ADAPTERS, BEGIN_SNAPSHOT, COMMIT, Session

VERSION_MIN = 140000
POOL_MAX = 10
WAIT_S = 10.0  # for a connection, or for locks, before a call fails
# The server's lock_timeout. Functions of the schema hold their locks only while they execute; a
# caller's own transaction may hold the row of a customer for longer.
LOCK_TIMEOUT = "5s"
SUBMIT_LOCK_TIMEOUT = "2s"
SETTINGS_LOCK_TIMEOUT = "100ms"
_PAUSE_S = 0.01  # before a call is retried after a lock timeout
ATTEMPTS = 5  # at one transaction that another one, or a lost connection, has aborted

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}", re.ASCII)
# Messages of the driver or the server for errors that a retry does not fix.
_PERMANENT = re.compile(
    r'(?P<message>(?P<what>database|role) "[^"]*" does not exist|password authentication failed'
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


class PostgresDatabase:
    """The connections, transactions and errors of one database.

    The constructor connects once and raises `StoreRefused` or `StoreUnavailable` if the database
    cannot be used.
    """

    def __init__(self, url: str, *, schema: str, pool_max: int, prepare: bool | None) -> None:
        if not _NAME.fullmatch(schema):
            raise ValueError(
                f"schema is {schema!r}; it must contain only lowercase letters, digits and "
                "underscores, not begin with a digit, and have 1 to 63 characters"
            )
        logging.getLogger("psycopg").addHandler(_SILENT)
        self.schema = schema
        self.conninfo, self.name = parse(url)
        self.role = "of the URL"  # until the first connection
        self._prepare = prepare
        self._pid = os.getpid()
        self._pool_max = pool_max
        self._pool = Pools(self._connect_configured, pool_max)
        self.pooled = False  # whether connections go through a pooler
        self._check()

    def _check(self) -> None:
        """Connect once, so that configuration errors are raised at once and in full."""
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
            # A call is one statement in its own transaction. Another isolation level would have to
            # be set per session, and behind a pooler each call may get another session.
            raise StoreRefused(
                f"default_transaction_isolation is {isolation!r} for the role {self.role} in "
                f"{self.name}; a queue needs 'read committed'. Change it, and connect again: "
                f"{remedy}"
            )

    def _refused(self, error: psycopg.Error) -> StoreRefused | None:
        """Return an error for a connection that no retry can open, else None. The driver gives a
        text and no SQLSTATE here; a translated text is not recognised."""
        why = _PERMANENT.search(str(error))
        if why is None:
            return None
        remedy = "correct the URL"
        if why["what"] == "database":
            remedy = "create it with createdb, or correct the URL"
        elif why["password"]:
            remedy = "set it in ~/.pgpass, in PGPASSWORD or in the URL"
        elif "pg_hba" in why["message"]:
            remedy = "allow the connection in the server's pg_hba.conf, or correct the URL"
        refused = NoQueue if why["what"] == "database" else StoreRefused
        return refused(f"{self.name} cannot be opened: {why['message']}; {remedy}")

    def connect(self, url: str | None = None) -> Connection:
        """Open a connection outside the pool, which the caller closes."""
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
        """Prepare statements unless a pooler is detected, where each transaction may run in another
        server process. A pooler reports a process id of its own."""
        prepare = self._prepare
        if prepare is None:
            ((pid,),) = connection.execute("SELECT pg_backend_pid()", prepare=False).fetchall()
            self.pooled = pid != connection.info.backend_pid
            prepare = not self.pooled
        connection.prepare_threshold = 0 if prepare else None

    @contextmanager
    def session(self, use: Use = Use.OTHER) -> Iterator[Session]:
        """Take a connection from the pool for a block; an error rolls back its transaction."""
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
        self, work: Callable[[Session], T], use: Use = Use.OTHER, *, wait_s: float | None = None
    ) -> T:
        """Run one transaction, which `work` begins and commits.

        It is retried after a deadlock or a serialization failure; after a lock timeout, for
        `wait_s` (WAIT_S) at most; and after a lost connection, if a repetition is harmless.
        """
        wait_s = WAIT_S if wait_s is None else wait_s
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
                        f"for {wait_s:g} s (an uncommitted submission?); try again"
                    ) from error
                time.sleep(_PAUSE_S)
            except psycopg.Error as error:
                if session is None or attempts == ATTEMPTS or not self._may_retry(error, session):
                    raise self.translate(error, session) from error

    def _may_retry(self, error: Exception, session: Session) -> bool:
        if isinstance(error, errors.SerializationFailure | errors.DeadlockDetected):
            return True
        if isinstance(error, errors.ReadOnlySqlTransaction):
            # A failover: new connections find the new primary by target_session_attrs.
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
        """Run the statements of a block in one read-only snapshot."""
        try:
            with self.session() as session:
                try:
                    session.ask(BEGIN_SNAPSHOT)
                except psycopg.OperationalError:
                    # An idle connection was lost; nothing has been read from it.
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
        """Raise `StoreError` in a process that was forked from the one that opened the database."""
        if self._pid != os.getpid():
            raise StoreError(
                "this process was forked from the one that opened the queue; "
                "open it again here (connections do not survive a fork)"
            )

    def translate(self, error: Exception, session: Session | None = None) -> StoreError:
        """Return a driver's error as one of `fairturn.errors`."""
        if isinstance(error, StoreError):
            return error
        if isinstance(error, PoolClosed):
            return StoreUnavailable(f"{self.name} was closed")
        if isinstance(error, PoolTimeout):
            return StoreUnavailable(
                f"all connections to {self.name} were in use for {WAIT_S:g} s; try again, or "
                f"raise pool_max ({self._pool_max})"
            )
        message = message_of(error)
        if isinstance(error, errors.InsufficientPrivilege):
            return StoreRefused(
                f"the role {self.role} lacks a privilege that a queue needs in {self.name}: "
                f"{message}; {_how_to_grant(self.role)}"
            )
        if isinstance(error, errors.UndefinedTable | errors.InvalidSchemaName):
            return NoQueue(
                f"{self.name} has no queue in its schema {self.schema}; create it with: "
                "fairturn migrate"
            )
        if isinstance(error, errors.ReadOnlySqlTransaction):
            return StoreUnavailable(
                f"{self.name} is read-only (a standby?); connect to the primary, or wait until the "
                "failover has ended"
            )
        if isinstance(error, errors.DiskFull):
            return StoreFull(f"the disk of {self.name} is full; nothing was stored by this call")
        if isinstance(error, psycopg.OperationalError):
            unsure = session is not None and session.unsure
            after = (
                "the call may have been committed; repeat it with an idempotency key"
                if unsure
                else "try again later"
            )
            return StoreUnavailable(
                f"{self.name} cannot be reached, or failed ({message}); {after}"
            )
        return StoreError(f"{self.name}: {message}")

    def translate_of_caller(
        self, error: psycopg.Error, connection: psycopg.Connection[Any]
    ) -> StoreError:
        """Return the error for a connection that the caller passed in: its messages name that
        connection, and ask the caller to repeat the transaction."""
        message = message_of(error)
        if connection.closed:
            return StoreUnavailable(
                f"the connection passed in is closed ({message}); repeat the transaction on "
                "another one"
            )
        role = connection.info.user
        if isinstance(error, errors.InsufficientPrivilege):
            return StoreRefused(
                f"the role {role} of the connection lacks a privilege that a queue needs: "
                f"{message}; {_how_to_grant(role)}"
            )
        if isinstance(error, errors.UndefinedTable | errors.InvalidSchemaName):
            return StoreRefused(
                f"the connection is to the database {connection.info.dbname}, which has no queue "
                f"in its schema {self.schema}; pass in one to {self.name}"
            )
        if isinstance(error, errors.ReadOnlySqlTransaction):
            return StoreRefused("the transaction of the connection is read-only; begin another one")
        if isinstance(error, errors.SerializationFailure | errors.DeadlockDetected):
            return StoreUnavailable(
                f"the transaction of the connection was aborted ({message}); roll it back, and "
                "repeat all of it"
            )
        return self.translate(error)


_ENDED = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.IdleInTransactionSessionTimeout,
)


def _how_to_grant(role: str) -> str:
    return f"as the owner of the schema, run: fairturn migrate --grant {role}"


def message_of(error: Exception) -> str:
    """Return the first line of a driver's error message."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return (primary or str(error).strip().partition("\n")[0] or type(error).__name__).strip()


CONNECT_S = 10
# Defaults that the URL overrides: detect a lost server, and do not use a standby as the primary.
_DEFAULTS = {
    "keepalives": "1",
    "keepalives_idle": "20",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
    "target_session_attrs": "read-write",
    "application_name": "fairturn",
    "connect_timeout": str(CONNECT_S),
}
_INVALID_URL = (
    "the database is not a valid PostgreSQL URL{why}; write "
    "postgresql://role:password@host:port/database, with special characters percent-encoded"
)
_UNKNOWN = re.compile(r'invalid URI query parameter: "(\w+)"', re.ASCII)


def parse(url: str) -> tuple[str, str]:
    """Return a URL as the driver's conninfo, and a name for messages without the password."""
    url = url.strip()
    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error as error:
        # The rest of the driver's message may contain a part of the password, as may a parameter
        # before an @.
        unknown = None if "@" in url.partition("?")[2] else _UNKNOWN.search(str(error))
        why = f": {unknown[1]} is not a connection parameter" if unknown else ""
        raise StoreRefused(_INVALID_URL.format(why=why)) from None
    if not re.fullmatch(r"[\d,]*", str(parts.get("port") or "")):
        raise StoreRefused(_INVALID_URL.format(why=": its port is not a number"))
    if "@" in str(parts.get("host")):
        raise StoreRefused(_INVALID_URL.format(why=": an @ in a password is written %40"))
    host = parts.get("host") or parts.get("hostaddr") or "localhost"
    port = f":{parts['port']}" if parts.get("port") else ""
    name = f"the database {parts.get('dbname') or parts.get('user') or ''!s} at {host}{port}"
    defaults = {name: value for name, value in _DEFAULTS.items() if parts.get(name) is None}
    return make_conninfo(url, **defaults), name
