"""The outermost middleware: limits on heads, bodies and the requests of an address; security
headers, problem documents, access log."""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairturn.clock import Clock, stopwatch
from fairturn.service.concurrency import ConcurrencyLimit, network_of, release
from fairturn.service.logs import AccessLogEntry
from fairturn.service.options import HEAD_BYTES_MAX, ServiceLimits
from fairturn.service.problems import Problem, ProblemCode, answer, problem_of
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


# Before a response with 429, so that a client that ignores Retry-After costs little: answering it
# at once would let each of its connections keep the event loop busy.
THROTTLED_S = 0.25

# Where the next request begins is not certain after these.
_CLOSING = (ProblemCode.HEADERS_TOO_LARGE, ProblemCode.MALFORMED)


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
        self._addresses = ConcurrencyLimit(plan.connections_per_address_max, retry_after_s=5)

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
                if status == HTTPStatus.TOO_MANY_REQUESTS:
                    release(scope)  # others of the same key or address do not wait for this one
                    await asyncio.sleep(THROTTLED_S)
            await send(message)

        limited = receive
        if scope["path"] not in _UPLOADS:
            limited = _limited(receive, self._plan.body_s_max)
        client = scope.get("client")
        try:
            _check_head(scope)
            with self._addresses.take(network_of(client[0]) if client else ""):
                await self._app(scope, limited, send_on)
        except Exception as error:
            if status:
                raise  # the response has begun: only a closed connection shows that it is cut off
            problem = problem_of(error)
            response = answer(problem, Headers(scope=scope).get("accept-language"))
            if problem.code in _CLOSING:
                response.headers["connection"] = "close"
            await response(scope, receive, send_on)
            if problem.code is ProblemCode.INTERNAL:
                raise  # the server logs it
        finally:
            release(scope)
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


def _check_head(scope: Scope) -> None:
    """Check the size of the head and the framing of the body, before anything else reads them.
    Raises `Problem`. Removes quoted cookies: they are never ours, and `http.cookies` takes
    quadratic time for them before Python 3.11.10 and 3.12.6 (CVE-2024-7592)."""
    size_bytes = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    framing = 0
    for place, (name, value) in enumerate(scope["headers"]):
        size_bytes += len(name) + len(value) + 4
        if name in (b"content-length", b"transfer-encoding"):
            framing |= 1 if name == b"content-length" else 2
        elif name == b"cookie" and b'"' in value:
            scope["headers"][place] = (name, _without_quoted(value))
    if size_bytes > HEAD_BYTES_MAX:
        raise Problem(
            ProblemCode.HEADERS_TOO_LARGE,
            f"target and headers have {size_bytes:,} bytes; the limit is {HEAD_BYTES_MAX:,}",
        )
    if framing == 3:
        raise Problem(
            ProblemCode.MALFORMED,
            "the request has both Content-Length and Transfer-Encoding; send only one of them",
        )


def _without_quoted(cookies: bytes) -> bytes:
    return b";".join(each for each in cookies.split(b";") if b'"' not in each)


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
