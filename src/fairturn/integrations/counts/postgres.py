"""Counts in PostgreSQL: one row per customer, locked while the rule is applied.

A check is one transaction of two round trips without session state, so that it works through a
transaction pooler. It does not wait for the WAL flush: a crash of the server may lose the last
counts, and then customers get slightly better priorities.
"""

import os
from collections import deque
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
from psycopg import errors

from fairturn.clock import SERVER_NOW, Clock
from fairturn.errors import StoreError, StoreRefused, StoreUnavailable
from fairturn.integrations.counts import TIMEOUT_S, Answer, within
from fairturn.priority import Count, Rule

IDLE_CONNECTIONS_MAX = 64
FORGOTTEN_AT_ONCE = 10
STARTING_S = 2.0  # timeout of creating the table, at the start of a process
# The kernel closes a connection to a dead server after this time; otherwise a thread would wait on.
_TCP_USER_TIMEOUT_MS = 2_000

SCHEMA = """
    CREATE TABLE IF NOT EXISTS fairturn_counts (
        customer text PRIMARY KEY,
        value bigint,
        updated_at bigint
    ) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.01);
    CREATE INDEX IF NOT EXISTS fairturn_counts_by_age ON fairturn_counts (updated_at)
"""
_NO_WAL_FLUSH = "SET LOCAL synchronous_commit TO off"
# One statement: between an INSERT and a SELECT FOR UPDATE another publisher could delete the row.
_LOCK = """
    INSERT INTO fairturn_counts (customer) VALUES (%s)
    ON CONFLICT (customer) DO UPDATE SET customer = EXCLUDED.customer
    RETURNING value, updated_at
"""
_TIMESTAMP = f"SELECT {SERVER_NOW}"
_WRITE = "UPDATE fairturn_counts SET value = %s, updated_at = %s WHERE customer = %s"
_EVICT = """
    DELETE FROM fairturn_counts WHERE customer IN (
        SELECT customer FROM fairturn_counts WHERE updated_at < %s LIMIT %s FOR UPDATE SKIP LOCKED
    )
"""  # fairturn_counts_by_age


class _Stale(psycopg.OperationalError):
    """The connection was lost before anything was committed."""


class PostgresCounts:
    """Counts at a URL such as `postgresql://user@host/database`, in a table that is created if it
    is missing. The server's clock is used unless one is given."""

    def __init__(
        self,
        url: str,
        *,
        rule: Rule | None = None,
        clock: Clock | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._rule = rule or Rule()
        self._clock = clock
        try:
            facts = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error:
            raise StoreRefused("the URL of the counts is not a PostgreSQL URL") from None
        self._name = f"PostgreSQL at {facts.get('host') or 'the local socket'}"
        self._idle: deque[psycopg.Connection[Any]] = deque(maxlen=IDLE_CONNECTIONS_MAX)
        self._pid = os.getpid()

    def begin(self, customer: str) -> Answer:
        # psycopg has no timeout for a response.
        count = within(self._timeout_s, self._name, partial(self._check, customer))
        return lambda: count

    def concerns(self) -> list[str]:
        within(max(STARTING_S, self._timeout_s), self._name, self._make_table)
        return []

    def close(self) -> None:
        with suppress(IndexError):  # several threads may close at once
            while True:
                self._idle.pop().close()

    def _check(self, customer: str) -> int:
        connection, fresh = self._connection()
        try:
            try:
                count = self._decide(connection, customer)
            except errors.UndefinedTable:
                self._make_table()
                count = self._decide(connection, customer)
        except psycopg.Error as error:
            connection.close()
            if isinstance(error, _Stale) and not fresh:
                self.close()  # the other connections were lost as well
                return self._check(customer)
            raise self._translate(error) from error
        self._idle.append(connection)
        return count

    def _decide(self, connection: psycopg.Connection[Any], customer: str) -> int:
        """Run one check. Raises `_Stale` if the connection was lost before the check can have been
        committed: only then it may be retried."""
        written = False
        try:
            with connection.transaction():
                with connection.pipeline():
                    connection.execute(_NO_WAL_FLUSH)
                    row = connection.execute(_LOCK, (customer,))
                    # After the lock: an earlier time may precede another publisher's update.
                    timestamp = connection.execute(_TIMESTAMP)
                ((value, updated_at),), ((now,),) = row.fetchall(), timestamp.fetchall()
                if self._clock is not None:
                    now = self._clock.now()
                last = None if value is None else Count(value, updated_at)
                count = self._rule.check(last, now)
                written = True
                connection.execute(_WRITE, (*count, customer))
                if count.value == 0:
                    old = now - self._rule.reset_interval_us
                    connection.execute(_EVICT, (old, FORGOTTEN_AT_ONCE))
        except psycopg.OperationalError as error:
            if connection.broken and not written:
                raise _Stale(*error.args) from error
            raise
        return count.value

    def _connection(self) -> tuple[psycopg.Connection[Any], bool]:
        """Return an idle connection or a new one, and whether it is new."""
        if self._pid != os.getpid():
            # After a fork the connections belong to the parent process.
            self._idle = deque(maxlen=IDLE_CONNECTIONS_MAX)
            self._pid = os.getpid()
        with suppress(IndexError):
            return self._idle.pop(), False
        return self._connect(), True

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            return psycopg.connect(
                self._url,
                autocommit=True,
                prepare_threshold=None,  # a pooler may use another session for each transaction
                connect_timeout=2,
                tcp_user_timeout=_TCP_USER_TIMEOUT_MS,
                application_name="fairturn counts",
            )
        except psycopg.Error as error:
            raise self._translate(error) from error

    def _make_table(self) -> None:
        connection = self._connect()
        try:
            # IF NOT EXISTS is not atomic: the loser of a race gets one of these errors.
            with suppress(errors.UniqueViolation, errors.DuplicateTable):
                connection.execute(SCHEMA)
        except errors.InsufficientPrivilege:
            raise StoreRefused(
                f"{self._name} has no table fairturn_counts and this role cannot create it; run as "
                f"the owner: {' '.join(SCHEMA.split())}"
            ) from None
        except psycopg.Error as error:
            raise self._translate(error) from error
        finally:
            connection.close()

    def _translate(self, error: psycopg.Error) -> StoreError:
        # The other lines may contain the statement with the customer's name.
        first_line = str(error).strip().partition("\n")[0]
        if isinstance(error, errors.InvalidPassword | errors.InvalidAuthorizationSpecification):
            return StoreRefused(f"{self._name} denies access: {first_line}")
        return StoreUnavailable(f"{self._name} is unavailable: {first_line}")
