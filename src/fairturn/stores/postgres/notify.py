"""Wake-ups: at once for changes of this process, by NOTIFY for those of others, and by polling once
in a second if a notification is lost.

A notification has no payload, and goes out in a transaction of its own that does not wait for the
disk: in one that does it would let all commits of the server wait for each other. Changes close
together share one, which a thread sends.
"""

import logging
import select
import threading
from collections import Counter
from contextlib import suppress

import psycopg

from fairturn.clock import stopwatch
from fairturn.errors import StoreError
from fairturn.stores.postgres.connection import Database, said
from fairturn.stores.postgres.dsn import parse
from fairturn.stores.postgres.session import NOTIFY, Connection, Session

_LOG = logging.getLogger("fairturn.postgres")
POLL_S = 1.0
_TOGETHER_S = 0.015  # changes within this time share a NOTIFY
_HEAR_S = 0.2  # a listener hears so soon that it is to end
_CHECK_S = 10.0  # a listener that has heard nothing for so long looks whether it is heard
_AGAIN_S = (0.5, 1.0, 2.0)  # between attempts to listen

# Each part only ever rises: with submissions and other changes, with claims, with settings.
_VERSION = """
    SELECT (SELECT sum(changes) FROM fairturn.totals)::bigint
        + (SELECT version FROM fairturn.turns ORDER BY version DESC LIMIT 1)
        + (SELECT settings_version FROM fairturn.queue)"""


class Watching:
    """What one process knows of changes."""

    def __init__(self, database: Database, listen_url: str | None) -> None:
        self._database = database
        if listen_url is not None:
            parse(listen_url)  # what is no address is told at once; else nobody would hear of it
        self._listen_url = listen_url
        self._may_tell = True  # nobody has listened yet, and nobody was told
        self._channel = f"{database.schema}_changed"
        # Taken by itself, because a condition's own `with` keeps it if a signal interrupts that.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._version = -1  # as it was seen the last time
        self._looked_at = 0.0
        self._stale = True  # whether something has happened since
        self._news = 0  # how often something has happened, as far as it was heard of
        self._awaited = False  # whether anybody has ever waited for it
        self._hinted_at = -_TOGETHER_S
        self._due_at: float | None = None  # when the thread is to send a hint
        self._hints = threading.Condition(self._lock)
        self._sent: Counter[int] = Counter()  # hints that come back, by the server's process
        self._closing = threading.Event()
        self._notifier: threading.Thread | None = None
        self._listener: threading.Thread | None = None

    def note(self) -> None:
        """This process has changed something."""
        with self._lock:
            self._wake()
            self._send_at(max(stopwatch(), self._hinted_at + _TOGETHER_S))

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
        with self._lock:
            self._hints.notify()
        for thread in (self._notifier, self._listener):
            if thread is not None and thread is not threading.current_thread():
                thread.join(5)

    def _wake(self) -> None:
        with self._lock:
            self._stale = True
            self._news += 1
            if self._awaited:
                self._changed.notify_all()

    # ── Sending hints ────────────────────────────────────────────────────────────────────────────

    def _send_at(self, due_at: float) -> None:
        """Let the thread send a hint then, or before."""
        if self._due_at is None or due_at < self._due_at:
            self._due_at = due_at
            self._hints.notify()
        if self._notifier is None and not self._closing.is_set():
            self._notifier = threading.Thread(
                target=self._notify, name="fairturn-notify", daemon=True
            )
            self._notifier.start()

    def _notify(self) -> None:
        while self._comes_due():
            with suppress(StoreError, psycopg.Error), self._database.session() as one:
                self._expect_back(one)
                one.ask(NOTIFY, (self._channel,))

    def _comes_due(self) -> bool:
        """Wait until a hint is to be sent; False: nothing more is to be told."""
        with self._lock:
            while not self._closing.is_set():
                now = stopwatch()
                if self._due_at is not None and self._due_at <= now:
                    break
                self._hints.wait(None if self._due_at is None else self._due_at - now)
            due, self._due_at = self._due_at is not None, None
            self._hinted_at = stopwatch()
            return due

    # ── Hearing hints ────────────────────────────────────────────────────────────────────────────

    def _listen(self) -> None:
        """Listen from the first wait on, where that is possible."""
        self._awaited = True
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
            try:
                with self._database.connect(self._listen_url) as connection:
                    self._sent.clear()  # what was sent before does not come back here
                    connection.execute(f"LISTEN {self._channel}")
                    self._wake()  # something may have happened before
                    attempt, self._may_tell = 0, False
                    self._hear_from(connection)
            except (psycopg.Error, StoreError) as error:
                self._tell(error)
            self._closing.wait(_AGAIN_S[min(attempt, len(_AGAIN_S) - 1)])
            attempt += 1

    def _tell(self, error: Exception) -> None:
        """Say it once, if the address past the pooler leads nowhere: who waits would only wait
        longer. Where the queue itself does not answer, its calls say so."""
        if self._listen_url is not None and self._may_tell:
            self._may_tell = False
            _LOG.warning(
                "cannot listen for changes at %s (%s); they are looked for once in a second",
                parse(self._listen_url)[1],
                said(error),
            )

    def _hear_from(self, connection: Connection) -> None:
        """Read what comes by itself: the driver's own way to do that takes longer than to claim."""
        pgconn = connection.pgconn
        coming = select.poll()
        coming.register(pgconn.socket, select.POLLIN)
        quiet_since = stopwatch()
        while not self._closing.is_set():
            if coming.poll(1_000 * _HEAR_S):
                pgconn.consume_input()
                quiet_since = stopwatch()
            elif stopwatch() - quiet_since > _CHECK_S:
                quiet_since = stopwatch()
                pgconn.exec_(b"SELECT pg_listening_channels()")
            heard = False
            while (hint := pgconn.notifies()) is not None:
                heard |= not self._is_own(hint.be_pid)
            if heard:
                self._wake()

    def _expect_back(self, session: Session) -> None:
        """The server tells a listener also of what its own process has sent."""
        with self._lock:
            self._sent[session.connection.pgconn.backend_pid] += 1

    def _is_own(self, pid: int) -> bool:
        """Whether a hint is one of this process, which knows of the change."""
        with self._lock:
            if not self._sent[pid]:
                return False
            self._sent[pid] -= 1
            return True
