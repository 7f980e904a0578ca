"""Authentication of pages, by sessions in the memory of the process, so that browsers do not store
access keys."""

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.responses import Response

from fairturn.access.keys import Role
from fairturn.clock import SECOND_US
from fairturn.dashboard.customer_index import CustomerIndex
from fairturn.dashboard.language import PageLanguage
from fairturn.dashboard.samples import ActivitySampler
from fairturn.service.callers import (
    Caller,
    count_anonymous,
    local_operator,
    raise_if_limited,
    takes_token,
)
from fairturn.service.languages import preferred_of
from fairturn.service.options import SESSIONS_PER_KEY_MAX
from fairturn.service.problems import Problem, ProblemCode
from fairturn.service.service import Service, service_of

if TYPE_CHECKING:  # they import this module
    from fairturn.dashboard.demo import Demo, DemoComparison
    from fairturn.dashboard.now import ExampleCache
    from fairturn.dashboard.whatif import WhatIfRuns

LANGUAGE_COOKIE = "fairturn_language"
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


@dataclass(slots=True, kw_only=True)
class PageContext:
    """The state that all pages of a process share."""

    tongues: dict[str, PageLanguage]
    trail: ActivitySampler
    directory: CustomerIndex
    example: "ExampleCache"
    runs: "WhatIfRuns"
    demo: "Demo"
    works: bool  # whether the command also runs a worker
    comparison: "DemoComparison | None"  # if the command submits the traffic of the demo
    sessions: PageSessions = field(default_factory=PageSessions)
    rule_pages: dict[tuple[object, ...], Response] = field(default_factory=dict)  # oldest first


class Visitor(NamedTuple):
    """The client of a page. Without a caller, pages show nothing of the queue."""

    service: Service
    page: PageContext
    caller: Caller | None
    tongue: PageLanguage

    @property
    def changes(self) -> bool:
        """Whether the visitor may change documents."""
        return self.caller is not None and self.caller.role is not Role.READER

    @property
    def operates(self) -> bool:
        """Whether the visitor may change the whole queue."""
        return self.caller is not None and self.caller.role is Role.OPERATOR

    @property
    def oversees(self) -> bool:
        """Whether the visitor may see the whole queue."""
        return self.caller is not None and self.caller.sees_all


class KeyRequired(Exception):
    """The page requires an access key."""


def page_of(request: Request) -> PageContext:
    page: PageContext = request.app.state.page
    return page


def tongue_of(request: Request) -> PageLanguage:
    """Return the chosen language, or else the one that the browser prefers."""
    tongues = page_of(request).tongues
    chosen = tongues.get(request.cookies.get(LANGUAGE_COOKIE, ""))
    return chosen or tongues[preferred_of(request.headers.get("accept-language"))]


def anybody(request: Request) -> Visitor:
    """Return the visitor, without a caller if there is no valid key."""
    service, page = service_of(request), page_of(request)
    try:
        caller = _caller_by_session(request, service, page)
    except Problem:
        caller = None
    if caller is None:
        count_anonymous(request)
    return Visitor(service, page, caller, tongue_of(request))


def session_of(request: Request, service: Service, page: PageContext) -> PageSession | None:
    """Return the session of a request; its key may have been revoked since."""
    cookie = request.cookies.get(session_cookie(request))
    return None if cookie is None else page.sessions.find(cookie, service.clock.now())


def _caller_by_session(request: Request, service: Service, page: PageContext) -> Caller | None:
    session = session_of(request, service, page)
    if session is None:
        return None
    if session.key is None:
        return local_operator(request) if takes_token(service) else None
    key = service.keys.find(session.key)
    if key is None or not key.opens(service.clock.now()):
        return None
    request.state.key = key.id
    return Caller(key.role, key.customer, key.id, key.name)


def session_cookie(request: Request) -> str:
    """Return the name of the cookie. Over TLS, the prefix makes browsers accept it from this host
    only. Otherwise the name has the port, because the services of a machine share their cookies."""
    if request.url.scheme == "https":
        return "__Host-fairturn_session"
    server = request.scope.get("server")
    return f"fairturn_session_{server[1] if server else 0}"


def known(request: Request) -> Visitor:
    """Return the visitor, and check rate limit and origin. Raises `KeyRequired` without a key."""
    visitor = anybody(request)
    if visitor.caller is None:
        raise KeyRequired
    key = visitor.caller.key
    if key is not None:
        raise_if_limited(visitor.service.rates.seconds_to_wait(key))
    if request.method not in ("GET", "HEAD"):
        refuse_other_origins(request)
    return visitor


def _permitted(permits: Callable[[Visitor], bool]) -> Callable[[Request], Visitor]:
    """Return a variant of `known` that rejects visitors without a permission."""

    def permitted(request: Request) -> Visitor:
        visitor = known(request)
        if not permits(visitor):
            raise Problem(ProblemCode.NOT_ALLOWED)
        return visitor

    return permitted


def refuse_other_origins(request: Request) -> None:
    """Reject changes from pages of other origins (CSRF). Every browser sends the origin of a form;
    a request without it is rejected too."""
    headers = request.headers
    if headers.get("sec-fetch-site") == "same-origin":
        return
    origin = headers.get("origin")
    if origin is None or urlsplit(origin).netloc != headers.get("host"):
        raise Problem(ProblemCode.ORIGIN_UNKNOWN)


Anybody = Annotated[Visitor, Depends(anybody)]
Known = Annotated[Visitor, Depends(known)]
Changer = Annotated[Visitor, Depends(_permitted(lambda visitor: visitor.changes))]
Overseer = Annotated[Visitor, Depends(_permitted(lambda visitor: visitor.oversees))]
Operator = Annotated[Visitor, Depends(_permitted(lambda visitor: visitor.operates))]
