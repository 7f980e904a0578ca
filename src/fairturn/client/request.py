"""Requests to the service, and the session that sends and retries them. No I/O.

An operation is a generator: it yields steps, and a transport performs each and sends its result
back. `Client` and `AsyncClient` run the same operations with different transports.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Mapping
from random import random
from tempfile import SpooledTemporaryFile
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

from fairturn.client.response import (
    GATEWAY_STATUSES,
    NOT_PROCESSED,
    TEMPORARY,
    Endpoint,
    FailureKind,
    HttpResponse,
    NoResponse,
    check_service,
    parse,
    success,
)
from fairturn.client.values import Identity, identity_of
from fairturn.clock import SECOND_US
from fairturn.errors import ContentDamaged
from fairturn.wire import JSON
from fairturn.worker.backoff import Backoff, delay_us

IN_MEMORY_BYTES = 1_048_576  # of a download; a larger one is written to a temporary file

T = TypeVar("T")


class RetryPolicy(NamedTuple):
    """The attempts per request and the backoff between them; `random` is the source of jitter.

    A longer `Retry-After` of the service replaces the backoff. If it is longer than
    `retry_after_s_max`, the client raises the error at once.
    """

    attempts_max: int = 6
    backoff: Backoff = Backoff(first_s=0.5, factor=2.0, most_s=10.0)
    retry_after_s_max: float = 120.0
    random: Callable[[], float] = random


class Upload(NamedTuple):
    """A request body that is streamed; each call of `chunks` starts from the beginning."""

    chunks: Callable[[], Iterator[bytes]]
    size_bytes: int | None  # None: unknown, the body is sent in chunked encoding
    is_repeatable: bool = True


class Download:
    """A response body in a temporary file, which is verified before the caller reads it."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()

    def begin(self) -> None:
        """Discard the body of an earlier attempt."""
        self.close()
        self._file = cast(BinaryIO, SpooledTemporaryFile(max_size=IN_MEMORY_BYTES))  # noqa: SIM115
        self._digest = hashlib.sha256()

    def write(self, chunk: bytes) -> None:
        assert self._file is not None
        self._file.write(chunk)
        self._digest.update(chunk)

    def verified(self, headers: Mapping[str, str], what: str) -> BinaryIO:
        """Return the file at its start; `ContentDamaged` if its SHA-256 is not the `ETag`."""
        assert self._file is not None
        expected = headers.get("etag", "").removeprefix("W/").strip('"')
        if len(expected) == 64 and expected != self._digest.hexdigest():
            raise ContentDamaged(
                f"the bytes received of {what} have the SHA-256 {self._digest.hexdigest()}, the "
                f"stored ones {expected}: download it again"
            )
        self._file.seek(0)
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class HttpRequest(NamedTuple):
    """Step: send a request; its result is an `HttpResponse` or a `NoResponse`."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = MappingProxyType({})
    body: bytes | Upload | None = None
    download: Download | None = None  # receives the body of a successful response
    is_idempotent: bool = True
    wait_s: float = 0.0  # how long the service may delay its response, on top of `timeout_s`
    messages: Mapping[str, str] = MappingProxyType({})  # error messages by problem code


class Sleep(NamedTuple):
    """Step: sleep."""

    seconds: float


class BlockingCall(NamedTuple):
    """Step: call a function that reads or writes files; the async transport uses a thread."""

    function: Callable[[], Any]


Step = HttpRequest | Sleep | BlockingCall
Operation = Generator[Step, Any, T]


def query_of(**parameters: Any) -> tuple[tuple[str, str], ...]:
    """Query parameters: None is left out, and a tuple becomes one parameter for each item."""
    return tuple(
        (name, str(each))
        for name, value in parameters.items()
        if value is not None
        for each in (value if isinstance(value, tuple) else (value,))
    )


def json_request(method: str, path: str, value: Mapping[str, Any]) -> HttpRequest:
    body = json.dumps(value).encode()
    return HttpRequest(method, path, headers={"Content-Type": JSON}, body=body)


class ServiceSession:
    """Sends requests to one service with one access key, and retries those that may succeed."""

    def __init__(self, endpoint: Endpoint, policy: RetryPolicy) -> None:
        self._endpoint = endpoint
        self._policy = policy
        self._identity: Identity | None = None

    def send(self, request: HttpRequest, read: Callable[[Any], T]) -> Operation[T]:
        """Send a request, and return `read` of the JSON in its response."""
        return parse((yield from self.exchange(request)), read)

    def send_public(self, request: HttpRequest, read: Callable[[Any], T]) -> Operation[T]:
        """`send` for a path that needs no access key."""
        return parse((yield from self._exchange(request)), read)

    def exchange(self, request: HttpRequest) -> Operation[HttpResponse]:
        """Send a request, and return its successful response or raise its error."""
        yield from self.identity()
        return (yield from self._exchange(request))

    def identity(self) -> Operation[Identity]:
        """Return the identity behind the access key. It is fetched before the first request, so
        that a wrong URL, key or version is reported as such by every method."""
        if self._identity is None:
            self._identity = yield from self.fetch_identity()
        return self._identity

    def fetch_identity(self) -> Operation[Identity]:
        """Return the identity with the current numbers of its customer."""
        response = yield from self._exchange(HttpRequest("GET", "/v1/me"))
        check_service(response, self._endpoint)
        return parse(response, identity_of)

    def _exchange(self, request: HttpRequest) -> Operation[HttpResponse]:
        policy, attempt = self._policy, 0
        while True:
            outcome: HttpResponse | NoResponse = yield request
            attempt += 1
            after_s = _retry_after_s(request, outcome)
            if (
                after_s is None
                or after_s > policy.retry_after_s_max
                or attempt >= policy.attempts_max
            ):
                return success(outcome, request.messages, self._endpoint)
            delay = delay_us(policy.backoff, attempt, policy.random, after_s or None)
            yield Sleep(delay / SECOND_US)


def _retry_after_s(request: HttpRequest, outcome: HttpResponse | NoResponse) -> float | None:
    """The shortest delay before the next attempt; None if there must not be one."""
    if isinstance(request.body, Upload) and not request.body.is_repeatable:
        return None
    if isinstance(outcome, NoResponse):
        was_sent = outcome.kind in (FailureKind.TIMEOUT, FailureKind.DISCONNECTED)
        is_safe = outcome.kind is FailureKind.UNREACHABLE or (was_sent and request.is_idempotent)
        return 0.0 if is_safe else None
    if outcome.is_success:
        return None
    code = outcome.problem_code
    is_temporary = code in TEMPORARY or (code is None and outcome.status in GATEWAY_STATUSES)
    if code in NOT_PROCESSED or (is_temporary and request.is_idempotent):
        return outcome.retry_after_s
    return None
