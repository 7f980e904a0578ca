"""Templates to answers. Everything that is put into a template is escaped; nothing is marked safe
but what `charts.py` has drawn."""

import hashlib
from collections.abc import Callable
from functools import cache, partial
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, RedirectResponse, Response

from fairturn.dashboard.avatars import face_of, plain
from fairturn.dashboard.language import day_and_time, moment
from fairturn.dashboard.visitors import Shut, Visitor, anybody
from fairturn.errors import FairturnError
from fairturn.priority import LEVELS
from fairturn.service.administration import workers_of
from fairturn.service.problems import MESSAGES, STATUS, Code, Problem, problem_of

POLICY = (
    "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Frame-Options": "DENY",
    # Without a referrer, the browser would not say either where a form of ours comes from.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Vary": "Accept-Language, Cookie",
}
_AGAIN = (
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
LANGUAGE_NAMES = {
    "en": "English",
    "de": "Deutsch",
    "es": "Español",
    "pl": "Polski",
    "pt": "Português",
}


@cache
def static_file(name: str) -> bytes:
    """A file of ours, read once."""
    return (resources.files("fairturn.dashboard") / "static" / name).read_bytes()


@cache
def _version() -> str:
    """Changes with every change of a file, so that browsers may keep the files for ever."""
    together = hashlib.sha256(b"".join(static_file(name) for name in STATIC))
    return together.hexdigest()[:12]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fairturn.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(plain=plain, face=face_of, moment=moment, exact=day_and_time)
    environment.globals.update(levels=range(1, LEVELS + 1), languages=LANGUAGE_NAMES)
    return environment


def render(
    request: Request, visitor: Visitor, template: str, *, status: int = 200, **values: Any
) -> Response:
    """A page as an answer."""
    tongue, root = visitor.tongue, request.scope.get("root_path", "")
    path = request.url.path
    html = (
        _environment()
        .get_template(template)
        .render(
            t=tongue.say,
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
            **values,
        )
    )
    return HTMLResponse(html, status, {**HEADERS, "Content-Language": tongue.name})


def _alive_workers(visitor: Visitor) -> int:
    """For the line at the top, of those who may see it."""
    if not visitor.oversees:
        return 0
    return sum(worker.alive for worker in workers_of(visitor.service))


def _link(root: str, path: str, **query: Any) -> str:
    """An address of ours, with what is not None as its query."""
    given = {name: value for name, value in query.items() if value is not None and value != ""}
    return f"{root}{path}" + (f"?{urlencode(given, doseq=True)}" if given else "")


def link_to(request: Request, path: str, **query: Any) -> str:
    """An address of ours."""
    return _link(request.scope.get("root_path", ""), path, **query)


def see_other(request: Request, path: str, **query: Any) -> Response:
    """After a change: go and look."""
    return RedirectResponse(link_to(request, path, **query), 303)


class PageRoute(APIRoute):
    """A route whose problems are pages too."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handle = super().get_route_handler()

        async def handle_or_tell(request: Request) -> Response:
            try:
                response: Response = await handle(request)
                return response
            except Shut:
                if _followed_from_elsewhere(request):
                    return HTMLResponse(_AGAIN, headers=HEADERS)
                return see_other(request, "/login", next=_local(request))
            except (Problem, FairturnError) as error:
                problem = problem_of(error)
                if problem.code is Code.INTERNAL:
                    raise
            except RequestValidationError:
                problem = Problem(Code.INVALID)
            except HTTPException as error:
                if error.status_code != 404:
                    raise
                problem = Problem(Code.NOT_FOUND)
            return tell(request, problem)

        return handle_or_tell


def _followed_from_elsewhere(request: Request) -> bool:
    """A strict cookie is not sent by who follows a link from another site. The page asks for itself
    once more, and then it is."""
    headers = request.headers
    return request.method == "GET" and (
        headers.get("sec-fetch-site") in ("cross-site", "same-site")
        and headers.get("sec-fetch-mode") == "navigate"
    )


def tell(request: Request, problem: Problem) -> Response:
    """A problem as a page."""
    visitor = anybody(request)
    return render(
        request,
        visitor,
        "problem.html",
        status=STATUS[problem.code],
        code=problem.code.value,
        sentence=visitor.tongue.language.find(MESSAGES[problem.code].one),
        detail=problem.detail,
    )


def _local(request: Request) -> str | None:
    """Where to go after the login; only for pages that can be asked for again."""
    here = _here(request)
    return None if request.method != "GET" or here == "/" else here


def _here(request: Request) -> str:
    """The address of the page on this service, without what a proxy has before it."""
    path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"
    return path + (f"?{request.url.query}" if request.url.query else "")
