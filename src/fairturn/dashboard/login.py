"""Login with an access key, and logout."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.visitors import Anybody, Visitor, refuse_other_origins, session_cookie
from fairturn.service.callers import address_of, is_local, is_token, raise_if_limited, takes_token
from fairturn.service.concurrency import network_of
from fairturn.service.problems import Problem, ProblemCode

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/login")
def show_login(
    request: Request, visitor: Anybody, next: str = "/", token: str | None = None
) -> Response:
    """Show the form. With the token of the process, as in the URL that the command prints, begin
    a session; the redirect removes the token from the address bar. Access keys are not accepted
    here, because URLs end up in histories and logs."""
    if token is not None and is_token(visitor.service, token):
        return _begin(request, visitor, None, next)
    return _login(request, visitor, next, refused=token is not None)


@router.post("/login")
def log_in(
    request: Request,
    visitor: Anybody,
    key: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "/",
) -> Response:
    refuse_other_origins(request)
    service, shown = visitor.service, key.strip()
    if request.url.scheme != "https" and not is_local(request):
        raise Problem(ProblemCode.HTTPS_NEEDED)
    if is_token(service, shown):
        return _begin(request, visitor, None, next)
    found = service.keys.check(shown)
    if found is None:
        raise_if_limited(service.rates.seconds_refused(network_of(address_of(request))))
        return _login(request, visitor, next, refused=True)
    raise_if_limited(service.rates.seconds_to_login(found.id))
    return _begin(request, visitor, found.id, next)


def _begin(request: Request, visitor: Visitor, key: str | None, next: str) -> Response:
    response = see_other(request, back_to(next))
    response.set_cookie(
        session_cookie(request),
        visitor.page.sessions.begin(key, visitor.service.clock.now()),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/logout")
def log_out(request: Request, visitor: Anybody) -> Response:
    refuse_other_origins(request)
    cookie = session_cookie(request)
    visitor.page.sessions.end(request.cookies.get(cookie, ""))
    response = see_other(request, "/login")
    secure = request.url.scheme == "https"  # without it, browsers keep a cookie with the prefix
    response.delete_cookie(cookie, httponly=True, samesite="strict", secure=secure)
    return response


def _login(request: Request, visitor: Visitor, next: str, *, refused: bool = False) -> Response:
    return render(
        request,
        visitor,
        "login.html",
        status=401 if refused else 200,
        next=back_to(next),
        refused=refused,
        # The browser still sends the token of an expired session or of an earlier process.
        ended=visitor.caller is None and session_cookie(request) in request.cookies,
        takes_token=takes_token(visitor.service),
    )


def back_to(path: str) -> str:
    """Return the path, or "/" if a browser could resolve it to another host."""
    local = path.startswith("/") and not path.startswith(("//", "/\\"))
    return path if local and path.isprintable() and "\\" not in path else "/"
