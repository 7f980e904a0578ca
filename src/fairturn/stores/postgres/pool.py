"""The connection pools of one process.

Claims, outcomes and renewals have a pool of their own, so that submissions that wait for a
customer's row, and slow queries, cannot exhaust the connections of workers.

The call that needs a connection opens it, so that it gets the server's own error. The most recently
used connection is reused first, because its server process has plans and pages cached.
"""

import select
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

import psycopg
from psycopg import pq

from fairturn.clock import stopwatch

RESERVED = 3  # for claims, outcomes and renewals
_IDLE_S = 300.0  # idle connections are closed after this time
_AGE_S = 1_800.0  # older connections are replaced, so that new servers get their share

Connection = psycopg.Connection[Any]


class PoolClosed(psycopg.OperationalError):
    """The store was closed."""


class PoolTimeout(psycopg.OperationalError):
    """All connections were in use for too long."""


class Use(Enum):
    """The pool that a call uses."""

    WORK = "work"  # claims, outcomes, renewals
    OTHER = "other"


class Pool:
    """At most `size_max` connections for one use."""

    def __init__(self, connect: Callable[[], Connection], size_max: int) -> None:
        self._connect = connect
        self._free = threading.Semaphore(size_max)
        self._idle: list[tuple[Connection, float]] = []  # with the time of its return
        self._opened_at: dict[Connection, float] = {}
        self._lock = threading.Lock()
        self._closed = False

    def take(self, timeout_s: float) -> Connection:
        """Return an idle connection that the server has not closed, or a new one."""
        if not self._free.acquire(timeout=timeout_s):
            raise PoolTimeout(f"no connection was free for {timeout_s:g} s")
        try:
            while (connection := self._pop()) is not None:
                if not _is_readable(connection):
                    return connection
                self._drop(connection)  # an idle connection is readable when the server closed it
            connection = self._connect()
            with self._lock:
                self._opened_at[connection] = stopwatch()
            return connection
        except BaseException:
            self._free.release()
            raise

    def give_back(self, connection: Connection) -> None:
        """Return a connection to the pool; close it if it is old or not idle."""
        now = stopwatch()
        is_idle = connection.info.transaction_status == pq.TransactionStatus.IDLE
        with self._lock:
            is_young = now - self._opened_at.get(connection, 0.0) < _AGE_S
            keep = is_idle and is_young and not self._closed
            if keep:
                self._idle.append((connection, now))
            unused = [each for each, since in self._idle if since < now - _IDLE_S]
            del self._idle[: len(unused)]  # the oldest come first
        for each in unused if keep else [*unused, connection]:
            self._drop(each)
        self._free.release()

    def drop_idle(self) -> None:
        """Close all idle connections: later calls open new ones."""
        while (connection := self._pop()) is not None:
            self._drop(connection)

    def close(self) -> None:
        """Close idle connections now, and the others when they are returned."""
        self._closed = True
        self.drop_idle()

    def _pop(self) -> Connection | None:
        with self._lock:
            return self._idle.pop()[0] if self._idle else None

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            self._opened_at.pop(connection, None)
        connection.close()


class Pools:
    """The two pools of one process."""

    def __init__(self, connect: Callable[[], Connection], size_max: int) -> None:
        reserved = min(RESERVED, max(1, size_max // 2))
        self._by_use = {
            Use.WORK: Pool(connect, reserved),
            Use.OTHER: Pool(connect, max(1, size_max - reserved)),
        }
        self._closed = False

    def take(self, use: Use, timeout_s: float) -> Connection:
        if self._closed:
            raise PoolClosed("the connections were closed")
        return self._by_use[use].take(timeout_s)

    def give_back(self, use: Use, connection: Connection) -> None:
        self._by_use[use].give_back(connection)

    def drop_idle(self) -> None:
        for pool in self._by_use.values():
            pool.drop_idle()

    def close(self) -> None:
        self._closed = True
        for pool in self._by_use.values():
            pool.close()


def _is_readable(connection: Connection) -> bool:
    """Return whether the server has sent data or closed the connection."""
    if connection.closed:
        return True
    readable = select.poll()
    readable.register(connection.fileno(), select.POLLIN)
    return bool(readable.poll(0))
