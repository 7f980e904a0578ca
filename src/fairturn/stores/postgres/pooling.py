"""The connections of one process, each for one call at a time.

The oldest goes first: its process on the server has the statements, their plans and their pages at
hand, and two that take turns are both cold. The youngest are closed when nobody has needed them for
long. Whoever needs a connection and finds none makes it, so that what is wrong with the server is
said to whom it matters.
"""

import threading
from collections.abc import Callable
from heapq import heappop, heappush

import psycopg
from psycopg import pq

from fairturn.clock import stopwatch
from fairturn.stores.postgres.piping import Line

IDLE_S = 300.0  # a connection that nobody has needed for so long is closed


class PoolClosed(psycopg.OperationalError):
    """Nobody gets a connection any more."""


class PoolTimeout(psycopg.OperationalError):
    """All connections were in use for too long."""


class Pool:
    """At most so many connections, made when they are needed."""

    def __init__(self, connect: Callable[[], Line], size_max: int) -> None:
        self._connect = connect
        self._size_max = size_max
        # Taken by itself, because a condition's own `with` keeps it if a signal interrupts that.
        self._lock = threading.Lock()
        self._given_back = threading.Condition(self._lock)
        self._idle: list[Line] = []  # a heap, by age
        self._size = 0  # idle, in use, or being made
        self._closed = False

    def take(self, timeout_s: float) -> Line:
        """A connection that is alive as far as one can see from here."""
        while True:
            line = self._take_idle(timeout_s)
            if line is None:
                return self._make()
            if _is_quiet(line):
                return line
            # The server has said something to nobody: as a rule, that it has ended the connection.
            line.close()
            self.give_back(line)

    def _take_idle(self, timeout_s: float) -> Line | None:
        """One that is idle; or None, and there is room for a new one, which is counted already."""
        with self._lock:
            if not self._idle and self._size >= self._size_max:
                self._given_back.wait_for(
                    lambda: self._closed or self._idle or self._size < self._size_max, timeout_s
                )
            if self._closed:
                raise PoolClosed("the connections were closed")
            if self._idle:
                return heappop(self._idle)
            if self._size >= self._size_max:
                raise PoolTimeout(f"no connection was free for {timeout_s} s")
            self._size += 1
            return None

    def _make(self) -> Line:
        try:
            return self._connect()
        except BaseException:
            with self._lock:
                self._size -= 1
                self._given_back.notify()
            raise

    def give_back(self, line: Line) -> None:
        """Whoever took a connection gives it back, whatever became of it."""
        now = stopwatch()
        too_many = []
        with self._lock:
            if self._closed or line.pgconn.transaction_status != pq.TransactionStatus.IDLE:
                self._size -= 1
                too_many.append(line)
            else:
                line.idle_since = now
                heappush(self._idle, line)
            # The last one of a heap can go without a new order.
            if self._idle and now - self._idle[-1].idle_since > IDLE_S:
                self._size -= 1
                too_many.append(self._idle.pop())
            self._given_back.notify()
        for each in too_many:
            each.close()

    def drop_idle(self) -> None:
        """Let all calls that follow meet new connections."""
        with self._lock:
            dropped, self._idle = self._idle, []
            self._size -= len(dropped)
            self._given_back.notify_all()
        for line in dropped:
            line.close()

    def close(self) -> None:
        """Close what is idle now, and the others when they are given back."""
        with self._lock:
            self._closed = True
        self.drop_idle()


def _is_quiet(line: Line) -> bool:
    """Whether an idle connection has nothing to be read."""
    return not line.closed and not line.input.poll(0)
