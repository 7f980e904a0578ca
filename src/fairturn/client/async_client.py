"""`AsyncClient`: a queue behind a service, for programs with an event loop."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import datetime
from typing import Self, Unpack, overload

from fairturn.client.administration import AdminOperations, KeyOperations
from fairturn.client.documents import DocumentOperations, States
from fairturn.client.request import RetryPolicy, ServiceSession
from fairturn.client.transport import AsyncTransport, connection_to, random_id
from fairturn.client.upload import NewId
from fairturn.model import PAGE_MAX, Document, Settings, State
from fairturn.priority import Rule
from fairturn.validation.filters import Filters


class AsyncClient(DocumentOperations, AdminOperations):
    """`Client` with `await`: see there for each method. `settings` and `rule` are methods here.

    Files are read and written in threads, so that the event loop never waits for a disk; the
    `progress` of an upload is called in such a thread. If a task is cancelled during a submission,
    the document may still have been stored.
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
        sleep: Callable[[float], Awaitable[object]] | None = None,
        new_id: NewId = random_id,
    ) -> None:
        connection = connection_to(url, key, ca=ca, timeout_s=timeout_s, allow_http=allow_http)
        self.url = connection.endpoint.url
        self._transport = AsyncTransport(connection, sleep)
        self._session = ServiceSession(connection.endpoint, retry_policy or RetryPolicy())
        self._new_id = new_id
        self.keys = AsyncClientKeys(self._transport, self._session)

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    async def iterate(self, **filters: Unpack[Filters]) -> AsyncIterator[Document]:
        page = await self.list(size=PAGE_MAX, **filters)
        for document in page.documents:
            yield document
        while page.next is not None:
            page = await self.list(after=page.next, size=PAGE_MAX, **filters)
            for document in page.documents:
                yield document

    @overload
    async def cancel(self, ids: str) -> State: ...  # type: ignore[overload-overlap]
    @overload
    async def cancel(self, ids: Iterable[str]) -> States: ...
    async def cancel(self, ids: str | Iterable[str]) -> State | States:
        return await self._transport.run(self._cancel, ids)

    @overload
    async def retry(  # type: ignore[overload-overlap]
        self,
        ids: str,
        *,
        expires_at: datetime | int | None = None,
        expires_in_s: float | None = None,
    ) -> None: ...
    @overload
    async def retry(
        self,
        ids: Iterable[str],
        *,
        expires_at: datetime | int | None = None,
        expires_in_s: float | None = None,
    ) -> States: ...
    async def retry(
        self,
        ids: str | Iterable[str],
        *,
        expires_at: datetime | int | None = None,
        expires_in_s: float | None = None,
    ) -> States | None:
        return await self._transport.run(self._retry, ids, expires_at, expires_in_s)

    async def settings(self) -> Settings:
        return await self._transport.run(self._settings)

    async def rule(self) -> Rule:
        return await self._transport.run(self._rule)

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class AsyncClientKeys(KeyOperations):
    """`ClientKeys` with `await`."""

    def __init__(self, transport: AsyncTransport, session: ServiceSession) -> None:
        self._transport = transport
        self._session = session
