"""Answers of the service that are none of what was asked for, as the errors of the queue. Pure.

Every sentence says what is wrong and what to do. No access key is in one: only its id, which opens
nothing.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple, NoReturn

from fairturn.errors import (
    ContentDamaged,
    FairturnError,
    KeyReused,
    NotAllowed,
    NotFound,
    QueueFull,
    Refused,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    WrongState,
)
from fairturn.wire import PROBLEM

VERSION_MIN = (0, 1)
_SAID_MAX = 200


class Trouble(StrEnum):
    """Why there is no answer."""

    UNREACHABLE = "unreachable"  # nothing was sent
    UNKNOWN_NAME = "unknown_name"  # there is no such host
    CUT = "cut"  # the connection ended before the answer was whole
    SLOW = "slow"  # nothing came for too long
    TLS = "tls"  # the other side is not trusted, or speaks no TLS


class Broken(NamedTuple):
    """No answer, and why."""

    trouble: Trouble
    said: str


class Answer(NamedTuple):
    """What the service answered. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_good(self) -> bool:
        return 200 <= self.status < 300

    @property
    def json(self) -> Any:
        """The value of a good answer."""
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise StoreRefused(
                "an answer of the service is not JSON: something between here and there has "
                "changed it; ask who runs it, or use another way there"
            ) from error

    @property
    def retry_after_s(self) -> float:
        """When to come back, if it says so in seconds, as this service does."""
        text = self.headers.get("retry-after", "")
        return float(text) if text.isdecimal() and len(text) < 10 else 0.0


class Place(NamedTuple):
    """Where the service is, and with which key it is asked."""

    url: str
    key_id: str | None  # not the key

    @property
    def key(self) -> str:
        return "the access key" if self.key_id is None else f"the access key ft_{self.key_id}_…"


def good(got: Answer | Broken, said: Mapping[str, str], place: Place) -> Answer:
    """The answer if it is a good one; otherwise its error is raised."""
    if isinstance(got, Broken):
        _raise_broken(got, place)
    if not got.is_good:
        _raise_refused(got, said, place)
    return got


def refuse_old(answer: Answer, place: Place) -> None:
    """Refuse what does not answer as a service does that this client can speak to."""
    me = _object_in(answer)
    if "role" not in me:
        _raise_stranger(answer, place)
    version = str(me.get("version", ""))
    numbers = tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2])
    if not version or numbers < VERSION_MIN:
        least = ".".join(map(str, VERSION_MIN))
        raise StoreRefused(
            f"the service at {place.url} is fairturn {version or 'of a version before'}; this "
            f"client needs {least} or newer there: install that, and start the service again"
        )


def problem_in(answer: Answer) -> Mapping[str, Any]:
    """The problem document in an answer; nothing if it is none."""
    if answer.headers.get("content-type", "").partition(";")[0].strip() != PROBLEM:
        return {}
    return _object_in(answer)


def _object_in(answer: Answer) -> Mapping[str, Any]:
    try:
        value = json.loads(answer.body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _raise_broken(broken: Broken, place: Place) -> NoReturn:
    url, why = place.url, broken.said[:_SAID_MAX]
    if broken.trouble is Trouble.UNKNOWN_NAME:
        raise StoreUnavailable(f"there is no machine of the name in {url} ({why}): check the url")
    if broken.trouble is Trouble.UNREACHABLE:
        raise StoreUnavailable(
            f"no service answers at {url} ({why}): start it with `fairturn serve`, or check the url"
        )
    if broken.trouble is Trouble.TLS:
        raise StoreRefused(
            f"no trusted connection can be made to {url} ({why}): if its certificate is of an "
            "authority of your own, name that one's file with ca= or SSL_CERT_FILE; if it speaks "
            "no TLS at all, the url begins with http://"
        )
    if broken.trouble is Trouble.SLOW:
        raise StoreUnavailable(
            f"the service at {url} did not answer in time ({why}): try again, or allow it more "
            "with timeout_s"
        )
    raise StoreUnavailable(
        f"the connection to {url} was cut before the answer ({why}): try again; if that never "
        "helps, it may be no fairturn service, or one that is spoken to with https://"
    )


def _raise_refused(answer: Answer, said: Mapping[str, str], place: Place) -> NoReturn:
    problem = problem_in(answer)
    code = problem.get("code")
    if not isinstance(code, str):
        _raise_stranger(answer, place)
    detail = problem.get("detail")
    sentence = said.get(code) or (detail if isinstance(detail, str) else "") or _title(problem)
    if code == "invalid" and not detail and problem.get("errors"):
        sentence = "; ".join(f"{each['where']}: {each['what']}" for each in problem["errors"])
    if code in ("invalid", "malformed"):
        raise ValueError(sentence)
    if code == "queue_full":
        raise _queue_full(problem, sentence)
    if code in _ALLOWED:
        raise NotAllowed(_ALLOWED[code].format(key=place.key, url=place.url))
    if code in _TRY_AGAIN:
        raise StoreUnavailable(f"the service at {place.url} says: {sentence}")
    raise _ERRORS.get(code, StoreError)(sentence)


_ERRORS: Mapping[str, type[FairturnError]] = {
    "not_found": NotFound,
    "parent_unknown": NotFound,
    "wrong_state": WrongState,
    "key_reused": KeyReused,
    "too_large": Refused,
    "checksum_wrong": Refused,
    "storage_full": StoreFull,
    "content_damaged": ContentDamaged,
}
_TRY_AGAIN = ("unavailable", "rate_limited", "too_many_at_once", "too_slow", "cut_off")
_ALLOWED = {
    "key_missing": "the service at {url} asks for an access key: give one as Client(url, key) or "
    "in FAIRTURN_KEY; `fairturn keys make` makes one there",
    "key_unknown": "{key} is not known at {url}, or it has ended: ask its operator for a new one",
    "not_allowed": "{key} is not meant for this: use one of another role at {url}",
    "https_needed": "the service at {url} takes access keys from other machines only by https: "
    "use an https:// url",
    "origin_unknown": "the service at {url} answers without a key only on its own machine, by the "
    "name localhost or 127.0.0.1: use that url, or a key",
}


def _title(problem: Mapping[str, Any]) -> str:
    return str(problem.get("title") or problem.get("code"))


def _queue_full(problem: Mapping[str, Any], sentence: str) -> FairturnError:
    limit, maximum, waiting = (problem.get(name) for name in ("limit", "maximum", "waiting"))
    customer = problem.get("customer")
    if not isinstance(limit, str) or not isinstance(maximum, int) or not isinstance(waiting, int):
        return Refused(sentence)
    return QueueFull(limit=limit, maximum=maximum, waiting=waiting, customer=customer)


def _raise_stranger(answer: Answer, place: Place) -> NoReturn:
    """An answer that no service of ours gives."""
    if 300 <= answer.status < 400:
        to = answer.headers.get("location", "elsewhere")
        raise StoreRefused(
            f"{place.url} leads on to {to[:_SAID_MAX]}: use the url of the service itself; an "
            "access key is not sent on"
        )
    kind = answer.headers.get("content-type", "without a type").partition(";")[0]
    what = f"it answered with status {answer.status}, {kind}"
    if answer.status == 413:
        raise Refused(
            f"what stands before the service at {place.url} does not let so many bytes through "
            f"({what}): send less, or let it allow more"
        )
    if answer.status in (502, 503, 504):
        raise StoreUnavailable(
            f"what stands before the service at {place.url} cannot reach it ({what}): try again "
            "later, or see whether the service runs"
        )
    raise StoreRefused(
        f"what answers at {place.url} is no fairturn service ({what}): check the url"
    )
