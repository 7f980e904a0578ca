"""Errors as problem documents (RFC 9457) with stable codes.

`title` is a sentence in the caller's language. `detail` has the values, in English; it never
contains anything about other customers' documents.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from fairturn.errors import (
    ContentDamaged,
    FairturnError,
    KeyReused,
    NotFound,
    QueueFull,
    QuotaExceeded,
    Refused,
    StoreFull,
    StoreUnavailable,
    WrongState,
)
from fairturn.explain.sentences import Message
from fairturn.service.languages import language, preferred_of
from fairturn.wire import PROBLEM

TRY_AGAIN_S = 5
_ERRORS_MAX = 20


class ProblemCode(StrEnum):
    """Stable: codes are never renamed."""

    MALFORMED = "malformed"
    CUT_OFF = "cut_off"
    KEY_MISSING = "key_missing"
    KEY_UNKNOWN = "key_unknown"
    NOT_ALLOWED = "not_allowed"
    HTTPS_NEEDED = "https_needed"
    ORIGIN_UNKNOWN = "origin_unknown"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_SLOW = "too_slow"
    WRONG_STATE = "wrong_state"
    TOO_LARGE = "too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    MEDIA_TYPE_UNKNOWN = "media_type_unknown"
    INVALID = "invalid"
    KEY_REUSED = "key_reused"
    PARENT_UNKNOWN = "parent_unknown"
    CHECKSUM_WRONG = "checksum_wrong"
    RATE_LIMITED = "rate_limited"
    TOO_MANY_AT_ONCE = "too_many_at_once"
    QUEUE_FULL = "queue_full"
    QUOTA_EXCEEDED = "quota_exceeded"
    STORAGE_FULL = "storage_full"
    UNAVAILABLE = "unavailable"
    CONTENT_DAMAGED = "content_damaged"
    INTERNAL = "internal"


STATUS: Mapping[ProblemCode, int] = {
    ProblemCode.MALFORMED: 400,
    ProblemCode.CUT_OFF: 400,
    ProblemCode.KEY_MISSING: 401,
    ProblemCode.KEY_UNKNOWN: 401,
    ProblemCode.NOT_ALLOWED: 403,
    ProblemCode.HTTPS_NEEDED: 403,
    ProblemCode.ORIGIN_UNKNOWN: 403,
    ProblemCode.NOT_FOUND: 404,
    ProblemCode.METHOD_NOT_ALLOWED: 405,
    ProblemCode.TOO_SLOW: 408,
    ProblemCode.WRONG_STATE: 409,
    ProblemCode.TOO_LARGE: 413,
    ProblemCode.HEADERS_TOO_LARGE: 431,
    ProblemCode.MEDIA_TYPE_UNKNOWN: 415,
    ProblemCode.INVALID: 422,
    ProblemCode.KEY_REUSED: 422,
    ProblemCode.PARENT_UNKNOWN: 422,
    ProblemCode.CHECKSUM_WRONG: 422,
    ProblemCode.RATE_LIMITED: 429,
    ProblemCode.TOO_MANY_AT_ONCE: 429,
    ProblemCode.QUEUE_FULL: 429,
    ProblemCode.QUOTA_EXCEEDED: 413,
    ProblemCode.STORAGE_FULL: 507,
    ProblemCode.UNAVAILABLE: 503,
    ProblemCode.CONTENT_DAMAGED: 500,
    ProblemCode.INTERNAL: 500,
}

# Every catalogue has a translation of each.
MESSAGES: Mapping[str, Message] = {
    "malformed": Message("The request cannot be read."),
    "cut_off": Message("The body of the request ended too early."),
    "key_missing": Message("This needs an access key."),
    "key_unknown": Message("The access key is not known, or it has ended."),
    "not_allowed": Message("The access key is not meant for this."),
    "https_needed": Message("An access key must not travel unencrypted. Use https."),
    "origin_unknown": Message("The request comes from a place that is not trusted."),
    "not_found": Message("There is nothing here."),
    "method_not_allowed": Message("This cannot be done at this address."),
    "too_slow": Message("The body of the request came too slowly."),
    "wrong_state": Message("That is not possible in the present state."),
    "too_large": Message("The body of the request is too large."),
    "headers_too_large": Message("The headers of the request are too large."),
    "media_type_unknown": Message("A body of this type is not accepted here."),
    "invalid": Message("Something in the request is not as it must be."),
    "key_reused": Message("The idempotency key belongs to another document."),
    "parent_unknown": Message("The document that it was made from does not exist."),
    "checksum_wrong": Message("The content differs from its checksum."),
    "rate_limited": Message("Too many requests. Try again later."),
    "too_many_at_once": Message("Too many of these requests at once. Try again later."),
    "queue_full": Message("Too many documents are waiting. Submit again later."),
    "quota_exceeded": Message("The documents of the customer take too much space."),
    "storage_full": Message("There is no storage space left. Try again later."),
    "unavailable": Message("The service cannot answer now. Try again later."),
    "content_damaged": Message("The stored content is damaged."),
    "internal": Message("Something went wrong in the service."),
}

_OF_STATUS = {
    400: ProblemCode.MALFORMED,
    404: ProblemCode.NOT_FOUND,
    405: ProblemCode.METHOD_NOT_ALLOWED,
    408: ProblemCode.TOO_SLOW,
    413: ProblemCode.TOO_LARGE,
    415: ProblemCode.MEDIA_TYPE_UNKNOWN,
}


class Problem(Exception):
    """Ends a request with a problem document."""

    def __init__(
        self, code: ProblemCode, detail: str | None = None, *, retry_after_s: int | None = None
    ) -> None:
        super().__init__(detail or code.value)
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.errors: list[dict[str, str]] = []
        self.more: dict[str, str | int | None] = {}  # extension members of some codes


def problem_of(error: Exception) -> Problem:
    """Convert an exception to a problem; an unexpected one to `INTERNAL`."""
    if isinstance(error, Problem):
        return error
    detail = str(error)
    if isinstance(error, NotFound):
        # Without the id, so that another customer's document looks like a missing one.
        return Problem(ProblemCode.NOT_FOUND)
    if isinstance(error, WrongState):
        return Problem(ProblemCode.WRONG_STATE, detail)
    if isinstance(error, KeyReused):
        return Problem(ProblemCode.KEY_REUSED)
    if isinstance(error, QueueFull):
        scope = "" if error.customer is None else " of this customer"
        detail = f"{error.waiting:,} documents{scope} are waiting; the limit is {error.maximum:,}"
        problem = Problem(ProblemCode.QUEUE_FULL, detail, retry_after_s=TRY_AGAIN_S)
        problem.more = {
            name: getattr(error, name) for name in ("limit", "maximum", "waiting", "customer")
        }
        return problem
    if isinstance(error, QuotaExceeded):
        detail = (
            f"the stored documents of this customer have {error.stored_bytes:,} bytes, and may "
            f"have {error.bytes_max:,}; submit again when ended documents have been pruned, or ask "
            "the operator for more"
        )
        problem = Problem(ProblemCode.QUOTA_EXCEEDED, detail)
        problem.more = {
            "customer": error.customer,
            "stored_bytes": error.stored_bytes,
            "maximum": error.bytes_max,
        }
        return problem
    if isinstance(error, Refused):
        return Problem(ProblemCode.INVALID, detail)
    if isinstance(error, StoreFull):
        return Problem(ProblemCode.STORAGE_FULL, retry_after_s=60)
    if isinstance(error, StoreUnavailable):
        return Problem(ProblemCode.UNAVAILABLE, retry_after_s=TRY_AGAIN_S)
    if isinstance(error, ContentDamaged):
        return Problem(ProblemCode.CONTENT_DAMAGED)
    return Problem(ProblemCode.INTERNAL)


def invalid(errors: Sequence[Any], *where: str) -> Problem:
    """Convert the errors of pydantic, with the location of each."""
    problem = Problem(ProblemCode.INVALID)
    problem.errors = [
        {"where": ".".join(map(str, (*where, *each["loc"]))), "what": str(each["msg"])}
        for each in errors[:_ERRORS_MAX]
    ]
    return problem


@contextmanager
def refusing_misuse() -> Iterator[None]:
    """Convert `ValueError` and `TypeError` to `INVALID`. Use it only around calls of the queue:
    from other code these are bugs, and must end in a 500."""
    try:
        yield
    except ValidationError:
        raise
    except (ValueError, TypeError) as error:
        raise Problem(ProblemCode.INVALID, str(error)) from error


@contextmanager
def refusing_parents() -> Iterator[None]:
    """Convert `NotFound` of a submission, which can only mean its parent."""
    try:
        yield
    except NotFound as error:
        raise Problem(ProblemCode.PARENT_UNKNOWN) from error


def answer(problem: Problem, accept_language: str | None) -> JSONResponse:
    """Return the response for a problem."""
    name = preferred_of(accept_language)
    code = problem.code
    content: dict[str, Any] = {
        "type": f"urn:fairturn:problem:{code}",
        "code": code.value,
        "status": STATUS[code],
        "title": language(name).find(MESSAGES[code].one),
    }
    if problem.detail is not None:
        content["detail"] = problem.detail
    if problem.errors:
        content["errors"] = problem.errors
    content.update(problem.more)
    headers = {"Content-Language": name, "Vary": "Accept-Language", "Cache-Control": "no-store"}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    if STATUS[code] == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="fairturn"'
    return JSONResponse(content, STATUS[code], headers, media_type=PROBLEM)


def install(app: FastAPI) -> None:
    """Add the exception handlers to an application."""

    async def of_ours(request: Request, error: Exception) -> JSONResponse:
        problem = problem_of(error)
        if problem.code is ProblemCode.INTERNAL:
            raise error  # `Guard` responds, and the server logs it
        return _respond(request, problem)

    async def of_validation(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        found = error.errors()
        if any(each["type"] == "json_invalid" for each in found):
            return _respond(request, Problem(ProblemCode.MALFORMED, "the body is not JSON"))
        return _respond(request, invalid(found))

    async def of_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        response = _respond(
            request, Problem(_OF_STATUS.get(error.status_code, ProblemCode.INVALID))
        )
        response.headers.update(error.headers or {})
        return response

    for kind in (Problem, FairturnError):
        app.add_exception_handler(kind, of_ours)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_http)


def _respond(request: Request, problem: Problem) -> JSONResponse:
    return answer(problem, request.headers.get("accept-language"))
