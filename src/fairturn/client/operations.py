"""The operations of the clients: each is written once, as a generator (see `request`)."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, TypeVar

from fairturn.access.keys import AccessKey, Role
from fairturn.access.registry import NewKey, refuse_role
from fairturn.client import values
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
from fairturn.client.upload import (
    NewId,
    PreparedUpload,
    ProgressCallback,
    prepare,
    prepare_many,
)
from fairturn.client.values import Identity
from fairturn.clock import stopwatch
from fairturn.contents import local
from fairturn.errors import NotAllowed, NotFound
from fairturn.explain.analysis import Audience, Explanation, for_customer
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    PAGE_MAX,
    BodyType,
    Customer,
    CustomerPage,
    CustomerSettings,
    Document,
    Page,
    Receipt,
    SettingChanges,
    Settings,
    State,
    Submission,
    Summary,
)
from fairturn.priority import Rule
from fairturn.stores import ids
from fairturn.validation import text
from fairturn.validation.changes import changed, customer_changes
from fairturn.validation.filters import FILTERS, Filters, page_size, to_filter
from fairturn.wire import IDS_MAX

LONG_POLL_S = 30.0  # proxies close connections that are idle for a minute
_EARLY_S = 0.2  # the delay after a long poll that returned early

T = TypeVar("T")
# In a class with a method `list`, that name is the method.
Receipts = list[Receipt]
States = list[State | None]
AccessKeys = list[AccessKey]


class DocumentOperations:
    """Submit, query, wait for, download, cancel and retry documents.

    It has more than 20 methods because each operation of the clients on documents is one.
    """

    def __init__(self, session: ServiceSession, new_id: NewId) -> None:
        self._session = session
        self._new_id = new_id

    def submit(
        self, customer: str | None, submission: Submission, progress: ProgressCallback | None
    ) -> Operation[Receipt]:
        identity = yield from self._session.identity()
        named = _submitter(identity, customer)
        prepared: PreparedUpload = yield BlockingCall(
            lambda: prepare(submission, named, progress, self._new_id)
        )
        (receipt,) = yield from self._upload(prepared)
        return receipt

    def submit_many(
        self, submissions: Iterable[Submission], progress: ProgressCallback | None
    ) -> Operation[Receipts]:
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

    def has_room(self, customer: str | None, n: int, wait_s: float = 0.0) -> Operation[bool]:
        if customer is not None:
            _check_name(customer)
        if n < 1:
            raise ValueError(f"n is {n}; it must be at least 1")
        named = _named((yield from self._session.identity()), customer)
        query = query_of(n=n, wait_s=wait_s, customer=named)
        request = HttpRequest("GET", "/v1/room", query, wait_s=wait_s)
        return (yield from self._session.send(request, lambda value: bool(value["room"])))

    def wait_for_room(
        self, customer: str | None, n: int, timeout_s: float | None
    ) -> Operation[bool]:
        return _poll(lambda wait_s: self.has_room(customer, n, wait_s), bool, timeout_s)

    def get(self, id: str) -> Operation[Document]:
        return self._get(id, values.document_of)

    def wait(self, id: str, timeout_s: float | None) -> Operation[Document]:
        document = yield from _poll(
            lambda wait_s: self._get(id, values.document_of, wait_s=wait_s),
            lambda document: document.ended,
            timeout_s,
        )
        if not document.ended:
            raise TimeoutError(f"document {id} is still {document.state} after {timeout_s} s")
        return document

    def explain(self, id: str, audience: Audience | str) -> Operation[Explanation]:
        audience = Audience(audience)
        explanation = yield from self._get(id, values.explanation_of, explain=True)
        return for_customer(explanation) if audience is Audience.CUSTOMER else explanation

    def result_file_bytes(self, id: str) -> Operation[int | None]:
        return self._get(id, lambda value: value["result_file_bytes"])

    def _get(
        self, id: str, read: Callable[[Any], T], *, explain: bool = False, wait_s: float = 0.0
    ) -> Operation[T]:
        query = query_of(explain=str(explain).lower(), wait_s=wait_s)
        request = _document_request("GET", id)._replace(query=query, wait_s=wait_s)
        return self._session.send(request, read)

    def list(self, after: str | None, size: int, filters: Filters) -> Operation[Page]:
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
        return (yield from self._session.send(request, values.page_of))

    def payload(self, id: str) -> Operation[Any]:
        local.refuse_other((yield from self.get(id)), BodyType.PAYLOAD)
        request = _document_request("GET", id, "/content")
        return (yield from self._session.send(request, lambda value: value))

    def open(self, id: str) -> Operation[BinaryIO]:
        local.refuse_other((yield from self.get(id)), BodyType.CONTENT)
        request = _document_request("GET", id, "/content")
        return (yield from self._download(request, f"document {id}"))

    def read(self, id: str) -> Operation[bytes]:
        file = yield from self.open(id)
        with file:
            content: bytes = yield BlockingCall(file.read)
        return content

    def result(self, id: str) -> Operation[Any]:
        return self._session.send(_document_request("GET", id, "/result"), lambda value: value)

    def open_result(self, id: str) -> Operation[BinaryIO]:
        missing = {"not_found": f"document {id} has no result file; call result()"}
        request = _document_request("GET", id, "/result/file")._replace(messages=missing)
        try:
            return (yield from self._download(request, f"the result of document {id}"))
        except NotFound:
            yield from self.get(id)  # raises if the document itself does not exist
            raise

    def _download(self, request: HttpRequest, what: str) -> Operation[BinaryIO]:
        download = Download()
        try:
            response = yield from self._session.exchange(request._replace(download=download))
            return download.verified(response.headers, what)
        except BaseException:
            download.close()
            raise

    def cancel(self, ids: str | Iterable[str]) -> Operation[State | States]:
        if not isinstance(ids, str):
            return (yield from self._change_all("/v1/documents/cancel", ids))
        request = _document_request("POST", ids, "/cancel")
        return (yield from self._session.send(request, lambda value: State(value["state"])))

    def retry(self, ids: str | Iterable[str]) -> Operation[States | None]:
        # Not idempotent: a second attempt fails if a worker has claimed the document meanwhile.
        if not isinstance(ids, str):
            path = "/v1/documents/retry"
            return (yield from self._change_all(path, ids, is_idempotent=False))
        request = _document_request("POST", ids, "/retry")._replace(is_idempotent=False)
        yield from self._session.exchange(request)
        return None

    def _change_all(
        self, path: str, ids: Iterable[str], *, is_idempotent: bool = True
    ) -> Operation[States]:
        def read(value: Any) -> States:
            return [None if each is None else State(each) for each in value["states"]]

        rest, states = iter(ids), States()
        while batch := list(islice(rest, PAGE_MAX)):
            request = json_request("POST", path, {"ids": batch})
            states += yield from self._session.send(
                request._replace(is_idempotent=is_idempotent), read
            )
        return states


class AdminOperations:
    """Customers, the whole queue and its settings."""

    def __init__(self, session: ServiceSession) -> None:
        self._session = session

    def customers(self, after: str | None, size: int) -> Operation[CustomerPage]:
        if after is not None:
            text.identity(after, "after", CUSTOMER_BYTES_MAX)
        query = query_of(size=page_size(size), after=after)
        return self._session.send(HttpRequest("GET", "/v1/customers", query), values.customers_of)

    def customer(self, name: str) -> Operation[Customer]:
        request = HttpRequest("GET", "/v1/customers", query_of(name=_check_name(name)))
        page = yield from self._session.send(request, values.customers_of)
        if not page.customers:
            raise NotFound(f"there is no customer {name!r}")
        return page.customers[0]

    def set_customer(
        self, name: str, weight: Any, limit: Any, paused: Any, bytes_max: Any
    ) -> Operation[Customer]:
        changes = customer_changes(weight, limit, paused, bytes_max)
        CustomerSettings(**changes)  # raises the errors of the queue for values out of range
        for setting in changes.keys() & {"limit", "bytes_max"}:
            changes[setting] = changes[setting] or 0  # 0: none
        request = json_request("POST", "/v1/customers", {"name": _check_name(name), **changes})
        return self._session.send(request, values.customer_of)

    def purge(self, name: str) -> Operation[None]:
        request = json_request(
            "POST", "/v1/customers/purge", {"name": _check_name(name), "dry_run": False}
        )
        missing = {"not_found": f"there is no customer {name!r}"}
        yield from self._session.exchange(request._replace(is_idempotent=False, messages=missing))

    def summary(self) -> Operation[Summary]:
        return self._session.send(HttpRequest("GET", "/v1/summary"), values.summary_of)

    def rule(self) -> Operation[Rule]:
        return self._session.send_public(HttpRequest("GET", "/v1/rule"), values.rule_of)

    def settings(self) -> Operation[Settings]:
        return self._session.send(HttpRequest("GET", "/v1/settings"), values.settings_of)

    def configure(self, changes: SettingChanges) -> Operation[Settings]:
        after = changed((yield from self.settings()), changes)  # raises the errors of the queue
        value = {name: getattr(after, name) for name in changes}
        request = json_request("PATCH", "/v1/settings", value)
        return (yield from self._session.send(request, values.settings_of))


class KeyOperations:
    """Create, list, rotate and revoke access keys."""

    def __init__(self, session: ServiceSession) -> None:
        self._session = session

    def make(self, role: Role | str, name: str, customer: str | None) -> Operation[NewKey]:
        value = {"role": refuse_role(role, customer).value, "name": name, "customer": customer}
        request = json_request("POST", "/v1/keys", value)._replace(is_idempotent=False)
        return self._session.send(request, values.new_key_of)

    def list(self, customer: str | None, after: str | None, size: int) -> Operation[AccessKeys]:
        query = query_of(size=page_size(size), customer=customer, after=after)
        return self._session.send(
            HttpRequest("GET", "/v1/keys", query),
            lambda value: [values.key_of(each) for each in value["keys"]],
        )

    def rotate(self, id: str, overlap_s: float) -> Operation[NewKey]:
        request = _key_request(id, "rotate", {"overlap_s": overlap_s})
        return self._session.send(request._replace(is_idempotent=False), values.new_key_of)

    def revoke(self, id: str) -> Operation[AccessKey]:
        return self._session.send(_key_request(id, "revoke", {}), values.key_of)


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


def _key_request(id: str, action: str, value: dict[str, Any]) -> HttpRequest:
    missing = f"there is no key {id!r}"
    if not id.isalnum() or not id.isascii():
        raise NotFound(missing)
    request = json_request("POST", f"/v1/keys/{id}/{action}", value)
    return request._replace(messages={"not_found": missing})


def _check_name(customer: str) -> str:
    return text.identity(customer, "customer", CUSTOMER_BYTES_MAX)


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
