"""Login with an access key, and logout."""

from typing import Annotated

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from fairturn.dashboard.renderer import PageRoute, render, see_other
from fairturn.dashboard.visitors import SESSION_COOKIE, Anybody, Visitor, refuse_other_origins
from fairturn.service.callers import address_of, is_local
from fairturn.service.problems import Problem, ProblemCode

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/login")
def show_login(request: Request, visitor: Anybody, next: str = "/") -> Response:
    return _login(request, visitor, next)


@router.post("/login")
def log_in(
    request: Request,
    visitor: Anybody,
    key: Annotated[str, Form()] = "",
    next: Annotated[str, Form()] = "/",
) -> Response:
    refuse_other_origins(request)
    service, address = visitor.service, address_of(request)
    if request.url.scheme != "https" and not is_local(request):
        raise Problem(ProblemCode.HTTPS_NEEDED)
    shut_out_s = service.rates.seconds_shut_out(address)
    if shut_out_s:
        raise Problem(ProblemCode.RATE_LIMITED, retry_after_s=shut_out_s)
    found = service.keys.check(key.strip())
    if found is None:
        service.rates.refuse(address)
        return _login(request, visitor, next, refused=True)
    response = see_other(request, back_to(next))
    response.set_cookie(
        SESSION_COOKIE,
        visitor.page.sessions.begin(found.id, service.clock.now()),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return response


@router.post("/logout")
def log_out(request: Request, visitor: Anybody) -> Response:
    refuse_other_origins(request)
    visitor.page.sessions.end(request.cookies.get(SESSION_COOKIE, ""))
    response = see_other(request, "/login")
    response.delete_cookie(SESSION_COOKIE, httponly=True, samesite="strict")
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
        ended=visitor.caller is None and SESSION_COOKIE in request.cookies,
    )


def back_to(path: str) -> str:
    """Return the path, or "/" if a browser could resolve it to another host."""
    local = path.startswith("/") and not path.startswith(("//", "/\\"))
    return path if local and path.isprintable() and "\\" not in path else "/"
