"""Knowing that something has changed: at once in this process, by a hint in others, and by a look
once in a second if a hint is lost.

A hint is a NOTIFY with nothing in it, sent after the commit by a thread of its own: in the
transaction itself it would let all commits of the server wait for each other. Many changes make one
hint.
"""

import threading
from contextlib import suppress

import psycopg
from psycopg_pool import PoolTimeout

from fairturn.clock import stopwatch
from fairturn.errors import StoreError
from fairturn.stores.postgres.database import Database

POLL_S = 1.0
_TOGETHER_S = 0.015  # changes within so short a time share a hint
_CHECK_S = 10.0  # a listener that has heard nothing for so long looks whether it is heard
_AGAIN_S = (1.0, 5.0, 15.0)  # between attempts to listen

# Each part only ever rises: with submissions and other changes, with claims, with settings.
_VERSION = """
    SELECT (SELECT sum(changes) FROM fairturn.totals)::bigint
        + (SELECT version FROM fairturn.turns ORDER BY version DESC LIMIT 1)
        + (SELECT settings_version FROM fairturn.queue)"""
# A hint need not survive a crash.
_NOTIFY = "BEGIN; SET LOCAL synchronous_commit = off; NOTIFY {channel}; COMMIT"


class Watching:
    """What one process knows of changes."""

    def __init__(self, database: Database, listen_url: str | None) -> None:
        self._database = database
        self._listen_url = listen_url
        self._channel = f"{database.schema}_changed"
        # Taken by itself, because a condition's own `with` keeps it if a signal interrupts that.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._version = -1  # as it was seen the last time
        self._looked_at = 0.0
        self._stale = True  # whether something has happened since
        self._news = 0  # how often something has happened, as far as it was heard of
        self._hints = threading.Event()
        self._closing = threading.Event()
        self._notifier: threading.Thread | None = None
        self._listener: threading.Thread | None = None

    def note(self) -> None:
        """Something was changed by this process."""
        self._wake()
        self._hints.set()
        if self._notifier is None:
            with self._lock:
                if self._notifier is None and not self._closing.is_set():
                    self._notifier = threading.Thread(
                        target=self._notify, name="fairturn-notify", daemon=True
                    )
                    self._notifier.start()

    def version(self) -> int:
        """The version as it is now."""
        with self._lock:
            self._stale = False
        ((version,),) = self._database.transact(lambda session: session.fetch(_VERSION))
        with self._lock:
            self._looked_at = stopwatch()
            if version > self._version:
                self._version = version
                self._changed.notify_all()
            return self._version

    def wait(self, version: int, timeout_s: float) -> int:
        """This process's own changes wake at once, hints of others at once, and without a hint
        within a second."""
        self._listen()
        until = stopwatch() + timeout_s
        while True:
            with self._lock:
                now = stopwatch()
                left, next_look = until - now, self._looked_at + POLL_S - now
                if not self._stale and next_look > 0:
                    if self._version != version or left <= 0:
                        return self._version
                    self._changed.wait(min(left, next_look))
                    continue
            self.version()

    def hear(self, news: int, timeout_s: float) -> int:
        """Wait until more was heard of than this. The server is asked for nothing."""
        self._listen()
        until = stopwatch() + timeout_s
        with self._lock:
            while self._news == news and (left := until - stopwatch()) > 0:
                self._changed.wait(left)
            return self._news

    def close(self) -> None:
        """Send the last hint, and end."""
        self._closing.set()
        self._hints.set()
        for thread in (self._notifier, self._listener):
            if thread is not None and thread is not threading.current_thread():
                thread.join(5)

    def _wake(self) -> None:
        with self._lock:
            self._stale = True
            self._news += 1
            self._changed.notify_all()

    # ── Sending hints ────────────────────────────────────────────────────────────────────────────

    def _notify(self) -> None:
        while not self._closing.is_set() or self._hints.is_set():
            self._hints.wait()
            self._hints.clear()
            with suppress(StoreError, psycopg.Error, PoolTimeout), self._database.session() as one:
                one.connection.execute(_NOTIFY.format(channel=self._channel), prepare=False)
            self._closing.wait(_TOGETHER_S)

    # ── Hearing hints ────────────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        """Listen from the first wait on, where that is possible."""
        if self._listener is not None or (self._database.pooled and self._listen_url is None):
            return
        with self._lock:
            if self._listener is None and not self._closing.is_set():
                self._listener = threading.Thread(
                    target=self._hear, name="fairturn-listen", daemon=True
                )
                self._listener.start()

    def _hear(self) -> None:
        attempt = 0
        while not self._closing.is_set():
            with (
                suppress(psycopg.Error, StoreError),
                self._database.connect(self._listen_url) as connection,
            ):
                connection.execute(f"LISTEN {self._channel}")
                self._wake()  # something may have happened before
                attempt = 0
                self._hear_from(connection)
            self._closing.wait(_AGAIN_S[min(attempt, len(_AGAIN_S) - 1)])
            attempt += 1

    def _hear_from(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        quiet_since = stopwatch()
        while not self._closing.is_set():
            for _ in connection.notifies(timeout=0.2, stop_after=1):
                quiet_since = stopwatch()
                self._wake()
            if stopwatch() - quiet_since > _CHECK_S:
                quiet_since = stopwatch()
                connection.execute("SELECT pg_listening_channels()").fetchall()
