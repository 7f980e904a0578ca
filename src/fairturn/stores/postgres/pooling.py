"""The connections of one process: those of the driver's pool, and in front of it the few that were
used last.

The pool hands out its connections by turns. Two of them that are used by turns for the same are two
processes on the server that both have their plans and pages to find; the one at hand that was used
for it before is warm, and takes no lock to get.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Any

from psycopg import pq
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from fairturn.clock import stopwatch
from fairturn.stores.postgres.adapting import ADAPTERS
from fairturn.stores.postgres.addressing import CONNECT_S
from fairturn.stores.postgres.piping import Line

__all__ = ["Pool", "PoolClosed", "PoolTimeout", "Use"]

CONNECT: dict[str, Any] = {"autocommit": True, "context": ADAPTERS, "prepare_threshold": None}
_IDLE_S = 300.0  # a connection that nobody has needed for so long is closed
_AT_HAND_MAX = 3  # as a worker needs: to claim, to record, and to tell others
_AT_HAND_S = 1_800.0  # an older one goes back to the pool, which replaces it in time
_LOOK_S = 2.0  # how long a call waits before it looks itself whether the server answers
_NOWHERE = logging.NullHandler()


class Use(Enum):
    """What a connection is for, where now one thread does it and now another one."""

    CLAIMS = 1
    OUTCOMES = 2


class Pool:
    """At most so many connections, made when they are needed."""

    def __init__(self, conninfo: str, configure: Callable[[Line], None], size_max: int) -> None:
        self._conninfo = conninfo
        self._configure = configure
        self._size_max = size_max
        self._lock = threading.Lock()
        self._opened: ConnectionPool[Line] | None = None
        self._at_hand: list[Line] = []  # or one more for a moment; the last one used last
        self._waiting: list[None] = []  # one for each call that waits for the pool
        self._closed = False

    def take(self, timeout_s: float, use: Use | None = None) -> Line:
        """A connection that is alive as far as one can see from here: for some use, or for whatever
        this thread does."""
        user = use or threading.get_ident()
        while True:
            line = self._take_at_hand(user) or self._take(timeout_s, user)
            if not line.closed and not line.input.poll(0):
                return line
            # The server has said something to nobody: as a rule, that it has ended the connection.
            line.close()
            self._put(line)

    def _take_at_hand(self, user: object) -> Line | None:
        """The one that this user has had before, or the last one of a thread, or any."""
        at_hand = self._at_hand[::-1]
        for line in at_hand:
            if line.used_by == user and self._take_off(line):
                return line
        for line in sorted(at_hand, key=_has_a_use):
            if self._take_off(line):
                line.used_by = user
                return line
        return None

    def _take_off(self, line: Line) -> bool:
        """Whether nobody else was faster."""
        try:
            self._at_hand.remove(line)
        except ValueError:
            return False
        return True

    def _take(self, timeout_s: float, user: object) -> Line:
        """One of the pool's. One that has failed to connect waits longer and longer before it tries
        again; so we look ourselves whether the server is back."""
        until = stopwatch() + timeout_s
        while True:
            pool = self._open()
            try:
                line = self._take_from(pool, user, min(_LOOK_S, timeout_s))
            except PoolTimeout:
                Line.connect(self._conninfo).close()
                if pool.get_stats()["pool_size"] < self._size_max:
                    self._replace(pool)
                elif stopwatch() > until:
                    raise
            else:
                return line

    def _take_from(self, pool: ConnectionPool[Line], user: object, timeout_s: float) -> Line:
        # Who gives one back looks whether somebody waits after it is at hand, and who waits looks
        # whether one is at hand after that can be seen: one of both sees the other.
        self._waiting.append(None)
        try:
            line = self._take_at_hand(user)
            if line is None:
                line = pool.getconn(timeout_s)
                line.pool = pool
                line.used_by = user
            return line
        finally:
            self._waiting.pop()

    def _open(self) -> ConnectionPool[Line]:
        with self._lock:
            if self._closed:
                raise PoolClosed("the connections were closed")
            if self._opened is None:
                # What it says about lost connections we say ourselves, when somebody needs one.
                logging.getLogger("psycopg.pool").addHandler(_NOWHERE)
                self._opened = ConnectionPool(
                    self._conninfo,
                    connection_class=Line,
                    kwargs=CONNECT,
                    min_size=0,
                    max_size=self._size_max,
                    max_idle=_IDLE_S,
                    configure=self._configure,
                    reconnect_timeout=CONNECT_S,
                    num_workers=1,
                    open=True,
                )
            return self._opened

    def _replace(self, pool: ConnectionPool[Line]) -> None:
        with self._lock:
            if self._opened is pool:
                self._opened = None
        pool.close(timeout=0)

    def give_back(self, line: Line) -> None:
        """Whoever took a connection gives it back, whatever became of it."""
        now = stopwatch()
        if (
            len(self._at_hand) >= _AT_HAND_MAX
            or self._closed
            or line.pool is not self._opened
            or line.pgconn.transaction_status != pq.TransactionStatus.IDLE
            or now - line.made_at > _AT_HAND_S
        ):
            self._put(line)
            return
        line.given_back_s = now
        self._at_hand.append(line)
        self._put_unused(now - _IDLE_S)
        if line.pool is not self._opened:  # all was closed meanwhile
            self._drop_at_hand()
        if self._waiting and (at_hand := self._take_at_hand(None)) is not None:
            self._put(at_hand)

    def _put_unused(self, before_s: float) -> None:
        """Let the pool close what was given back before that, and nobody has needed since."""
        for line in [line for line in self._at_hand if line.given_back_s < before_s]:
            with suppress(ValueError):  # if somebody else was faster
                self._at_hand.remove(line)
                self._put(line)

    def _put(self, line: Line) -> None:
        assert line.pool is not None
        with suppress(PoolClosed):
            line.pool.putconn(line)

    def drop_idle(self) -> None:
        """Let all calls that follow meet new connections."""
        self._drop_at_hand()
        with suppress(PoolClosed):
            self._open().drain()

    def _drop_at_hand(self) -> None:
        while (line := self._take_at_hand(None)) is not None:
            line.close()
            self._put(line)

    def close(self) -> None:
        """Close what is idle now, and the others when they are given back."""
        with self._lock:
            self._closed = True
            pool, self._opened = self._opened, None
        self._drop_at_hand()
        if pool is not None:
            pool.close()


def _has_a_use(line: Line) -> bool:
    return isinstance(line.used_by, Use)
