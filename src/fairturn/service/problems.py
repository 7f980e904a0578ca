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
    ExpiryPassed,
    FairturnError,
    KeyReused,
    KindRefused,
    NotFound,
    QueueFull,
    QuotaExceeded,
    Refused,
    StoreFull,
    StoreUnavailable,
    WrongState,
)
from fairturn.service.languages import language, preferred_of
from fairturn.wire import PROBLEM

TRY_AGAIN_S = 5
_ERRORS_MAX = 20


class ProblemCode(StrEnum):
    """The code, status and sentence of each problem. Codes are never renamed; every catalogue has a
    translation of each sentence."""

    MALFORMED = "malformed", 400, "The request cannot be read."
    CUT_OFF = "cut_off", 400, "The body of the request ended too early."
    KEY_MISSING = "key_missing", 401, "This needs an access key."
    KEY_UNKNOWN = "key_unknown", 401, "The access key is not known, or it has ended."
    NOT_ALLOWED = "not_allowed", 403, "The access key is not meant for this."
    HTTPS_NEEDED = "https_needed", 403, "An access key must not travel unencrypted. Use https."
    ORIGIN_UNKNOWN = "origin_unknown", 403, "The request comes from a place that is not trusted."
    NOT_FOUND = "not_found", 404, "There is nothing here."
    METHOD_NOT_ALLOWED = "method_not_allowed", 405, "This cannot be done at this address."
    TOO_SLOW = "too_slow", 408, "The body of the request came too slowly."
    WRONG_STATE = "wrong_state", 409, "That is not possible in the present state."
    TOO_LARGE = "too_large", 413, "The body of the request is too large."
    HEADERS_TOO_LARGE = "headers_too_large", 431, "The headers of the request are too large."
    MEDIA_TYPE_UNKNOWN = "media_type_unknown", 415, "A body of this type is not accepted here."
    INVALID = "invalid", 422, "Something in the request is not as it must be."
    KEY_REUSED = "key_reused", 422, "The idempotency key belongs to another document."
    KIND_REFUSED = "kind_refused", 422, "The queue does not accept this kind of work."
    EXPIRY_PASSED = "expiry_passed", 422, "The document would have expired already."
    PARENT_UNKNOWN = "parent_unknown", 422, "The document that it was made from does not exist."
    CHECKSUM_WRONG = "checksum_wrong", 422, "The content differs from its checksum."
    RATE_LIMITED = "rate_limited", 429, "Too many requests. Try again later."
    TOO_MANY_AT_ONCE = (
        "too_many_at_once",
        429,
        "Too many of these requests at once. Try again later.",
    )
    QUEUE_FULL = "queue_full", 429, "Too many documents are waiting. Submit again later."
    QUOTA_EXCEEDED = "quota_exceeded", 413, "The documents of the customer take too much space."
    STORAGE_FULL = "storage_full", 507, "There is no storage space left. Try again later."
    UNAVAILABLE = "unavailable", 503, "The service cannot answer now. Try again later."
    CONTENT_DAMAGED = "content_damaged", 500, "The stored content is damaged."
    INTERNAL = "internal", 500, "Something went wrong in the service."

    status: int
    sentence: str

    def __new__(cls, value: str, status: int, sentence: str) -> "ProblemCode":
        code = str.__new__(cls, value)
        code._value_, code.status, code.sentence = value, status, sentence
        return code


_OF_STATUS = {
    400: ProblemCode.MALFORMED,
    404: ProblemCode.NOT_FOUND,
    405: ProblemCode.METHOD_NOT_ALLOWED,
    408: ProblemCode.TOO_SLOW,
    413: ProblemCode.TOO_LARGE,
    415: ProblemCode.MEDIA_TYPE_UNKNOWN,
}


class Problem(Exception):
    """Ends a request with a problem document. `more` has the extension members of some codes."""

    def __init__(
        self,
        code: ProblemCode,
        detail: str | None = None,
        *,
        retry_after_s: int | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail or code.value)
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.more = more or {}


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
        more = {name: getattr(error, name) for name in ("limit", "maximum", "waiting", "customer")}
        return Problem(ProblemCode.QUEUE_FULL, detail, retry_after_s=TRY_AGAIN_S, more=more)
    if isinstance(error, QuotaExceeded):
        detail = (
            f"the stored documents of this customer have {error.stored_bytes:,} bytes, and may "
            f"have {error.bytes_max:,}; submit again when ended documents have been pruned, or ask "
            "the operator for more"
        )
        more = {
            "customer": error.customer,
            "stored_bytes": error.stored_bytes,
            "maximum": error.bytes_max,
        }
        return Problem(ProblemCode.QUOTA_EXCEEDED, detail, more=more)
    if isinstance(error, KindRefused):
        return Problem(ProblemCode.KIND_REFUSED, detail)
    if isinstance(error, ExpiryPassed):
        return Problem(ProblemCode.EXPIRY_PASSED, detail)
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
    shown = [
        {"where": ".".join(map(str, (*where, *each["loc"]))), "what": str(each["msg"])}
        for each in errors[:_ERRORS_MAX]
    ]
    return Problem(ProblemCode.INVALID, more={"errors": shown})


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


def answer(problem: Problem, accept_language: str | None) -> JSONResponse:
    """Return the response for a problem."""
    name = preferred_of(accept_language)
    code = problem.code
    content: dict[str, Any] = {
        "type": f"urn:fairturn:problem:{code}",
        "code": code.value,
        "status": code.status,
        "title": language(name).find(code.sentence),
    }
    if problem.detail is not None:
        content["detail"] = problem.detail
    content.update(problem.more)
    headers = {"Content-Language": name, "Vary": "Accept-Language", "Cache-Control": "no-store"}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    if code.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="fairturn"'
    return JSONResponse(content, code.status, headers, media_type=PROBLEM)


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
