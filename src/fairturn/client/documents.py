"""Operations on documents, each written once, as a generator (see `request`)."""

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, TypeVar, Unpack

from fairturn.client import values
from fairturn.client.administration import check_name
from fairturn.client.request import (
    BlockingCall,
    Download,
    HttpRequest,
    Operation,
    ServiceSession,
    Sleep,
    json_request,
    query_of,
)
from fairturn.client.response import parse
from fairturn.client.transport import client_method
from fairturn.client.upload import (
    NewId,
    PreparedUpload,
    ProgressCallback,
    prepare,
    prepare_many,
)
from fairturn.client.values import Identity, attempts_of
from fairturn.clock import as_timestamp, stopwatch
from fairturn.contents import local
from fairturn.errors import NotAllowed, NotFound
from fairturn.explain.analysis import Audience, Explanation, for_customer
from fairturn.model import (
    PAGE_MAX,
    AttemptRecord,
    BodyType,
    Document,
    Page,
    Receipt,
    State,
    Submission,
    SubmissionFields,
)
from fairturn.stores import ids
from fairturn.validation.filters import FILTERS, Filters, page_size, to_filter
from fairturn.validation.submission import refuse_expiry
from fairturn.wire import IDS_MAX

LONG_POLL_S = 30.0  # proxies close connections that are idle for a minute
_EARLY_S = 0.2  # the delay after a long poll that returned early

T = TypeVar("T")
# In a class with a method `list`, that name is the method.
Receipts = list[Receipt]
States = list[State | None]
Attempts = list[AttemptRecord]


class DocumentOperations:
    """Submit, query, wait for, download, cancel and retry documents.

    It has more than 20 methods because each operation of the clients on documents is one.
    """

    _session: ServiceSession
    _new_id: NewId

    @client_method
    def submit(
        self,
        customer: str | None = None,
        *,
        progress: ProgressCallback | None = None,
        **fields: Unpack[SubmissionFields],
    ) -> Operation[Receipt]:
        """Submit one document: a JSON payload, content from bytes or a binary stream, or a file.

        When this returns, the document is on the service's stable storage. A customer's key
        implies the customer; with any other key, name it. Retries store the document once, with or
        without an idempotency `key`. A stream that cannot seek is sent only once. Contents are
        streamed; `progress` is called with the bytes sent and their total (None if unknown).
        """
        submission = Submission(customer or "", **fields)
        identity = yield from self._session.identity()
        named = _submitter(identity, customer)
        prepared: PreparedUpload = yield BlockingCall(
            lambda: prepare(submission, named, progress, self._new_id)
        )
        (receipt,) = yield from self._upload(prepared)
        return receipt

    @client_method
    def submit_many(
        self, submissions: Iterable[Submission], *, progress: ProgressCallback | None = None
    ) -> Operation[Receipts]:
        """Submit all of the documents or none, in order: at most 10,000 and 32 MiB in one call.

        A single document may have any size.
        """
        identity = yield from self._session.identity()
        named = partial(_submitter, identity)
        prepared: PreparedUpload | None = yield BlockingCall(
            lambda: prepare_many(submissions, named, progress, self._new_id)
        )
        return [] if prepared is None else (yield from self._upload(prepared))

    def _upload(self, prepared: PreparedUpload) -> Operation[Receipts]:
        try:
            response = yield from self._session.exchange(prepared.request)
        finally:
            prepared.close()
        return parse(response, partial(prepared.receipts, headers=response.headers))

    @client_method
    def wait_for_room(
        self, customer: str | None = None, n: int = 1, timeout_s: float | None = None
    ) -> Operation[bool]:
        """Wait until the queue would accept `n` more documents; False after `timeout_s`."""
        return _poll(lambda wait_s: self._has_room(customer, n, wait_s), bool, timeout_s)

    @client_method
    def has_room(self, customer: str | None = None, n: int = 1) -> Operation[bool]:
        """Whether the queue would accept `n` more documents now."""
        return self._has_room(customer, n, wait_s=0.0)

    def _has_room(self, customer: str | None, n: int, wait_s: float) -> Operation[bool]:
        if customer is not None:
            check_name(customer)
        if n < 1:
            raise ValueError(f"n is {n}; it must be at least 1")
        named = _named((yield from self._session.identity()), customer)
        query = query_of(n=n, wait_s=wait_s, customer=named)
        request = HttpRequest("GET", "/v1/room", query, wait_s=wait_s)
        return (yield from self._session.send(request, lambda value: bool(value["room"])))

    @client_method
    def get(self, id: str) -> Operation[Document]:
        """Return the document as it is now; `NotFound` if it does not exist."""
        return self._get(id, values.document_of)

    @client_method
    def wait(self, id: str, timeout_s: float | None = None) -> Operation[Document]:
        """Wait until the document has ended, by long polling; `TimeoutError` after `timeout_s`."""
        document = yield from _poll(
            lambda wait_s: self._get(id, values.document_of, wait_s=wait_s),
            lambda document: document.ended,
            timeout_s,
        )
        if not document.ended:
            raise TimeoutError(f"document {id} is still {document.state} after {timeout_s} s")
        return document

    @client_method
    def explain(
        self, id: str, audience: Audience | str = Audience.OPERATOR
    ) -> Operation[Explanation]:
        """Return why the document is in its state, and its queue position.

        `fairturn.explain.sentences.tell` turns an explanation into sentences in a language. With a
        customer's key, other customers are not named.
        """
        audience = Audience(audience)
        explanation = yield from self._get(id, values.explanation_of, explain=True)
        return for_customer(explanation) if audience is Audience.CUSTOMER else explanation

    @client_method
    def result_file_bytes(self, id: str) -> Operation[int | None]:
        """Return the size of the file that the handler returned; None if there is none."""
        return self._get(id, lambda value: value["result_file_bytes"])

    def _get(
        self, id: str, read: Callable[[Any], T], *, explain: bool = False, wait_s: float = 0.0
    ) -> Operation[T]:
        query = query_of(explain=str(explain).lower(), wait_s=wait_s)
        request = _document_request("GET", id)._replace(query=query, wait_s=wait_s)
        return self._session.send(request, read)

    @client_method
    def attempts(self, id: str, *, values: bool = False) -> Operation[Attempts]:
        """Return the attempts of the document that failed, lost their lease or ended a step, oldest
        first; with `values`, also the values of its steps, as JSON text."""
        query = query_of(values="true" if values else None)
        request = _document_request("GET", id, "/attempts")._replace(query=query)
        return self._session.send(request, attempts_of)

    @client_method
    def list(
        self, *, after: str | None = None, size: int = 100, **filters: Unpack[Filters]
    ) -> Operation[Page]:
        """Return one page of the documents that match, newest first.

        `after` is the `next` of the page before.
        """
        if after is not None and not ids.is_id(after):
            raise ValueError(f"after is {after!r}; it must be the `next` of a page")
        f = to_filter(filters)
        if f.ids is not None and len(f.ids) > IDS_MAX:
            raise ValueError(
                f"{len(f.ids):,} ids were given; over HTTP at most {IDS_MAX} are allowed"
            )
        wanted = {each.parameter: getattr(f, each.name) for each in FILTERS}
        wanted["customer"] = _named((yield from self._session.identity()), f.customer)
        query = query_of(size=page_size(size), after=after, **wanted)
        if () in wanted.values():  # a query cannot express an empty set
            return Page([], None)
        request = HttpRequest("GET", "/v1/documents", query)
        return (yield from self._session.send(request, partial(values.page_of, after=after)))

    @client_method
    def payload(self, id: str) -> Operation[Any]:
        """Return the JSON payload of the document."""
        local.refuse_other((yield from self._get(id, values.document_of)), BodyType.PAYLOAD)
        request = _document_request("GET", id, "/content")
        return (yield from self._session.send(request, lambda value: value))

    @client_method
    def open(self, id: str) -> Operation[BinaryIO]:
        """Return the content of the document as a stream, downloaded and verified.

        A large content is in a temporary file, which closing the stream deletes.
        """
        return self._open(id)

    @client_method
    def read(self, id: str) -> Operation[bytes]:
        """Return the content of the document as bytes."""
        file = yield from self._open(id)
        with file:
            content: bytes = yield BlockingCall(file.read)
        return content

    def _open(self, id: str) -> Operation[BinaryIO]:
        local.refuse_other((yield from self._get(id, values.document_of)), BodyType.CONTENT)
        request = _document_request("GET", id, "/content")
        return (yield from self._download(request, f"document {id}"))

    @client_method
    def result(self, id: str) -> Operation[Any]:
        """Return the value that the handler returned for a completed document."""
        return self._session.send(_document_request("GET", id, "/result"), lambda value: value)

    @client_method
    def open_result(self, id: str) -> Operation[BinaryIO]:
        """Return the file that the handler returned as a stream, downloaded and verified."""
        missing = {"not_found": f"document {id} has no result file; call result()"}
        request = _document_request("GET", id, "/result/file")._replace(messages=missing)
        try:
            return (yield from self._download(request, f"the result of document {id}"))
        except NotFound:
            # Raises if the document itself does not exist.
            yield from self._get(id, values.document_of)
            raise

    def _download(self, request: HttpRequest, what: str) -> Operation[BinaryIO]:
        download = Download()
        try:
            response = yield from self._session.exchange(request._replace(download=download))
            return download.verified(response.headers, what)
        except BaseException:
            download.close()
            raise

    def _cancel(self, ids: str | Iterable[str]) -> Operation[State | States]:
        if not isinstance(ids, str):
            return (yield from self._change_all("/v1/documents/cancel", ids))
        request = _document_request("POST", ids, "/cancel")
        return (yield from self._session.send(request, lambda value: State(value["state"])))

    def _retry(
        self,
        ids: str | Iterable[str],
        expires_at: datetime | int | None,
        expires_in_s: float | None,
    ) -> Operation[States | None]:
        refuse_expiry(expires_at, expires_in_s)
        at = None if expires_at is None else as_timestamp(expires_at, "expires_at")
        value = {"expires_at": at, "expires_in_s": expires_in_s}
        # Not idempotent: a second attempt fails if a worker has claimed the document meanwhile.
        if not isinstance(ids, str):
            path = "/v1/documents/retry"
            return (yield from self._change_all(path, ids, is_idempotent=False, **value))
        found = _document_request("POST", ids, "/retry")
        request = json_request("POST", found.path, value)
        yield from self._session.exchange(
            request._replace(is_idempotent=False, messages=found.messages)
        )
        return None

    def _change_all(
        self, path: str, ids: Iterable[str], *, is_idempotent: bool = True, **more: Any
    ) -> Operation[States]:
        def read(value: Any) -> States:
            return [None if each is None else State(each) for each in value["states"]]

        rest, states = iter(ids), States()
        while batch := list(islice(rest, PAGE_MAX)):
            request = json_request("POST", path, {"ids": batch, **more})
            states += yield from self._session.send(
                request._replace(is_idempotent=is_idempotent), read
            )
        return states


def _poll(
    poll: Callable[[float], Operation[T]], is_done: Callable[[T], bool], timeout_s: float | None
) -> Operation[T]:
    """Repeat a long poll, which takes its `wait_s`, until it is done; return its last value."""
    until = None if timeout_s is None else stopwatch() + timeout_s
    while True:
        begun = stopwatch()
        wait_s = LONG_POLL_S if until is None else max(0.0, min(LONG_POLL_S, until - begun))
        value = yield from poll(wait_s)
        now = stopwatch()
        if is_done(value) or (until is not None and now >= until):
            return value
        if now - begun < wait_s / 2:  # a service that shuts down ends long polls early
            yield Sleep(_EARLY_S)


def _document_request(method: str, id: str, action: str = "") -> HttpRequest:
    """A request for one document; `NotFound` for an id that no document can have."""
    missing = f"there is no document {id!r}"
    if not ids.is_id(id):
        raise NotFound(missing)
    return HttpRequest(method, f"/v1/documents/{id}{action}", messages={"not_found": missing})


def _named(identity: Identity, customer: str | None) -> str | None:
    """The customer that a request names: None with a customer's key, which implies it."""
    if identity.customer is None:
        return customer
    own = identity.customer.name
    if customer is not None and customer != own:
        raise NotAllowed(f"the access key belongs to customer {own!r}, not to {customer!r}")
    return None


def _submitter(identity: Identity, customer: str | None) -> str | None:
    if identity.customer is None and customer is None:
        raise TypeError("name the customer: this access key does not belong to one")
    return _named(identity, customer)
