"""Who looks at a page: by session, or as the one who sits at this machine."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple
from urllib.parse import urlsplit

from fastapi import Depends, Request

from fairturn.access.keys import Role
from fairturn.dashboard.comparison import Comparison
from fairturn.dashboard.customer_index import Directory
from fairturn.dashboard.language import Tongue
from fairturn.dashboard.samples import Trail
from fairturn.dashboard.sessions import Sessions
from fairturn.service.callers import Caller, caller_of
from fairturn.service.languages import preferred_of
from fairturn.service.problems import Code, Problem
from fairturn.service.service import Service, service_of

if TYPE_CHECKING:  # they import this module
    from fairturn.dashboard.demo import Demo
    from fairturn.dashboard.now import Example
    from fairturn.dashboard.whatif import Runs

SESSION_COOKIE = "fairturn_session"
LANGUAGE_COOKIE = "fairturn_language"


@dataclass(slots=True, kw_only=True)
class Page:
    """What all pages of a process share."""

    tongues: dict[str, Tongue]
    trail: Trail
    directory: Directory
    example: "Example"
    runs: "Runs"
    demo: "Demo"
    works: bool  # whether the command that serves runs a worker too
    comparison: Comparison | None  # of the traffic that the service was started with
    sessions: Sessions = field(default_factory=Sessions)


class Visitor(NamedTuple):
    """Who looks, at what, in which language. Without a caller nothing is shown of the queue."""

    service: Service
    page: Page
    caller: Caller | None
    tongue: Tongue
    has_session: bool

    @property
    def operates(self) -> bool:
        """Whether they may change the whole queue."""
        return self.caller is not None and self.caller.role is Role.OPERATOR

    @property
    def oversees(self) -> bool:
        """Whether they may see the whole queue."""
        return self.caller is not None and self.caller.sees_all


class Shut(Exception):
    """A page that takes an access key, and nobody has shown one."""


def page_of(request: Request) -> Page:
    """What the pages share, of the application that a request came to."""
    page: Page = request.app.state.page
    return page


def tongue_of(request: Request) -> Tongue:
    """The language that was chosen, or else the one that the browser prefers."""
    tongues = page_of(request).tongues
    chosen = tongues.get(request.cookies.get(LANGUAGE_COOKIE, ""))
    return chosen or tongues[preferred_of(request.headers.get("accept-language"))]


def anybody(request: Request) -> Visitor:
    """Whoever looks, known or not."""
    service, page = service_of(request), page_of(request)
    caller, has_session = _caller_by_session(request, service, page)
    if caller is None:
        try:
            caller = caller_of(request, None) if "authorization" not in request.headers else None
        except Problem:
            caller = None
    return Visitor(service, page, caller, tongue_of(request), has_session)


def _caller_by_session(
    request: Request, service: Service, page: Page
) -> tuple[Caller | None, bool]:
    token = request.cookies.get(SESSION_COOKIE)
    session = None if token is None else page.sessions.find(token, service.clock.now())
    key = None if session is None else service.queue.store.access_key(session.key)
    if key is None or not key.opens(service.clock.now()):
        return None, False
    request.state.key = key.id
    return Caller(key.role, key.customer, key.id, key.name), True


def known(request: Request) -> Visitor:
    """Somebody with a key, or at a machine where none is asked for."""
    visitor = anybody(request)
    if visitor.caller is None:
        raise Shut
    key = visitor.caller.key
    wait_s = 0 if key is None else visitor.service.rates.seconds_to_wait(key)
    if wait_s:
        raise Problem(Code.RATE_LIMITED, retry_after_s=wait_s)
    if request.method not in ("GET", "HEAD"):
        refuse_other_origins(request)
    return visitor


def changer(request: Request) -> Visitor:
    """Somebody who may change documents: all but readers."""
    visitor = known(request)
    if visitor.caller is None or visitor.caller.role is Role.READER:
        raise Problem(Code.NOT_ALLOWED)
    return visitor


def overseer(request: Request) -> Visitor:
    """Somebody who may see the whole queue."""
    visitor = known(request)
    if not visitor.oversees:
        raise Problem(Code.NOT_ALLOWED)
    return visitor


def operator(request: Request) -> Visitor:
    """Somebody who may change the whole queue."""
    visitor = known(request)
    if not visitor.operates:
        raise Problem(Code.NOT_ALLOWED)
    return visitor


def refuse_other_origins(request: Request) -> None:
    """A change must come from a page of ours. Every browser says where a form comes from; who
    does not is refused, because a cookie alone proves only who, and not what they wanted."""
    headers = request.headers
    if headers.get("sec-fetch-site") == "same-origin":
        return
    origin = headers.get("origin")
    if origin is None or urlsplit(origin).netloc != headers.get("host"):
        raise Problem(Code.ORIGIN_UNKNOWN)


Anybody = Annotated[Visitor, Depends(anybody)]
Known = Annotated[Visitor, Depends(known)]
Changer = Annotated[Visitor, Depends(changer)]
Overseer = Annotated[Visitor, Depends(overseer)]
Operator = Annotated[Visitor, Depends(operator)]
