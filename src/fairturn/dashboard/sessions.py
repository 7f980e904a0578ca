"""Who has logged in: kept in the memory of this process, so that no key lies in a browser."""

import secrets
from collections.abc import Callable
from typing import NamedTuple

from fairturn.clock import SECOND_US

LASTS_US = 12 * 3_600 * SECOND_US
SESSIONS_MAX = 10_000


class Session(NamedTuple):
    """An access key that was shown, by its id, and until when that is enough."""

    key: str
    ends_at: int


class Sessions:
    """The sessions by their secret names. When there are too many, the oldest end."""

    def __init__(self, token: Callable[[], str] = secrets.token_urlsafe) -> None:
        self._token = token
        self._sessions: dict[str, Session] = {}

    def begin(self, key: str, now: int) -> str:
        """A new session; gives its secret name."""
        while len(self._sessions) >= SESSIONS_MAX:
            self._sessions.pop(next(iter(self._sessions)), None)
        token = self._token()
        self._sessions[token] = Session(key, now + LASTS_US)
        return token

    def find(self, token: str, now: int) -> Session | None:
        """The session of this name, if it has not ended."""
        session = self._sessions.get(token)
        return session if session is not None and now < session.ends_at else None

    def end(self, token: str) -> None:
        """Forget a session."""
        self._sessions.pop(token, None)
