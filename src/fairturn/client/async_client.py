"""`AsyncClient`: a queue behind a service, for programs with an event loop."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
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
from fairturn.client.transport import AsyncTransport, connection_to, random_id
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


class AsyncClient:
    """`Client` with `await`: see there for each method. `settings` and `rule` are methods here.

    Files are read and written in threads, so that the event loop never waits for a disk; the
    `progress` of an upload is called in such a thread. If a task is cancelled during a submission,
    the document may still have been stored. It has more than 20 methods because `Client` does.
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
        self._run = self._transport.run
        self._session = ServiceSession(connection.endpoint, retry_policy or RetryPolicy())
        self._documents = DocumentOperations(self._session, new_id)
        self._admin = AdminOperations(self._session)
        self.keys = AsyncClientKeys(self._transport, KeyOperations(self._session))

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    # ── Submit ───────────────────────────────────────────────────────────────────────────────────

    async def submit(
        self,
        customer: str | None = None,
        *,
        progress: ProgressCallback | None = None,
        **fields: Unpack[SubmissionFields],
    ) -> Receipt:
        submission = Submission(customer or "", **fields)
        return await self._run(self._documents.submit(customer, submission, progress))

    async def submit_many(
        self, submissions: Iterable[Submission], *, progress: ProgressCallback | None = None
    ) -> Receipts:
        return await self._run(self._documents.submit_many(submissions, progress))

    async def wait_for_room(
        self, customer: str | None = None, n: int = 1, timeout_s: float | None = None
    ) -> bool:
        return await self._run(self._documents.wait_for_room(customer, n, timeout_s))

    async def has_room(self, customer: str | None = None, n: int = 1) -> bool:
        return await self._run(self._documents.has_room(customer, n))

    # ── Query ────────────────────────────────────────────────────────────────────────────────────

    async def get(self, id: str) -> Document:
        return await self._run(self._documents.get(id))

    async def payload(self, id: str) -> Any:
        return await self._run(self._documents.payload(id))

    async def open(self, id: str) -> BinaryIO:
        return await self._run(self._documents.open(id))

    async def read(self, id: str) -> bytes:
        return await self._run(self._documents.read(id))

    async def result(self, id: str) -> Any:
        return await self._run(self._documents.result(id))

    async def open_result(self, id: str) -> BinaryIO:
        return await self._run(self._documents.open_result(id))

    async def result_file_bytes(self, id: str) -> int | None:
        return await self._run(self._documents.result_file_bytes(id))

    async def list(
        self, *, after: str | None = None, size: int = 100, **filters: Unpack[Filters]
    ) -> Page:
        return await self._run(self._documents.list(after, size, filters))

    async def iterate(self, **filters: Unpack[Filters]) -> AsyncIterator[Document]:
        page = await self.list(size=PAGE_MAX, **filters)
        for document in page.documents:
            yield document
        while page.next is not None:
            page = await self.list(after=page.next, size=PAGE_MAX, **filters)
            for document in page.documents:
                yield document

    async def wait(self, id: str, timeout_s: float | None = None) -> Document:
        return await self._run(self._documents.wait(id, timeout_s))

    async def explain(self, id: str, audience: Audience | str = Audience.OPERATOR) -> Explanation:
        return await self._run(self._documents.explain(id, audience))

    # ── Cancel, retry ────────────────────────────────────────────────────────────────────────────

    @overload
    async def cancel(self, ids: str) -> State: ...  # type: ignore[overload-overlap]
    @overload
    async def cancel(self, ids: Iterable[str]) -> States: ...
    async def cancel(self, ids: str | Iterable[str]) -> State | States:
        return await self._run(self._documents.cancel(ids))

    @overload
    async def retry(self, ids: str) -> None: ...  # type: ignore[overload-overlap]
    @overload
    async def retry(self, ids: Iterable[str]) -> States: ...
    async def retry(self, ids: str | Iterable[str]) -> States | None:
        return await self._run(self._documents.retry(ids))

    # ── Customers ────────────────────────────────────────────────────────────────────────────────

    async def me(self) -> Identity:
        return await self._run(self._session.fetch_identity())

    async def customers(self, *, after: str | None = None, size: int = 100) -> CustomerPage:
        return await self._run(self._admin.customers(after, size))

    async def customer(self, name: str) -> Customer:
        return await self._run(self._admin.customer(name))

    async def set_customer(
        self,
        name: str,
        *,
        weight: float | Unchanged = UNCHANGED,
        limit: int | Unchanged | None = UNCHANGED,
        paused: bool | Unchanged = UNCHANGED,
        bytes_max: int | Unchanged | None = UNCHANGED,
    ) -> Customer:
        return await self._run(self._admin.set_customer(name, weight, limit, paused, bytes_max))

    async def purge(self, customer: str) -> None:
        await self._run(self._admin.purge(customer))

    # ── The whole queue ──────────────────────────────────────────────────────────────────────────

    async def summary(self) -> Summary:
        return await self._run(self._admin.summary())

    async def settings(self) -> Settings:
        return await self._run(self._admin.settings())

    async def rule(self) -> Rule:
        return await self._run(self._admin.rule())

    async def configure(self, **changes: Unpack[SettingChanges]) -> Settings:
        return await self._run(self._admin.configure(changes))

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class AsyncClientKeys:
    """`ClientKeys` with `await`."""

    def __init__(self, transport: AsyncTransport, operations: KeyOperations) -> None:
        self._run = transport.run
        self._operations = operations

    async def make(
        self, role: Role | str, *, name: str = "", customer: str | None = None
    ) -> NewKey:
        return await self._run(self._operations.make(role, name, customer))

    async def list(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> AccessKeys:
        return await self._run(self._operations.list(customer, after, size))

    async def rotate(self, id: str, *, overlap_s: float = 0.0) -> NewKey:
        return await self._run(self._operations.rotate(id, overlap_s))

    async def revoke(self, id: str) -> AccessKey:
        return await self._run(self._operations.revoke(id))
