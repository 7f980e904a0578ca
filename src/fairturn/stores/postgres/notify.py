"""Wake-ups: directly for changes of this process, by NOTIFY for those of other processes, and by
polling once a second in case a notification is lost.

A thread sends one NOTIFY without a payload for all changes within `_TOGETHER_S`. Its transaction
has synchronous_commit off: PostgreSQL serializes the commits of transactions that notify, and with
a WAL flush under that lock all of them would wait for each other.
"""

import logging
import select
import threading
from collections import Counter
from contextlib import suppress

import psycopg

from fairturn.clock import stopwatch
from fairturn.errors import StoreError
from fairturn.stores.postgres.connection import PostgresDatabase, message_of, parse
from fairturn.stores.postgres.session import NOTIFY, Connection, Session

_LOG = logging.getLogger("fairturn.postgres")
POLL_S = 1.0
_TOGETHER_S = 0.015  # changes within this time share a NOTIFY
_CLOSE_CHECK_S = 0.2  # how often the listener checks whether the store was closed
_KEEPALIVE_S = 10.0  # without a notification, before the listener checks its connection
_AGAIN_S = (0.5, 1.0, 2.0)  # backoff between attempts to listen

# A sum of counters that only increase: with submissions and other changes, claims, settings.
_VERSION = """
    SELECT (SELECT sum(changes) FROM fairturn.arrival_counters)::bigint
        + (SELECT version FROM fairturn.scheduler_states ORDER BY version DESC LIMIT 1)
        + (SELECT settings_version FROM fairturn.queue)"""


class ChangeListener:
    """Changes of one queue as one process sees them, and the wake-ups of waiting threads.

    It has more than 15 attributes because the sending, listening and waiting threads share them
    under one lock.
    """

    def __init__(self, database: PostgresDatabase, listen_url: str | None) -> None:
        self._database = database
        if listen_url is not None:
            parse(listen_url)  # raises at once: the listener's thread could only log it
        self._listen_url = listen_url
        self._log_failures = True  # until the first success, or the first failure
        self._channel = f"{database.schema}_changed"
        # Used directly: `with` on a condition keeps the lock if a signal interrupts it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._version = -1  # as last read
        self._read_at = 0.0
        self._stale = True  # whether a wake-up came since
        self._wakeups = 0
        self._awaited = False  # whether a thread has ever waited
        self._notified_at = -_TOGETHER_S
        self._due_at: float | None = None  # when the thread sends the next NOTIFY
        self._due = threading.Condition(self._lock)
        self._sent: Counter[int] = Counter()  # own notifications in flight, by backend pid
        self._closing = threading.Event()
        self._notifier: threading.Thread | None = None
        self._listener: threading.Thread | None = None

    def note(self) -> None:
        """Wake this process's waiting threads after a change of its own, and schedule a NOTIFY."""
        with self._lock:
            self._wake()
            self._send_at(max(stopwatch(), self._notified_at + _TOGETHER_S))

    def version(self) -> int:
        """Read the version from the database."""
        with self._lock:
            self._stale = False
        ((version,),) = self._database.transact(lambda session: session.fetch(_VERSION))
        with self._lock:
            self._read_at = stopwatch()
            if version > self._version:
                self._version = version
                self._changed.notify_all()
            return self._version

    def wait(self, version: int, timeout_s: float) -> int:
        """Wait until the version differs from `version`; return the present one. A change wakes the
        thread at once, or within `POLL_S` if its notification is lost."""
        self._listen()
        until = stopwatch() + timeout_s
        while True:
            with self._lock:
                now = stopwatch()
                left, next_poll = until - now, self._read_at + POLL_S - now
                if not self._stale and next_poll > 0:
                    if self._version != version or left <= 0:
                        return self._version
                    self._changed.wait(min(left, next_poll))
                    continue
            self.version()

    def wait_for_wakeup(self, seen: int, timeout_s: float) -> int:
        """Wait until the number of wake-ups differs from `seen`; return it. No statement is sent to
        the server."""
        self._listen()
        until = stopwatch() + timeout_s
        with self._lock:
            while self._wakeups == seen and (left := until - stopwatch()) > 0:
                self._changed.wait(left)
            return self._wakeups

    def close(self) -> None:
        """Send the last NOTIFY, if one is due, and stop the threads."""
        self._closing.set()
        with self._lock:
            self._due.notify()
        for thread in (self._notifier, self._listener):
            if thread is not None and thread is not threading.current_thread():
                thread.join(5)

    def _wake(self) -> None:
        with self._lock:
            self._stale = True
            self._wakeups += 1
            if self._awaited:
                self._changed.notify_all()

    # ── NOTIFY ───────────────────────────────────────────────────────────────────────────────────

    def _send_at(self, due_at: float) -> None:
        """Schedule a NOTIFY for this time, unless an earlier one is due."""
        if self._due_at is None or due_at < self._due_at:
            self._due_at = due_at
            self._due.notify()
        if self._notifier is None and not self._closing.is_set():
            self._notifier = threading.Thread(
                target=self._notify, name="fairturn-notify", daemon=True
            )
            self._notifier.start()

    def _notify(self) -> None:
        while self._wait_until_due():
            with suppress(StoreError, psycopg.Error), self._database.session() as session:
                self._expect_own(session)
                session.ask(NOTIFY, (self._channel,))

    def _wait_until_due(self) -> bool:
        """Wait until a NOTIFY is due. Return False if the store was closed and none is."""
        with self._lock:
            while not self._closing.is_set():
                now = stopwatch()
                if self._due_at is not None and self._due_at <= now:
                    break
                self._due.wait(None if self._due_at is None else self._due_at - now)
            is_due, self._due_at = self._due_at is not None, None
            self._notified_at = stopwatch()
            return is_due

    # ── LISTEN ───────────────────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        """Start the listener at the first wait, unless LISTEN would go through a pooler."""
        self._awaited = True
        if self._listener is not None or (self._database.pooled and self._listen_url is None):
            return
        with self._lock:
            if self._listener is None and not self._closing.is_set():
                self._listener = threading.Thread(
                    target=self._listen_until_closed, name="fairturn-listen", daemon=True
                )
                self._listener.start()

    def _listen_until_closed(self) -> None:
        attempt = 0
        while not self._closing.is_set():
            try:
                with self._database.connect(self._listen_url) as connection:
                    self._sent.clear()  # earlier notifications do not arrive on this connection
                    connection.execute(f"LISTEN {self._channel}")
                    self._wake()  # a change may have been made before
                    attempt, self._log_failures = 0, False
                    self._receive(connection)
            except (psycopg.Error, StoreError) as error:
                self._log_failure(error)
            self._closing.wait(_AGAIN_S[min(attempt, len(_AGAIN_S) - 1)])
            attempt += 1

    def _log_failure(self, error: Exception) -> None:
        """Log once that `listen_url` is unreachable: the only symptom would be slower wake-ups. If
        the database itself is unreachable, the store's calls raise."""
        if self._listen_url is not None and self._log_failures:
            self._log_failures = False
            _LOG.warning(
                "cannot listen for changes at %s (%s); polling once a second",
                parse(self._listen_url)[1],
                message_of(error),
            )

    def _receive(self, connection: Connection) -> None:
        """Receive notifications until the store is closed. The driver's own generator takes longer
        than a claim."""
        pgconn = connection.pgconn
        readable = select.poll()
        readable.register(pgconn.socket, select.POLLIN)
        quiet_since = stopwatch()
        while not self._closing.is_set():
            if readable.poll(1_000 * _CLOSE_CHECK_S):
                pgconn.consume_input()
                quiet_since = stopwatch()
            elif stopwatch() - quiet_since > _KEEPALIVE_S:
                quiet_since = stopwatch()
                pgconn.exec_(b"SELECT pg_listening_channels()")
            is_foreign = False
            while (notification := pgconn.notifies()) is not None:
                is_foreign |= not self._is_own(notification.be_pid)
            if is_foreign:
                self._wake()

    def _expect_own(self, session: Session) -> None:
        """Count a NOTIFY of this process, which its listener receives too."""
        with self._lock:
            self._sent[session.connection.pgconn.backend_pid] += 1

    def _is_own(self, pid: int) -> bool:
        """Return whether this process sent the notification: its threads were woken by `note`."""
        with self._lock:
            if not self._sent[pid]:
                return False
            self._sent[pid] -= 1
            return True
