"""Around every request: limits on its body, headers that protect browsers, a problem instead of a
traceback, and word of what was served."""

import asyncio
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairturn.clock import Clock, stopwatch
from fairturn.service.logs import Served
from fairturn.service.options import Plan
from fairturn.service.problems import Code, answer, problem_of
from fairturn.wire import JSON_BYTES_MAX

# These take larger bodies, and count the bytes themselves.
_UPLOADS = ("/v1/documents", "/v1/documents/batch", "/mine")
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


class Guard:
    """The outermost layer of the application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        plan: Plan,
        on_served: Callable[[Served], None] | None,
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

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        limited = receive
        if scope["path"] not in _UPLOADS:
            limited = _limited(receive, self._plan.body_s_max)
        try:
            await self._app(scope, limited, send_on)
        except Exception as error:
            if status:
                raise  # the answer has begun: a connection that is cut says that it is not whole
            problem = problem_of(error)
            response = answer(problem, Headers(scope=scope).get("accept-language"))
            await response(scope, receive, send_on)
            if problem.code is Code.INTERNAL:
                raise  # for the log of the server
        finally:
            if self._on_served is not None:
                self._on_served(self._served(scope, status, stopwatch() - begun))

    def _served(self, scope: Scope, status: int, seconds: float) -> Served:
        # A plain route is not named, and has no parameters in its path; what no route took is not
        # worth a name of its own.
        unnamed: str = scope["path"] if "endpoint" in scope else ""
        route = str(getattr(scope.get("route"), "path", unnamed))
        client = scope.get("client")
        return Served(
            at=self._clock.now(),
            method=scope["method"],
            route=route,
            status=status,
            seconds=seconds,
            address=client[0] if client else "",
            key=scope.get("state", {}).get("key"),
        )


def _limited(receive: Receive, body_s_max: float) -> Receive:
    """The same, as long as a body is neither too large nor too slow. Starlette passes on this kind
    of error from inside the reading of a body."""
    size_bytes = 0
    complete = False
    until: float | None = None

    async def receive_on() -> Message:
        nonlocal size_bytes, complete, until
        if complete:
            return await receive()  # which tells when the other side goes away
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
