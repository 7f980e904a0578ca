"""The two transports: they perform the steps of operations, blocking or on an event loop.

Nothing else in the client uses httpx. Its errors become a `NoResponse`.
"""

import inspect
import os
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import closing
from functools import cached_property, partial, update_wrapper
from importlib.metadata import version
from ipaddress import ip_address
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    NamedTuple,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
    overload,
)
from urllib.parse import urlsplit

from fairturn.access.keys import read_key
from fairturn.client.request import HttpRequest, Operation, Sleep, Step, Upload
from fairturn.client.response import Endpoint, FailureKind, HttpResponse, NoResponse
from fairturn.errors import StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
# Shorter than the keep-alive timeout of the service, so that the client never sends a request on a
# connection that the service is closing.
KEEP_ALIVE_S = 3.0
CHUNK_BYTES = 262_144

P = ParamSpec("P")
T = TypeVar("T")


class ServiceConnection(NamedTuple):
    """The checked parameters of a client."""

    endpoint: Endpoint
    timeout_s: float
    options: dict[str, Any]  # of `httpx.Client` and `httpx.AsyncClient`; contains the access key

    def open(self, http_client: Callable[..., T]) -> T:
        import httpx

        try:
            return http_client(**self.options)
        except (httpx.InvalidURL, ValueError, ImportError) as error:
            raise ValueError(
                f"{self.endpoint.url} or a proxy in the environment cannot be used: {error}"
            ) from error


class SyncTransport:
    """Performs the steps of operations in the calling thread."""

    def __init__(
        self, connection: ServiceConnection, sleep: Callable[[float], object] | None
    ) -> None:
        import httpx

        self._http = connection.open(httpx.Client)
        self._url, self._timeout_s = connection.endpoint.url, connection.timeout_s
        self._sleep = sleep or time.sleep

    def run(self, start: Callable[P, Operation[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the operation that `start` returns."""
        with closing(start(*args, **kwargs)) as operation:
            result: Any = None
            while True:
                try:
                    step = operation.send(result)
                except StopIteration as stop:
                    returned: T = stop.value
                    return returned
                result = self._perform(step)

    def close(self) -> None:
        self._http.close()

    def _perform(self, step: Step) -> Any:
        if isinstance(step, HttpRequest):
            return self._send(step)
        if isinstance(step, Sleep):
            return self._sleep(step.seconds)
        return step.function()

    def _send(self, request: HttpRequest) -> HttpResponse | NoResponse:
        if self._http.is_closed:
            raise StoreUnavailable(f"the client of {self._url} was closed")
        arguments = _arguments(request, self._timeout_s)
        if isinstance(request.body, Upload):
            arguments["content"] = request.body.chunks()
        try:
            with self._http.stream(**arguments) as response:
                if request.download is None or not response.is_success:
                    return _response_of(response, response.read())
                request.download.begin()
                for chunk in response.iter_bytes(CHUNK_BYTES):
                    request.download.write(chunk)
                return _response_of(response, b"")
        except _errors() as error:
            return _failure_of(error)


class AsyncTransport:
    """Performs the steps of operations on an event loop; files are read and written in threads."""

    def __init__(
        self, connection: ServiceConnection, sleep: Callable[[float], Awaitable[object]] | None
    ) -> None:
        import anyio  # a dependency of httpx
        import httpx

        self._http = connection.open(httpx.AsyncClient)
        self._url, self._timeout_s = connection.endpoint.url, connection.timeout_s
        self._sleep = sleep or anyio.sleep
        self._in_thread = anyio.to_thread.run_sync

    async def run(self, start: Callable[P, Operation[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the operation that `start` returns."""
        with closing(start(*args, **kwargs)) as operation:
            result: Any = None
            while True:
                try:
                    step = operation.send(result)
                except StopIteration as stop:
                    returned: T = stop.value
                    return returned
                result = await self._perform(step)

    async def close(self) -> None:
        await self._http.aclose()

    async def _perform(self, step: Step) -> Any:
        if isinstance(step, HttpRequest):
            return await self._send(step)
        if isinstance(step, Sleep):
            return await self._sleep(step.seconds)
        return await self._in_thread(step.function)

    async def _send(self, request: HttpRequest) -> HttpResponse | NoResponse:
        if self._http.is_closed:
            raise StoreUnavailable(f"the client of {self._url} was closed")
        arguments = _arguments(request, self._timeout_s)
        if isinstance(request.body, Upload):
            arguments["content"] = self._chunks(request.body)
        try:
            async with self._http.stream(**arguments) as response:
                if request.download is None or not response.is_success:
                    return _response_of(response, await response.aread())
                request.download.begin()
                async for chunk in response.aiter_bytes(CHUNK_BYTES):
                    await self._in_thread(request.download.write, chunk)
                return _response_of(response, b"")
        except _errors() as error:
            return _failure_of(error)

    async def _chunks(self, upload: Upload) -> AsyncIterator[bytes]:
        chunks = upload.chunks()
        while (chunk := await self._in_thread(next, chunks, None)) is not None:
            yield chunk


class _SyncCaller(Protocol):
    _transport: SyncTransport


class _AsyncCaller(Protocol):
    _transport: AsyncTransport


class client_method(Generic[P, T]):  # noqa: N801  # a decorator, as `property` is
    """Makes a method that is written as an operation a method of a client: one that blocks if the
    client has a `SyncTransport`, and one to await if it has an `AsyncTransport`."""

    def __init__(self, start: Callable[Concatenate[Any, P], Operation[T]]) -> None:
        self._start = start
        update_wrapper(self, start)

    @overload
    def __call__(self, client: _SyncCaller, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def __call__(
        self, client: _AsyncCaller, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]: ...
    def __call__(self, client: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return client._transport.run(self._start, client, *args, **kwargs)

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: _SyncCaller, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: _AsyncCaller, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: object, owner: type) -> Callable[..., Any]:
        return self if client is None else self._bound_to(client)

    def _bound_to(self, client: Any) -> Callable[..., Any]:
        # A partial of `run` is a coroutine function if `run` is one: frameworks check this before
        # they call the method on the event loop or in a thread.
        bound: Any = partial(client._transport.run, self._start, client)
        bound.__name__, bound.__doc__ = self._start.__name__, self._start.__doc__
        bound.__signature__ = self._signature
        return cast(Callable[..., Any], bound)

    @cached_property
    def _signature(self) -> inspect.Signature:
        """The signature without the parameter `self`."""
        signature = inspect.signature(self._start)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


def connection_to(
    url: str, key: str | None, *, ca: str | None, timeout_s: float, allow_http: bool
) -> ServiceConnection:
    """Check the parameters of a client; `ValueError` for a wrong one."""
    httpx = _load_httpx()
    url, key_id = check_url(url), None
    headers = {"User-Agent": f"fairturn/{version('fairturn')}", "Accept": "*/*"}
    if key is not None:
        presented = read_key(key) if isinstance(key, str) else None
        if presented is None:
            raise ValueError(
                "the access key does not have the form ft_ID_SECRET that `fairturn keys make` "
                "prints; check that it is complete"
            )
        if not allow_http and not url.startswith("https:") and not _is_local(url):
            raise ValueError(
                f"an access key must not be sent unencrypted to {url}: use an https:// url, or "
                "pass allow_http=True if something else encrypts the connection"
            )
        key_id = presented.id
        headers["Authorization"] = f"Bearer {key}"
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"timeout_s is {timeout_s}; it must be a number of seconds above 0")
    options = {
        "base_url": url,
        "headers": headers,
        "verify": _certificates(url, ca),
        "trust_env": not _is_local(url),  # a proxy of the environment is not for localhost
        "limits": httpx.Limits(max_connections=100, keepalive_expiry=KEEP_ALIVE_S),
        "follow_redirects": False,  # the access key is for this service only
    }
    return ServiceConnection(Endpoint(url, key_id), timeout_s, options)


def check_url(url: str) -> str:
    """Return the URL of a service without a trailing slash; `ValueError` for any other text."""
    if not isinstance(url, str):
        raise TypeError(f"url must be a text, not {type(url).__name__}")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"url is {url!r}, which is not a valid url: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise ValueError("the url contains a user name or password; pass the access key instead")
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"url is {url!r}; it must have the form http://localhost:8750")
    if parts.query or parts.fragment:
        raise ValueError(f"url is {url!r}; it must not contain ? or #")
    return url.rstrip("/")


def random_id() -> str:
    return secrets.token_hex(16)


def _load_httpx() -> Any:
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise StoreRefused(
            f"a client needs the package {error.name}; install it with: "
            "pip install 'fairturn[client]'"
        ) from error
    return httpx


def _is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _certificates(url: str, ca: str | None) -> ssl.SSLContext | bool:
    if ca is None and url.startswith("http:"):
        # Not used; loading the system's certificates would take longer than a request.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    file = ca or (os.environ.get("SSL_CERT_FILE") if _is_local(url) else None)
    if file is None:
        return True
    try:
        return ssl.create_default_context(cafile=file)
    except ssl.SSLError as error:
        raise ValueError(f"{file} has no certificates in PEM format: {error}") from None


def _arguments(request: HttpRequest, timeout_s: float) -> dict[str, Any]:
    """The arguments of `httpx.Client.stream`."""
    import httpx

    headers, body = dict(request.headers), request.body
    if isinstance(body, Upload) and body.size_bytes is not None:
        headers["Content-Length"] = str(body.size_bytes)
    return {
        "method": request.method,
        "url": request.path,
        "params": list(request.query) or None,
        "headers": headers,
        "content": body,
        "timeout": httpx.Timeout(
            timeout_s, connect=min(CONNECT_S, timeout_s), read=timeout_s + request.wait_s, pool=None
        ),
    }


def _response_of(response: "httpx.Response", body: bytes) -> HttpResponse:
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpResponse(response.status_code, headers, body)


def _errors() -> tuple[type[Exception], ...]:
    import httpx

    return httpx.RequestError, ssl.SSLError  # anyio passes on some TLS errors as they are


def _failure_of(error: Exception) -> NoResponse:
    import httpx

    causes = list(_causes(error))
    detail = next((str(cause) for cause in reversed(causes) if str(cause)), type(error).__name__)
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return NoResponse(FailureKind.TLS, detail)
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return NoResponse(FailureKind.UNKNOWN_HOST, detail)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        return NoResponse(FailureKind.UNREACHABLE, detail)
    if isinstance(error, httpx.TimeoutException):
        return NoResponse(FailureKind.TIMEOUT, detail)
    return NoResponse(FailureKind.DISCONNECTED, detail)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
