"""The exchanges about documents: submitting, looking, waiting, fetching, changing their course."""

from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any, BinaryIO, TypeVar

from fairturn import ids
from fairturn.client import values
from fairturn.client.download import Sink
from fairturn.client.exchange import Ask, Asker, Exchange, Pause, Work, json_ask
from fairturn.client.problems import Answer
from fairturn.client.upload import NewName, Prepared, Progress, prepare, prepare_many
from fairturn.client.values import Me
from fairturn.clock import stopwatch
from fairturn.contents import local
from fairturn.errors import NotAllowed, NotFound
from fairturn.explain.analysis import Audience, Explanation, for_customer
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    PAGE_MAX,
    Document,
    Filter,
    Kind,
    Page,
    Receipt,
    State,
    Submission,
)
from fairturn.validation import text
from fairturn.validation.filters import Filters, page_size, to_filter
from fairturn.wire import IDS_MAX

WAIT_S = 30.0  # of one long poll; proxies cut what is silent for a minute
_EARLY_S = 0.2  # before asking again, where a long poll was answered at once

T = TypeVar("T")
Receipts = list[Receipt]
States = list[State | None]


class Documents:
    """What everybody may ask about documents, as far as the key lets them."""

    def __init__(self, asker: Asker, new_name: NewName) -> None:
        self._asker = asker
        self._new_name = new_name

    # ── Submitting ───────────────────────────────────────────────────────────────────────────────

    def submit(
        self, customer: str | None, submission: Submission, progress: Progress | None
    ) -> Exchange[Receipt]:
        me = yield from self._asker.me()
        customer = _customer_for(me, customer)
        prepared: Prepared = yield Work(
            lambda: prepare(submission, customer, progress, self._new_name)
        )
        (receipt,) = yield from self._handed_in(prepared)
        return receipt

    def submit_many(
        self, submissions: Iterable[Submission], progress: Progress | None
    ) -> Exchange[Receipts]:
        me = yield from self._asker.me()
        rest = iter(submissions)
        given: Any = yield Work(lambda: list(islice(rest, 2)))
        if not given:
            return []
        if len(given) == 1 and isinstance(given[0], Submission):
            # Alone it may be of any size, and there is nothing that it must be stored with.
            return [(yield from self._submit_first(given[0], progress))]
        prepared: Prepared = yield Work(
            lambda: prepare_many(
                chain(given, rest), lambda named: _customer_for(me, named), self._new_name
            )
        )
        return (yield from self._handed_in(prepared))

    def _submit_first(self, submission: Submission, progress: Progress | None) -> Exchange[Receipt]:
        try:
            return (yield from self.submit(submission.customer, submission, progress))
        except TypeError as error:
            raise TypeError(f"submission 0: {error}") from error
        except ValueError as error:
            raise ValueError(f"submission 0: {error}") from error

    def _handed_in(self, prepared: Prepared) -> Exchange[Receipts]:
        try:
            answer = yield from self._asker.ask(prepared.ask)
        finally:
            prepared.close()
        return prepared.receipts(answer)

    def has_room(self, customer: str | None, n: int, wait_s: float = 0.0) -> Exchange[bool]:
        if customer is not None:
            text.identity(customer, "customer", CUSTOMER_BYTES_MAX)
        if n < 1:
            raise ValueError(f"n is {n}; it must be at least 1")
        me = yield from self._asker.me()
        named = None if customer is None else _customer_for(me, customer)
        query = [("n", str(n)), ("wait_s", str(wait_s))]
        query += [] if named is None else [("customer", named)]
        answer = yield from self._asker.ask(Ask("GET", "/v1/room", tuple(query), wait_s=wait_s))
        return bool(answer.json["room"])

    def wait_for_room(
        self, customer: str | None, n: int, timeout_s: float | None
    ) -> Exchange[bool]:
        def look(wait_s: float) -> Exchange[bool | None]:
            room = yield from self.has_room(customer, n, wait_s)
            return room or None

        return (yield from _until(look, timeout_s)) is not None

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────

    def get(self, id: str) -> Exchange[Document]:
        answer = yield from self._look(id)
        return values.document_of(answer.json)

    def explain(self, id: str, audience: Audience | str) -> Exchange[Explanation]:
        audience = Audience(audience)
        answer = yield from self._look(id, explain=True)
        explanation = values.explanation_of(answer.json)
        return for_customer(explanation) if audience is Audience.CUSTOMER else explanation

    def result_file_bytes(self, id: str) -> Exchange[int | None]:
        answer = yield from self._look(id)
        size_bytes: int | None = answer.json["result_file_bytes"]
        return size_bytes

    def wait(self, id: str, timeout_s: float | None) -> Exchange[Document]:
        state = State.WAITING

        def look(wait_s: float) -> Exchange[Document | None]:
            nonlocal state
            answer = yield from self._look(id, wait_s=wait_s)
            document = values.document_of(answer.json)
            state = document.state
            return document if document.ended else None

        ended = yield from _until(look, timeout_s)
        if ended is None:
            raise TimeoutError(f"document {id} is still {state} after {timeout_s} s")
        return ended

    def _look(self, id: str, *, explain: bool = False, wait_s: float = 0.0) -> Exchange[Answer]:
        query = (("explain", "true" if explain else "false"), ("wait_s", str(wait_s)))
        ask = Ask("GET", _path(id), query, wait_s=wait_s, said=_missing(id))
        return (yield from self._asker.ask(ask))

    def list(self, after: str | None, size: int, filters: Filters) -> Exchange[Page]:
        if after is not None and ids.decode(after, 0) is None:
            raise ValueError(f"after is {after!r}; it must be the `next` of a page")
        wanted = to_filter(filters)
        me = yield from self._asker.me()
        if () in (wanted.ids, wanted.states, wanted.priorities):
            return Page([], None)  # nothing is one of none
        query = [("size", str(page_size(size))), *_query(wanted, me)]
        if after is not None:
            query.append(("after", after))
        answer = yield from self._asker.ask(Ask("GET", "/v1/documents", tuple(query)))
        return values.page_of(answer.json)

    # ── What a document carries, and its result ──────────────────────────────────────────────────

    def payload(self, id: str) -> Exchange[Any]:
        document = yield from self.get(id)
        local.refuse_other(document, Kind.PAYLOAD)
        answer = yield from self._asker.ask(Ask("GET", f"{_path(id)}/content", said=_missing(id)))
        return answer.json

    def open(self, id: str) -> Exchange[BinaryIO]:
        document = yield from self.get(id)
        local.refuse_other(document, Kind.CONTENT)
        return (yield from self._fetch(f"{_path(id)}/content", f"document {id}", _missing(id)))

    def read(self, id: str) -> Exchange[bytes]:
        file = yield from self.open(id)

        def whole() -> bytes:
            with file:
                return file.read()

        read: bytes = yield Work(whole)
        return read

    def result(self, id: str) -> Exchange[Any]:
        answer = yield from self._asker.ask(Ask("GET", f"{_path(id)}/result", said=_missing(id)))
        return answer.json

    def open_result(self, id: str) -> Exchange[BinaryIO]:
        said = {"not_found": f"document {id} has no file as its result; see result()"}
        try:
            path = f"{_path(id)}/result/file"
            return (yield from self._fetch(path, f"the result of document {id}", said))
        except NotFound:
            yield from self.get(id)  # which says so if it is the document that is missing
            raise

    def _fetch(self, path: str, what: str, said: dict[str, str]) -> Exchange[BinaryIO]:
        sink = Sink()
        try:
            answer = yield from self._asker.ask(Ask("GET", path, into=sink, said=said))
            return sink.checked(answer.headers, what)
        except BaseException:
            sink.close()
            raise

    # ── Changing the course ──────────────────────────────────────────────────────────────────────

    def cancel(self, id: str) -> Exchange[State]:
        answer = yield from self._asker.ask(Ask("POST", f"{_path(id)}/cancel", said=_missing(id)))
        return State(answer.json["state"])

    def cancel_many(self, wanted: Iterable[str]) -> Exchange[States]:
        return (yield from self._change("/v1/documents/cancel", wanted))

    def retry(self, id: str) -> Exchange[None]:
        # Sent again after a worker has claimed the document, it would be refused.
        ask = Ask("POST", f"{_path(id)}/retry", again=False, said=_missing(id))
        yield from self._asker.ask(ask)

    def retry_many(self, wanted: Iterable[str]) -> Exchange[States]:
        return (yield from self._change("/v1/documents/retry", wanted, again=False))

    def _change(self, path: str, wanted: Iterable[str], *, again: bool = True) -> Exchange[States]:
        rest, states = iter(wanted), States()
        while batch := list(islice(rest, PAGE_MAX)):
            ask = json_ask("POST", path, {"ids": batch})._replace(again=again)
            answer = yield from self._asker.ask(ask)
            states += [None if each is None else State(each) for each in answer.json["states"]]
        return states


def _until(
    look: Callable[[float], Exchange[T | None]], timeout_s: float | None
) -> Exchange[T | None]:
    """What a look finds that may take so many seconds; None if the time is over before."""
    until = None if timeout_s is None else stopwatch() + timeout_s
    while True:
        begun = stopwatch()
        wait_s = WAIT_S if until is None else max(0.0, min(WAIT_S, until - begun))
        found = yield from look(wait_s)
        now = stopwatch()
        if found is not None or (until is not None and now >= until):
            return found
        if now - begun < wait_s / 2:  # a service that ends answers at once
            yield Pause(_EARLY_S)


def _path(id: str) -> str:
    if ids.decode(id, 0) is None:
        raise NotFound(f"there is no document {id!r}")
    return f"/v1/documents/{id}"


def _missing(id: str) -> dict[str, str]:
    return {"not_found": f"there is no document {id!r}"}


def _customer_for(me: Me, named: str | None) -> str | None:
    """Whom a request names: nobody where the key says it."""
    own = _own(me, named)
    if own is None and named is None:
        raise TypeError("name the customer: this access key is not of one")
    return named if own is None else None


def _own(me: Me, named: str | None) -> str | None:
    """Whose key it is, if it is a customer's."""
    if me.customer is None:
        return None
    if named is not None and named != me.customer.name:
        raise NotAllowed(
            f"the access key is of the customer {me.customer.name!r} and not of {named!r}"
        )
    return me.customer.name


def _query(wanted: Filter, me: Me) -> list[tuple[str, str]]:
    if wanted.ids is not None and len(wanted.ids) > IDS_MAX:
        raise ValueError(
            f"{len(wanted.ids):,} ids were given; over HTTP at most {IDS_MAX} are allowed"
        )
    own = _own(me, wanted.customer)
    given = {
        "customer": wanted.customer if own is None else None,
        "name": wanted.name,
        "name_part": wanted.name_part,
        "submitted_from": wanted.submitted_from,
        "submitted_before": wanted.submitted_before,
    }
    several = {"state": wanted.states, "priority": wanted.priorities, "id": wanted.ids}
    return [
        *((name, str(value)) for name, value in given.items() if value is not None),
        *((name, str(each)) for name, found in several.items() for each in found or ()),
    ]
