"""Renders templates. All values are escaped except the charts of `fairturn.simulator.charts`."""

import hashlib
import unicodedata
from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from typing import Any, NamedTuple
from urllib.parse import urlencode
from zlib import crc32

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response

from fairturn.dashboard.language import day_and_time, timestamp
from fairturn.dashboard.visitors import KeyRequired, Visitor, anybody, page_of, session_of
from fairturn.errors import FairturnError
from fairturn.model import DEFAULT_KIND_NAME
from fairturn.priority import LEVELS
from fairturn.service.administration import workers_of
from fairturn.service.concurrency import hold
from fairturn.service.problems import Problem, ProblemCode, problem_of
from fairturn.service.service import service_of

POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    # With no-referrer, browsers would send "Origin: null" with forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Vary": "Accept-Language, Cookie",
}
_RELOAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>fairturn</title>'
    '<meta http-equiv="refresh" content="0"></html>'
)
STATIC = {
    "style.css": "text/css",
    "page.js": "text/javascript",
    "live.js": "text/javascript",
    "upload.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
COLOURS = 12
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
LANGUAGE_NAMES = {
    "en": "English",
    "de": "Deutsch",
    "es": "Español",
    "pl": "Polski",
    "pt": "Português",
}


@cache
def static_file(name: str) -> bytes:
    return (resources.files("fairturn.dashboard") / "static" / name).read_bytes()


@cache
def _version() -> str:
    """Return a hash of all static files for their URLs, so that browsers may cache them forever."""
    return hashlib.sha256(b"".join(static_file(name) for name in STATIC)).hexdigest()[:12]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fairturn.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(plain=plain, face=face_of, timestamp=timestamp, exact=day_and_time)
    environment.globals.update(
        levels=range(1, LEVELS + 1), languages=LANGUAGE_NAMES, default_kind=DEFAULT_KIND_NAME
    )
    return environment


def render(
    request: Request, visitor: Visitor, template: str, *, status: int = 200, **values: Any
) -> Response:
    tongue, root = visitor.tongue, request.scope.get("root_path", "")
    path = request.url.path
    html = (
        _environment()
        .get_template(template)
        .render(
            t=tongue.say,
            label=tongue.label,
            n=tongue.number,
            short=tongue.short,
            brief=tongue.brief,
            percent=tongue.percent,
            clock=tongue.clock,
            words=tongue.words,
            size=tongue.bytes,
            tongue=tongue,
            visitor=visitor,
            root=root,
            version=_version(),
            path=path,
            here=_here(request),
            link=partial(_link, root),
            now=visitor.service.clock.now(),
            alive_workers=_alive_workers(visitor),
            has_kinds=visitor.oversees and visitor.page.trail.lately().has_kinds,
            **values,
        )
    )
    return HTMLResponse(html, status, {**HEADERS, "Content-Language": tongue.name})


def _alive_workers(visitor: Visitor) -> int:
    if not visitor.oversees:
        return 0
    return sum(worker.alive for worker in workers_of(visitor.service))


def _link(root: str, path: str, **query: Any) -> str:
    """Return a URL; parameters that are None or empty are omitted."""
    given = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{root}{path}" + (f"?{urlencode(given, doseq=True)}" if given else "")


def link_to(request: Request, path: str, **query: Any) -> str:
    return _link(request.scope.get("root_path", ""), path, **query)


def see_other(request: Request, path: str, **query: Any) -> Response:
    return RedirectResponse(link_to(request, path, **query), 303)


class PageRoute(APIRoute):
    """A route that renders problems as pages."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_or_show_problem(request: Request) -> Response:
            try:
                service = service_of(request)
                session = session_of(request, service, page_of(request))
                if session is not None:
                    hold(request.scope, await service.requests.wait(session.key))
                response: Response = await handle(request)
                return response
            except KeyRequired:
                if _followed_from_elsewhere(request):
                    return HTMLResponse(_RELOAD, headers=HEADERS)
                return see_other(request, "/login", next=_local(request))
            except (Problem, FairturnError) as error:
                problem = problem_of(error)
                if problem.code is ProblemCode.INTERNAL:
                    raise
            except RequestValidationError:
                problem = Problem(ProblemCode.INVALID)
            except HTTPException as error:
                if error.status_code != 404:
                    raise
                problem = Problem(ProblemCode.NOT_FOUND)
            return tell(request, problem)

        return handle_or_show_problem


def _followed_from_elsewhere(request: Request) -> bool:
    """Return whether the user followed a link from another site. The browser then withholds the
    SameSite=Strict cookie; a page that reloads itself gets it."""
    headers = request.headers
    return request.method == "GET" and (
        headers.get("sec-fetch-site") in ("cross-site", "same-site")
        and headers.get("sec-fetch-mode") == "navigate"
    )


def tell(request: Request, problem: Problem) -> Response:
    """Render a problem."""
    visitor = anybody(request)
    return render(
        request,
        visitor,
        "problem.html",
        status=problem.code.status,
        code=problem.code.value,
        sentence=visitor.tongue.language.find(problem.code.sentence),
        detail=problem.detail,
    )


def _local(request: Request) -> str | None:
    """Return where to go after the login: only pages reached by GET can be opened again."""
    here = _here(request)
    return None if request.method != "GET" or here == "/" else here


def _here(request: Request) -> str:
    """Return the path and query of the page, without the prefix of a proxy."""
    path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
    return path + (f"?{request.url.query}" if request.url.query else "")


class Avatar(NamedTuple):
    """A colour, and two letters that do not depend on seeing the colour."""

    letters: str
    colour: int  # its number in the style sheet


def face_of(name: str) -> Avatar:
    """Return the avatar of a customer, the same in every process."""
    letters = [c for c in unicodedata.normalize("NFC", name) if c.isalnum()]
    shown = "".join(letters[:2]).upper()[:2]
    return Avatar(shown or "··", crc32(name.encode("utf-8", "replace")) % COLOURS)


def plain(text: str) -> str:
    """Replace invisible characters, such as those that reverse the direction of the layout."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_hidden(c) else c for c in text)


def _is_hidden(c: str) -> bool:
    # U+200D joins emoji, and a soft hyphen is harmless.
    return c not in "\n\t\u200d\u00ad" and unicodedata.category(c) in _HIDDEN
