"""How a handler ends an attempt: the values that it returns, the exceptions that it raises, and the
`Answer` that a child sends for them.

A child imports this module, so it imports little; limits of `model` are repeated.
"""

import json
import os
from math import isnan
from typing import NamedTuple

from fairturn.validation import text
from fairturn.worker.tracebacks import message_of

RESULT_BYTES_MAX = 16 * 1_048_576
STEP_VALUE_BYTES_MAX = 1_048_576
CHECKPOINT_BYTES_MAX = 65_536
SERVICE_BYTES_MAX = 64
COST_MAX = 1_000_000.0
SNOOZE_S_MAX = 366 * 86_400.0

_FAILED = "the handler failed"
# The types of an `Answer`: how the attempt ended.
DONE, NEXT = "done", "next"
RETRY, GIVE_UP, LATER, UNAVAILABLE = "retry", "give_up", "later", "unavailable"


class Answer(NamedTuple):
    """How an attempt ended."""

    type: str
    text: str | None = None  # DONE, NEXT: the value, in JSON; otherwise the error
    path: str | None = None  # DONE, NEXT: of the result file
    after_s: float | None = None  # RETRY: the least delay; LATER: the delay; UNAVAILABLE: a probe
    target: str | None = None  # NEXT: the kind of work; UNAVAILABLE: the service
    cost: float | None = None  # NEXT


class ResultFile:
    """Returned by a handler: completes with a JSON value and a file, which is copied."""

    __slots__ = ("path", "value")

    def __init__(self, path: str | os.PathLike[str], value: object = None) -> None:
        self.path = os.fspath(path)
        self.value = value


class Next:
    """Returned by a handler: ends the step. The same document waits for another kind of work, whose
    handler gets the value as `previous` and the file, which is copied, as `previous_file`.

    `cost` replaces the cost of the document.
    """

    __slots__ = ("cost", "file", "kind", "value")

    def __init__(
        self,
        kind: str,
        value: object = None,
        file: str | os.PathLike[str] | None = None,
        cost: float | None = None,
    ) -> None:
        self.kind = text.kind_name(kind)
        self.value = value
        self.file = None if file is None else os.fspath(file)
        self.cost = None if cost is None else check_number("cost", cost, COST_MAX)


class Retry(Exception):
    """Raised by a handler: fails the attempt and retries the document, after the worker's backoff
    and at least `after_s`."""

    after_s: float | None = None  # for subclasses that do not call `__init__`

    def __init__(self, message: str = "", *, after_s: float | None = None) -> None:
        super().__init__(message)
        self.after_s = after_s


class GiveUp(Exception):
    """Raised by a handler: fails the document permanently; it is dead and not retried."""


class Later(Exception):
    """Raised or returned by a handler: postpones the document by `after_s` seconds. The attempt
    does not count."""

    after_s: float | None = None  # for subclasses that do not call `__init__`

    def __init__(self, after_s: float) -> None:
        super().__init__(after_s)
        self.after_s = check_number("after_s", after_s, SNOOZE_S_MAX)


class Unavailable(Exception):
    """Raised by a handler: a service that it needs does not answer. The attempt does not count, and
    after reports of two documents no worker claims documents that need the service, except for a
    probe every `retry_after_s`, at first 5 s.

    `service` is one of the names in `needs` of the kind; without it, the kind alone waits.
    """

    retry_after_s: float | None = None  # for subclasses that do not call `__init__`
    service: str | None = None

    def __init__(
        self,
        message: str = "",
        *,
        retry_after_s: float | None = None,
        service: str | None = None,
    ) -> None:
        super().__init__(message)
        if retry_after_s is not None:
            self.retry_after_s = check_number("retry_after_s", retry_after_s, SNOOZE_S_MAX)
        if service is not None:
            self.service = service_name(service)


# Raised deliberately: they need no traceback unless they were raised from another exception.
DELIBERATE = (Retry, GiveUp, Later, Unavailable)


def check_number(name: str, value: object, most: float) -> float:
    """Return a number from 0 to `most`; raise `TypeError` or `ValueError` for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not 0 <= value <= most:  # not a number, too
        raise ValueError(f"{name} is {value}; it must be from 0 to {most:,.0f}")
    return float(value)


def answer_to(result: object) -> Answer:
    """Return the answer for what a handler returned.

    Raises `TypeError` or `ValueError` if a value is not JSON or too large, `FileNotFoundError` if
    there is no such file, and a returned `Later` or other exception of this module.
    """
    if result is None:
        return Answer(DONE)
    if isinstance(result, DELIBERATE):
        raise result
    if isinstance(result, Next):
        value = encode(result.value, "the value of the step", STEP_VALUE_BYTES_MAX, "a file")
        path = None if result.file is None else _file(result.file)
        return Answer(NEXT, value, path, target=result.kind, cost=result.cost)
    if isinstance(result, ResultFile):
        return Answer(DONE, encode_result(result.value), _file(result.path))
    return Answer(DONE, encode_result(result))


def answer_to_error(error: BaseException, description: str) -> Answer:
    """Return the answer for an exception of the handler; `description` is it in one line.

    Raises `TypeError` or `ValueError` if an attribute of it is wrong, as a subclass may set it.
    """
    message = message_of(error) or description
    if isinstance(error, GiveUp):
        return Answer(GIVE_UP, message)
    if isinstance(error, Retry):
        return Answer(RETRY, message, after_s=_retry_s(error.after_s))
    if isinstance(error, Later):
        return Answer(LATER, after_s=check_number("after_s", error.after_s, SNOOZE_S_MAX))
    if isinstance(error, Unavailable):
        after_s, service = error.retry_after_s, error.service
        return Answer(
            UNAVAILABLE,
            message,
            after_s=None
            if after_s is None
            else check_number("retry_after_s", after_s, SNOOZE_S_MAX),
            target=None if service is None else service_name(service),
        )
    return Answer(RETRY, description)


def checked_answer(answer: Answer) -> Answer:
    """Return an answer that a child sent; raise `ValueError` if it could not be recorded."""
    if answer.type in (RETRY, GIVE_UP):
        return Answer(answer.type, answer.text or _FAILED, after_s=answer.after_s)
    if answer.type == LATER:
        return Answer(LATER, after_s=check_number("after_s", answer.after_s or 0, SNOOZE_S_MAX))
    if answer.type == UNAVAILABLE:
        if answer.target is not None:
            service_name(answer.target)
        check_number("after_s", answer.after_s or 0, SNOOZE_S_MAX)
        return answer._replace(text=answer.text or _FAILED, path=None, cost=None)
    most = {DONE: RESULT_BYTES_MAX, NEXT: STEP_VALUE_BYTES_MAX}.get(answer.type)
    if most is None:
        raise ValueError(f"its type is {answer.type!r}")
    if answer.text is not None and not is_json_text(answer.text, most):
        raise ValueError("its value is not JSON text, or too large")
    if answer.type == NEXT:
        text.kind_name(answer.target or "")
        check_number("cost", answer.cost or 0, COST_MAX)
    return answer


def is_json_text(value: str, bytes_max: int) -> bool:
    """Return whether a text can be stored as one that `encode` made."""
    return value.isascii() and "\0" not in value and len(value) <= bytes_max


def service_name(value: str) -> str:
    """Return the name of a service unchanged; raise `ValueError` if it is not valid."""
    return text.identity(value, "service", SERVICE_BYTES_MAX)


def encode_result(value: object) -> str | None:
    return encode(value, "the handler's result", RESULT_BYTES_MAX, "return a ResultFile")


def encode(value: object, what: str, bytes_max: int, instead: str) -> str | None:
    """Return a value as JSON text; None for None.

    Raises `TypeError` if it is not JSON, `ValueError` if it is larger than `bytes_max`.
    """
    if value is None:
        return None
    try:
        encoded = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{what} is not JSON: {error}") from None
    if len(encoded) > bytes_max:
        raise ValueError(
            f"{what} has {len(encoded):,} bytes; at most {bytes_max:,} are allowed: {instead}"
        )
    return encoded


def _retry_s(value: object) -> float | None:
    """Return `after_s` of a `Retry`; None, for the usual backoff, if it is not a number."""
    try:
        number = None if value is None else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return None if number is None or isnan(number) else max(0.0, min(number, SNOOZE_S_MAX))


def _file(path: str) -> str:
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"the result {path} is not a file")
    return path
