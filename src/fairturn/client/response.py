"""Responses of the service, and the error of `fairturn.errors` for each that is not a success.

No message contains an access key, only its id.
"""

import json
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from fairturn.errors import (
    ContentDamaged,
    ExpiryPassed,
    FairturnError,
    KeyReused,
    KindRefused,
    NotAllowed,
    NotFound,
    QueueFull,
    QuotaExceeded,
    Refused,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    WrongState,
)
from fairturn.wire import PROBLEM

T = TypeVar("T")

VERSION_MIN = (0, 1)
# Problem codes of a request that the service has certainly not processed.
NOT_PROCESSED = frozenset({"rate_limited", "too_many_at_once"})
# Problem codes of temporary failures; the service may have processed the request.
TEMPORARY = frozenset({"unavailable", "too_slow", "cut_off"})
GATEWAY_STATUSES = frozenset({502, 503, 504})
_DETAIL_CHARACTERS_MAX = 200


class FailureKind(Enum):
    """Why a request got no response: the error for it and the error's message."""

    UNKNOWN_HOST = (
        StoreUnavailable,
        "the host name in {url} does not resolve ({detail}): check the url",
    )
    UNREACHABLE = (  # no connection; nothing was sent
        StoreUnavailable,
        "no service responds at {url} ({detail}): start it with `fairturn serve`, or check the url",
    )
    TLS = (
        StoreRefused,
        "the TLS connection to {url} failed ({detail}): for a certificate of a private authority, "
        "pass the authority's file as ca= or in SSL_CERT_FILE; for a service without TLS, use an "
        "http:// url",
    )
    TIMEOUT = (
        StoreUnavailable,
        "the service at {url} did not respond in time ({detail}): try again, or raise timeout_s",
    )
    DISCONNECTED = (
        StoreUnavailable,
        "the connection to {url} was closed before the response was complete ({detail}): try "
        "again; if it never succeeds, check that this is a fairturn service and whether it needs "
        "https://",
    )


class NoResponse(NamedTuple):
    """A request that got no response."""

    kind: FailureKind
    detail: str


class HttpResponse(NamedTuple):
    """A response, of the service or of a proxy. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def problem(self) -> Mapping[str, Any]:
        """The problem document (RFC 9457); empty if the response has none."""
        media_type = self.headers.get("content-type", "").partition(";")[0].strip()
        return _json_object(self.body) if media_type == PROBLEM else {}

    @property
    def problem_code(self) -> str | None:
        code = self.problem.get("code")
        return code if isinstance(code, str) else None

    @property
    def retry_after_s(self) -> float:
        """`Retry-After` in seconds; 0 if it is missing or a date, which the service never sends."""
        text = self.headers.get("retry-after", "")
        return float(text) if text.isdecimal() and len(text) < 10 else 0.0


class Endpoint(NamedTuple):
    """The URL of a service and the id of the access key, for error messages."""

    url: str
    key_id: str | None


def parse(response: HttpResponse, read: Callable[[Any], T]) -> T:
    """Return `read` of the JSON value in a response; `StoreRefused` if it has another form."""
    try:
        return read(json.loads(response.body))
    except (ValueError, TypeError, LookupError) as error:
        raise StoreRefused(
            f"the service returned an unexpected response ({type(error).__name__}: {error}): a "
            "proxy may have changed it, or client and service are of incompatible versions"
        ) from error


def check_service(response: HttpResponse, endpoint: Endpoint) -> None:
    """Raise `StoreRefused` unless this response to `/v1/me` is of a service of a known version."""
    identity = _json_object(response.body)
    if "role" not in identity:
        raise _foreign_error(response, endpoint)
    version = str(identity.get("version", ""))
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])
    if not version or numbers < VERSION_MIN:
        least = ".".join(map(str, VERSION_MIN))
        raise StoreRefused(
            f"the service at {endpoint.url} runs fairturn {version or 'of an unknown version'}; "
            f"this client needs {least} or newer: upgrade the service"
        )


def success(
    outcome: HttpResponse | NoResponse, messages: Mapping[str, str], endpoint: Endpoint
) -> HttpResponse:
    """Return the response if it is a success; otherwise raise its error.

    `messages` has the message for a problem code where the caller has a better one.
    """
    if isinstance(outcome, NoResponse):
        error, message = outcome.kind.value
        detail = outcome.detail[:_DETAIL_CHARACTERS_MAX]
        raise error(message.format(url=endpoint.url, detail=detail))
    if not outcome.is_success:
        raise _problem_error(outcome, messages, endpoint)
    return outcome


_ERRORS: Mapping[str, type[FairturnError]] = {
    "not_found": NotFound,
    "parent_unknown": NotFound,
    "wrong_state": WrongState,
    "key_reused": KeyReused,
    "kind_refused": KindRefused,
    "expiry_passed": ExpiryPassed,
    "too_large": Refused,
    "checksum_wrong": Refused,
    "storage_full": StoreFull,
    "content_damaged": ContentDamaged,
}

_NOT_ALLOWED = {
    "key_missing": "the service at {url} requires an access key: pass it as Client(url, key) or in "
    "FAIRTURN_KEY; `fairturn keys make` on the service's machine creates one, and until then the "
    "token that the service printed when it started is accepted",
    "key_unknown": "{key} is unknown at {url}, expired or revoked: ask its operator for a new one",
    "not_allowed": "the role of {key} does not permit this at {url}: use a key of another role",
    "https_needed": "the service at {url} accepts access keys from other machines only over TLS: "
    "use an https:// url",
    "origin_unknown": "the service at {url} accepts its token only from its own machine, as "
    "localhost or 127.0.0.1: use that url, or a key",
}


def _problem_error(
    response: HttpResponse, messages: Mapping[str, str], endpoint: Endpoint
) -> Exception:
    problem, code = response.problem, response.problem_code
    if code is None:
        return _foreign_error(response, endpoint)
    message = messages.get(code) or _message_in(problem)
    if code in ("invalid", "malformed"):
        return ValueError(message)
    if code == "queue_full":
        return _queue_full(problem, message)
    if code == "quota_exceeded":
        return _quota_exceeded(problem, message)
    if code in _NOT_ALLOWED:
        key = "the access key" if endpoint.key_id is None else f"access key ft_{endpoint.key_id}_…"
        return NotAllowed(_NOT_ALLOWED[code].format(key=key, url=endpoint.url))
    if code in NOT_PROCESSED | TEMPORARY:
        return StoreUnavailable(f"the service at {endpoint.url} reports: {message}")
    return _ERRORS.get(code, StoreError)(message)


def _message_in(problem: Mapping[str, Any]) -> str:
    detail, errors = problem.get("detail"), problem.get("errors")
    if isinstance(detail, str) and detail:
        return detail
    if isinstance(errors, list) and errors and all(isinstance(each, dict) for each in errors):
        return "; ".join(f"{each.get('where')}: {each.get('what')}" for each in errors)
    return str(problem.get("title") or problem["code"])


def _queue_full(problem: Mapping[str, Any], message: str) -> FairturnError:
    limit, maximum, waiting = (problem.get(name) for name in ("limit", "maximum", "waiting"))
    if not isinstance(limit, str) or not isinstance(maximum, int) or not isinstance(waiting, int):
        return Refused(message)
    return QueueFull(
        limit=limit, maximum=maximum, waiting=waiting, customer=problem.get("customer")
    )


def _quota_exceeded(problem: Mapping[str, Any], message: str) -> FairturnError:
    customer, stored, maximum = (problem.get(n) for n in ("customer", "stored_bytes", "maximum"))
    if not (isinstance(customer, str) and isinstance(stored, int) and isinstance(maximum, int)):
        return Refused(message)
    return QuotaExceeded(customer=customer, stored_bytes=stored, bytes_max=maximum)


def _foreign_error(response: HttpResponse, endpoint: Endpoint) -> FairturnError:
    """The error for a response that is not of a fairturn service."""
    url, status = endpoint.url, response.status
    if 300 <= status < 400:
        location = response.headers.get("location", "another url")[:_DETAIL_CHARACTERS_MAX]
        return StoreRefused(
            f"{url} redirects to {location}: use the url of the service itself; the client does "
            "not send an access key to another url"
        )
    media_type = response.headers.get("content-type", "no content type").partition(";")[0]
    received = f"status {status}, {media_type}"
    if status == 413:
        return Refused(
            f"a proxy before the service at {url} rejects a body of this size ({received}): send "
            "less, or raise the limit of the proxy"
        )
    if status in GATEWAY_STATUSES:
        return StoreUnavailable(
            f"a proxy before the service at {url} cannot reach it ({received}): try again later, "
            "or check that the service runs"
        )
    return StoreRefused(f"{url} is not a fairturn service ({received}): check the url")


def _json_object(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
