"""`Client`: a queue behind a service, for programs with threads."""

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Self, Unpack, overload

from fairturn.client.administration import AdminOperations, KeyOperations
from fairturn.client.documents import DocumentOperations, States
from fairturn.client.request import RetryPolicy, ServiceSession
from fairturn.client.transport import SyncTransport, connection_to, random_id
from fairturn.client.upload import NewId
from fairturn.model import PAGE_MAX, Document, Settings, State
from fairturn.priority import Rule
from fairturn.validation.filters import Filters


class Client(DocumentOperations, AdminOperations):
    """A fair document queue at a URL: the methods, values and errors of `Queue`, over HTTP.

    `ca` is a file with the certificates of a private authority. `allow_http=True` permits sending
    the access key unencrypted; use it only where something else encrypts the connection. A request
    that gets no response within `timeout_s`, or that fails temporarily, is retried by
    `retry_policy`. Threads can share one client.

    Every method raises `NotAllowed` if the access key does not permit it, `StoreUnavailable` if
    the service does not respond, and `StoreRefused` if the URL is not of a fairturn service.
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
        self._session = ServiceSession(connection.endpoint, retry_policy or RetryPolicy())
        self._new_id = new_id
        self.keys = ClientKeys(self._transport, self._session)

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def iterate(self, **filters: Unpack[Filters]) -> Iterator[Document]:
        """Iterate over all documents that match, newest first, without later submissions."""
        page = self.list(size=PAGE_MAX, **filters)
        yield from page.documents
        while page.next is not None:
            page = self.list(after=page.next, size=PAGE_MAX, **filters)
            yield from page.documents

    @overload
    def cancel(self, ids: str) -> State: ...  # type: ignore[overload-overlap]
    @overload
    def cancel(self, ids: Iterable[str]) -> States: ...
    def cancel(self, ids: str | Iterable[str]) -> State | States:
        """End documents that have not started, and ask the workers of running ones to stop.

        Return the state afterwards; in a list, None for an id that does not exist.
        """
        return self._transport.run(self._cancel, ids)

    @overload
    def retry(  # type: ignore[overload-overlap]
        self,
        ids: str,
        *,
        expires_at: datetime | int | None = None,
        expires_in_s: float | None = None,
    ) -> None: ...
    @overload
    def retry(
        self,
        ids: Iterable[str],
        *,
        expires_at: datetime | int | None = None,
        expires_in_s: float | None = None,
    ) -> States: ...
    def retry(
        self,
        ids: str | Iterable[str],
        *,
        expires_at: datetime | int | None = None,
        expires_in_s: float | None = None,
    ) -> States | None:
        """Return dead documents to the queue, with their priority and a full set of attempts, at
        the step that failed. With an expiry, expired documents return as well; without one, none of
        the documents expires again."""
        return self._transport.run(self._retry, ids, expires_at, expires_in_s)

    @property
    def settings(self) -> Settings:
        """The current settings of the queue."""
        return self._transport.run(self._settings)

    @property
    def rule(self) -> Rule:
        """The current priority rule; it needs no access key."""
        return self._transport.run(self._rule)

    def close(self) -> None:
        """Close the connections; a second call has no effect."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ClientKeys(KeyOperations):
    """The access keys of a service, with the methods of `fairturn.access.registry.KeyRegistry`."""

    def __init__(self, transport: SyncTransport, session: ServiceSession) -> None:
        self._transport = transport
        self._session = session
