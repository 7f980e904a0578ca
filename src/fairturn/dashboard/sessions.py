"""Sessions, in the memory of the process, so that browsers do not store access keys."""

import secrets
import threading
from collections.abc import Callable
from typing import NamedTuple

from fairturn.clock import SECOND_US
from fairturn.service.options import SESSIONS_PER_KEY_MAX

LASTS_US = 12 * 3_600 * SECOND_US
SESSIONS_MAX = 10_000


class PageSession(NamedTuple):
    key: str | None  # the id; None: the token of a service without keys
    ends_at: int


class PageSessions:
    """The sessions by token. Beyond `SESSIONS_PER_KEY_MAX` the oldest of the key ends, beyond
    `SESSIONS_MAX` the oldest of all."""

    def __init__(self, token: Callable[[], str] = secrets.token_urlsafe) -> None:
        self._token = token
        self._sessions: dict[str, PageSession] = {}  # oldest first
        self._tokens: dict[str | None, dict[str, None]] = {}  # of each key, oldest first
        self._lock = threading.Lock()

    def begin(self, key: str | None, now: int) -> str:
        """Start a session and return its token."""
        token = self._token()
        with self._lock:
            if len(self._tokens.get(key, ())) >= SESSIONS_PER_KEY_MAX:
                self._end(next(iter(self._tokens[key])))
            if len(self._sessions) >= SESSIONS_MAX:
                self._end(next(iter(self._sessions)))
            self._sessions[token] = PageSession(key, now + LASTS_US)
            self._tokens.setdefault(key, {})[token] = None
        return token

    def find(self, token: str, now: int) -> PageSession | None:
        """Return the session of a token, or None if it is unknown or has expired."""
        session = self._sessions.get(token)
        return session if session is not None and now < session.ends_at else None

    def end(self, token: str) -> None:
        with self._lock:
            self._end(token)

    def _end(self, token: str) -> None:
        session = self._sessions.pop(token, None)
        if session is not None:
            own = self._tokens[session.key]
            del own[token]
            if not own:
                del self._tokens[session.key]
