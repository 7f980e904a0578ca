"""`Client`: a queue behind a service, for programs with threads."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, Self, Unpack, overload

from fairturn.access.keys import AccessKey, Role
from fairturn.access.registry import NewKey
from fairturn.client.operations import (
    AccessKeys,
    AdminOperations,
    DocumentOperations,
    KeyOperations,
    Receipts,
    States,
)
from fairturn.client.request import RetryPolicy, ServiceSession
from fairturn.client.transport import SyncTransport, connection_to, random_id
from fairturn.client.upload import NewId, ProgressCallback
from fairturn.client.values import Identity
from fairturn.explain.analysis import Audience, Explanation
from fairturn.model import (
    PAGE_MAX,
    Customer,
    CustomerPage,
    Document,
    Page,
    Receipt,
    SettingChanges,
    Settings,
    State,
    Submission,
    SubmissionFields,
    Summary,
)
from fairturn.priority import Rule
from fairturn.validation.changes import UNCHANGED, Unchanged
from fairturn.validation.filters import Filters


class Client:
    """A fair document queue at a URL: the methods, values and errors of `Queue`, over HTTP.

    `ca` is a file with the certificates of a private authority. `allow_http=True` permits sending
    the access key unencrypted; use it only where something else encrypts the connection. A request
    that gets no response within `timeout_s`, or that fails temporarily, is retried by
    `retry_policy`. Threads can share one client.

    Every method raises `NotAllowed` if the access key does not permit it, `StoreUnavailable` if
    the service does not respond, and `StoreRefused` if the URL is not of a fairturn service.

    It has more than 20 methods because it offers those of `Queue`.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        ca: str | None = None,
        timeout_s: float = 60.0,
        retry_policy: RetryPolicy | None = None,
        allow_http: bool = False,
        sleep: Callable[[float], object] | None = None,
        new_id: NewId = random_id,
    ) -> None:
        connection = connection_to(url, key, ca=ca, timeout_s=timeout_s, allow_http=allow_http)
        self.url = connection.endpoint.url
        self._transport = SyncTransport(connection, sleep)
        self._run = self._transport.run
        self._session = ServiceSession(connection.endpoint, retry_policy or RetryPolicy())
        self._documents = DocumentOperations(self._session, new_id)
        self._admin = AdminOperations(self._session)
        self.keys = ClientKeys(self._transport, KeyOperations(self._session))

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    # ── Submit ───────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        customer: str | None = None,
        *,
        progress: ProgressCallback | None = None,
        **fields: Unpack[SubmissionFields],
    ) -> Receipt:
        """Submit one document: a JSON payload, content from bytes or a binary stream, or a file.

        When this returns, the document is on the service's stable storage. A customer's key
        implies the customer; with any other key, name it. Retries store the document once, with or
        without an idempotency `key`. A stream that cannot seek is sent only once. Contents are
        streamed; `progress` is called with the bytes sent and their total (None if unknown).
        """
        submission = Submission(customer or "", **fields)
        return self._run(self._documents.submit(customer, submission, progress))

    def submit_many(
        self, submissions: Iterable[Submission], *, progress: ProgressCallback | None = None
    ) -> Receipts:
        """Submit all of the documents or none, in order: at most 10,000 and 32 MiB in one call.

        A single document may have any size.
        """
        return self._run(self._documents.submit_many(submissions, progress))

    def wait_for_room(
        self, customer: str | None = None, n: int = 1, timeout_s: float | None = None
    ) -> bool:
        """Wait until the queue would accept `n` more documents; False after `timeout_s`."""
        return self._run(self._documents.wait_for_room(customer, n, timeout_s))

    def has_room(self, customer: str | None = None, n: int = 1) -> bool:
        """Whether the queue would accept `n` more documents now."""
        return self._run(self._documents.has_room(customer, n))

    # ── Query ────────────────────────────────────────────────────────────────────────────────────

    def get(self, id: str) -> Document:
        """Return the document as it is now; `NotFound` if it does not exist."""
        return self._run(self._documents.get(id))

    def payload(self, id: str) -> Any:
        """Return the JSON payload of the document."""
        return self._run(self._documents.payload(id))

    def open(self, id: str) -> BinaryIO:
        """Return the content of the document as a stream, downloaded and verified.

        A large content is in a temporary file, which closing the stream deletes.
        """
        return self._run(self._documents.open(id))

    def read(self, id: str) -> bytes:
        """Return the content of the document as bytes."""
        return self._run(self._documents.read(id))

    def result(self, id: str) -> Any:
        """Return the value that the handler returned for a completed document."""
        return self._run(self._documents.result(id))

    def open_result(self, id: str) -> BinaryIO:
        """Return the file that the handler returned as a stream, downloaded and verified."""
        return self._run(self._documents.open_result(id))

    def result_file_bytes(self, id: str) -> int | None:
        """Return the size of the file that the handler returned; None if there is none."""
        return self._run(self._documents.result_file_bytes(id))

    def list(
        self, *, after: str | None = None, size: int = 100, **filters: Unpack[Filters]
    ) -> Page:
        """Return one page of the documents that match, newest first.

        `after` is the `next` of the page before.
        """
        return self._run(self._documents.list(after, size, filters))

    def iterate(self, **filters: Unpack[Filters]) -> Iterator[Document]:
        """Iterate over all documents that match, newest first, without later submissions."""
        page = self.list(size=PAGE_MAX, **filters)
        yield from page.documents
        while page.next is not None:
            page = self.list(after=page.next, size=PAGE_MAX, **filters)
            yield from page.documents

    def wait(self, id: str, timeout_s: float | None = None) -> Document:
        """Wait until the document has ended, by long polling; `TimeoutError` after `timeout_s`."""
        return self._run(self._documents.wait(id, timeout_s))

    def explain(self, id: str, audience: Audience | str = Audience.OPERATOR) -> Explanation:
        """Return why the document is in its state, and its queue position.

        `fairturn.explain.sentences.tell` turns an explanation into sentences in a language. With a
        customer's key, other customers are not named.
        """
        return self._run(self._documents.explain(id, audience))

    # ── Cancel, retry ────────────────────────────────────────────────────────────────────────────

    @overload
    def cancel(self, ids: str) -> State: ...  # type: ignore[overload-overlap]
    @overload
    def cancel(self, ids: Iterable[str]) -> States: ...
    def cancel(self, ids: str | Iterable[str]) -> State | States:
        """End documents that have not started, and ask the workers of running ones to stop.

        Return the state afterwards; in a list, None for an id that does not exist.
        """
        return self._run(self._documents.cancel(ids))

    @overload
    def retry(self, ids: str) -> None: ...  # type: ignore[overload-overlap]
    @overload
    def retry(self, ids: Iterable[str]) -> States: ...
    def retry(self, ids: str | Iterable[str]) -> States | None:
        """Return dead documents to the queue, with their priority and a full set of attempts."""
        return self._run(self._documents.retry(ids))

    # ── Customers ────────────────────────────────────────────────────────────────────────────────

    def me(self) -> Identity:
        """Return the identity behind the access key, with the numbers of its customer."""
        return self._run(self._session.fetch_identity())

    def customers(self, *, after: str | None = None, size: int = 100) -> CustomerPage:
        """Return one page of the customers, by name."""
        return self._run(self._admin.customers(after, size))

    def customer(self, name: str) -> Customer:
        """Return one customer; `NotFound` if there is none of this name."""
        return self._run(self._admin.customer(name))

    def set_customer(
        self,
        name: str,
        *,
        weight: float | Unchanged = UNCHANGED,
        limit: int | Unchanged | None = UNCHANGED,
        paused: bool | Unchanged = UNCHANGED,
        bytes_max: int | Unchanged | None = UNCHANGED,
    ) -> Customer:
        """Change a customer's weight, its concurrency limit (None: no limit) or the bytes that its
        documents may have (None: `bytes_per_customer_max`), or pause it.

        Parameters that are not given stay as they are. A new name creates the customer.
        """
        return self._run(self._admin.set_customer(name, weight, limit, paused, bytes_max))

    def purge(self, customer: str) -> None:
        """Delete a customer with its documents, settings, count and keys; running work is lost."""
        self._run(self._admin.purge(customer))

    # ── The whole queue ──────────────────────────────────────────────────────────────────────────

    def summary(self) -> Summary:
        """Return how many documents wait at each priority, are delayed, run and have ended."""
        return self._run(self._admin.summary())

    @property
    def settings(self) -> Settings:
        """The current settings of the queue."""
        return self._run(self._admin.settings())

    @property
    def rule(self) -> Rule:
        """The current priority rule; it needs no access key."""
        return self._run(self._admin.rule())

    def configure(self, **changes: Unpack[SettingChanges]) -> Settings:
        """Change settings for every process. Existing priorities and counts stay as they are."""
        return self._run(self._admin.configure(changes))

    def close(self) -> None:
        """Close the connections; a second call has no effect."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ClientKeys:
    """The access keys of a service, with the methods of `fairturn.access.registry.KeyRegistry`."""

    def __init__(self, transport: SyncTransport, operations: KeyOperations) -> None:
        self._run = transport.run
        self._operations = operations

    def make(self, role: Role | str, *, name: str = "", customer: str | None = None) -> NewKey:
        """Create an access key. Its text, `shown`, cannot be retrieved later."""
        return self._run(self._operations.make(role, name, customer))

    def list(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> AccessKeys:
        """Return keys by id, including those that have expired or were revoked."""
        return self._run(self._operations.list(customer, after, size))

    def rotate(self, id: str, *, overlap_s: float = 0.0) -> NewKey:
        """Create a key that replaces one; the old key expires after `overlap_s`."""
        return self._run(self._operations.rotate(id, overlap_s))

    def revoke(self, id: str) -> AccessKey:
        """Revoke a key now."""
        return self._run(self._operations.revoke(id))
