"""The outermost middleware: limits on bodies, security headers, problem documents, access log."""

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairturn.clock import Clock, stopwatch
from fairturn.service.logs import AccessLogEntry
from fairturn.service.options import ServiceLimits
from fairturn.service.problems import ProblemCode, answer, problem_of
from fairturn.wire import JSON_BYTES_MAX

# These routes accept larger bodies and enforce their own limits.
_UPLOADS = ("/v1/documents", "/v1/documents/batch", "/mine")
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
# Only over TLS: browsers then refuse plain HTTP to this host for a year.
_HTTPS_HEADERS = {**_HEADERS, "strict-transport-security": "max-age=31536000"}


class Guard:
    def __init__(
        self,
        app: ASGIApp,
        *,
        plan: ServiceLimits,
        on_served: Callable[[AccessLogEntry], None] | None,
        clock: Clock,
    ) -> None:
        self._app = app
        self._plan = plan
        self._on_served = on_served
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = stopwatch()
        status = 0
        added = _HTTPS_HEADERS if scope["scheme"] == "https" else _HEADERS

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in added.items():
                    headers.setdefault(name, value)
            await send(message)

        limited = receive
        if scope["path"] not in _UPLOADS:
            limited = _limited(receive, self._plan.body_s_max)
        try:
            await self._app(scope, limited, send_on)
        except Exception as error:
            if status:
                raise  # the response has begun: only a closed connection shows that it is cut off
            problem = problem_of(error)
            response = answer(problem, Headers(scope=scope).get("accept-language"))
            await response(scope, receive, send_on)
            if problem.code is ProblemCode.INTERNAL:
                raise  # the server logs it
        finally:
            if self._on_served is not None:
                self._on_served(self._served(scope, status, stopwatch() - begun))

    def _served(self, scope: Scope, status: int, seconds: float) -> AccessLogEntry:
        # A plain Starlette route is not in the scope and has no path parameters. Unmatched paths
        # are logged as "", so that clients cannot add arbitrary names to the log.
        unnamed: str = scope["path"] if "endpoint" in scope else ""
        route = str(getattr(scope.get("route"), "path", unnamed))
        client = scope.get("client")
        return AccessLogEntry(
            at=self._clock.now(),
            method=scope["method"],
            route=route,
            status=status,
            seconds=seconds,
            address=client[0] if client else "",
            key=scope.get("state", {}).get("key"),
        )


def _limited(receive: Receive, body_s_max: float) -> Receive:
    """Wrap `receive` with a size limit and a timeout. It raises `HTTPException`, which Starlette
    does not convert while it reads a body."""
    size_bytes = 0
    complete = False
    until: float | None = None

    async def receive_on() -> Message:
        nonlocal size_bytes, complete, until
        if complete:
            return await receive()  # returns the disconnect, without a timeout
        if until is None:
            until = stopwatch() + body_s_max
        try:
            async with asyncio.timeout(until - stopwatch()):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408) from None
        complete = not message.get("more_body", False)
        size_bytes += len(message.get("body", b""))
        if size_bytes > JSON_BYTES_MAX:
            raise HTTPException(413)
        return message

    return receive_on
