"""Sessions, in the memory of the process, so that browsers do not store access keys."""

import secrets
from collections.abc import Callable
from typing import NamedTuple

from fairturn.clock import SECOND_US

LASTS_US = 12 * 3_600 * SECOND_US
SESSIONS_MAX = 10_000


class PageSession(NamedTuple):
    key: str | None  # the id; None: the token of a service without keys
    ends_at: int


class PageSessions:
    """The sessions by token. Beyond `SESSIONS_MAX` the oldest ends."""

    def __init__(self, token: Callable[[], str] = secrets.token_urlsafe) -> None:
        self._token = token
        self._sessions: dict[str, PageSession] = {}

    def begin(self, key: str | None, now: int) -> str:
        """Start a session and return its token."""
        while len(self._sessions) >= SESSIONS_MAX:
            self._sessions.pop(next(iter(self._sessions)), None)
        token = self._token()
        self._sessions[token] = PageSession(key, now + LASTS_US)
        return token

    def find(self, token: str, now: int) -> PageSession | None:
        """Return the session of a token, or None if it is unknown or has expired."""
        session = self._sessions.get(token)
        return session if session is not None and now < session.ends_at else None

    def end(self, token: str) -> None:
        self._sessions.pop(token, None)
