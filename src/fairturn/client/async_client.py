"""`AsyncClient`: the queue of a service, for programs that run an event loop."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, closing
from datetime import datetime
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, Unpack, overload

from fairturn.access.keys import AccessKey, Role
from fairturn.access.registry import NewKey
from fairturn.client.administration import KeyExchanges, Operating
from fairturn.client.documents import Documents
from fairturn.client.exchange import Ask, Exchange, Pause, Step, Tries, Upload
from fairturn.client.problems import Answer, Broken
from fairturn.client.transport import (
    CHUNK_BYTES,
    answer_of,
    arguments_of,
    broken_by,
    connection,
    load_httpx,
    random_name,
)
from fairturn.client.upload import NewName, Progress
from fairturn.client.values import Me
from fairturn.explain.analysis import Audience, Explanation
from fairturn.model import (
    PAGE_MAX,
    Customer,
    CustomerPage,
    Document,
    Page,
    Receipt,
    Settings,
    State,
    Submission,
    Summary,
)
from fairturn.priority import Rule
from fairturn.validation.changes import UNCHANGED, SettingChanges, Unchanged
from fairturn.validation.filters import Filters

T = TypeVar("T")
Receipts = list[Receipt]
States = list[State | None]
Keys = list[AccessKey]


class AsyncClient:
    """A fair document queue at a url: `Client` with `await`. Files are read and written in threads,
    so that the event loop never waits for a disk."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        ca: str | None = None,
        timeout_s: float = 60.0,
        tries: Tries | None = None,
        allow_http: bool = False,
        pause: Callable[[float], Awaitable[object]] | None = None,
        new_name: NewName = random_name,
    ) -> None:
        made = connection(url, key, ca=ca, timeout_s=timeout_s, allow_http=allow_http)
        self._httpx = load_httpx()
        import anyio  # which httpx brings along

        self._http = self._httpx.AsyncClient(**made.options)
        self._timeout_s = timeout_s
        self._pause = pause or anyio.sleep
        self._in_thread = anyio.to_thread.run_sync
        self._asker = made.asker(tries)
        self._documents = Documents(self._asker, new_name)
        self._operating = Operating(self._asker)
        self.url = made.place.url
        self.keys = AsyncKeys(self._run, KeyExchanges(self._asker))

    def __repr__(self) -> str:
        return f"AsyncClient({self.url!r})"

    # ── Submitting ───────────────────────────────────────────────────────────────────────────────

    async def submit(
        self,
        customer: str | None = None,
        *,
        payload: Any = None,
        content: bytes | BinaryIO | None = None,
        file: str | os.PathLike[str] | None = None,
        name: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
        cost: float | None = None,
        due_at: datetime | int | None = None,
        parent: str | None = None,
        progress: Progress | None = None,
    ) -> Receipt:
        """Submit one document: a JSON payload, content from bytes or a binary stream, or a file.

        When this returns, the document is on stable storage of the service. A customer's key says
        by itself who the customer is; with another one it is named. A connection that breaks is
        tried again, and the document is stored once, with or without a `key`; only a stream that
        cannot be read twice is not tried again. Bytes are sent as they are read; `progress` hears
        how many are sent, and of how many. It is called in a thread.
        """
        submission = Submission(
            customer=customer or "",
            payload=payload,
            content=content,
            file=file,
            name=name,
            metadata=metadata,
            key=key,
            cost=cost,
            due_at=due_at,
            parent=parent,
        )
        return await self._run(self._documents.submit(customer, submission, progress))

    async def submit_many(
        self, submissions: Iterable[Submission], *, progress: Progress | None = None
    ) -> Receipts:
        """Submit all of the documents or none, in the order given; at most 10,000 and 32 MiB in one
        call. One alone may be of any size."""
        return await self._run(self._documents.submit_many(submissions, progress))

    async def wait_for_room(
        self, customer: str | None = None, n: int = 1, timeout_s: float | None = None
    ) -> bool:
        """Wait until `n` more documents would be accepted; False if there is no room then."""
        return await self._run(self._documents.wait_for_room(customer, n, timeout_s))

    async def has_room(self, customer: str | None = None, n: int = 1) -> bool:
        """Whether `n` more documents would be accepted now."""
        return await self._run(self._documents.has_room(customer, n))

    # ── Looking ───────────────────────────────────────────────────────────────────────────────────

    async def get(self, id: str) -> Document:
        """The document as it is now."""
        return await self._run(self._documents.get(id))

    async def payload(self, id: str) -> Any:
        """The JSON value that the document carries."""
        return await self._run(self._documents.payload(id))

    async def open(self, id: str) -> BinaryIO:
        """The content that the document carries, as a stream. All of it has come, to a temporary
        file if it is large, and was checked before."""
        return await self._run(self._documents.open(id))

    async def read(self, id: str) -> bytes:
        """The content that the document carries, whole."""
        return await self._run(self._documents.read(id))

    async def result(self, id: str) -> Any:
        """What the handler gave back for a completed document; with a file, the value beside it."""
        return await self._run(self._documents.result(id))

    async def open_result(self, id: str) -> BinaryIO:
        """The file that the handler gave back, as a stream; it is checked before."""
        return await self._run(self._documents.open_result(id))

    async def result_file_bytes(self, id: str) -> int | None:
        """The size of the file that the handler gave back; None if it gave none, or not yet."""
        return await self._run(self._documents.result_file_bytes(id))

    async def list(
        self, *, after: str | None = None, size: int = 100, **filters: Unpack[Filters]
    ) -> Page:
        """One page of the documents that match, the newest first; `after` is the `next` of the
        page before."""
        return await self._run(self._documents.list(after, size, filters))

    async def iterate(self, **filters: Unpack[Filters]) -> AsyncIterator[Document]:
        """All documents that match, the newest first."""
        after = None
        while True:
            documents, after = await self.list(after=after, size=PAGE_MAX, **filters)
            for document in documents:
                yield document
            if after is None:
                return

    async def wait(self, id: str, timeout_s: float | None = None) -> Document:
        """Wait until the document has ended, by long polls; `TimeoutError` if it has not."""
        return await self._run(self._documents.wait(id, timeout_s))

    async def explain(self, id: str, audience: Audience | str = Audience.OPERATOR) -> Explanation:
        """Return why the document is where it is. `fairturn.explain.sentences.tell` turns it into
        sentences, in any language. A customer's key gets only what a customer may see."""
        return await self._run(self._documents.explain(id, audience))

    # ── Changing the course ───────────────────────────────────────────────────────────────────────

    @overload
    async def cancel(self, ids: str) -> State: ...  # type: ignore[overload-overlap]
    @overload
    async def cancel(self, ids: Iterable[str]) -> States: ...
    async def cancel(self, ids: str | Iterable[str]) -> State | States:
        """End documents that have not begun, and ask running ones to stop; the state afterwards."""
        if not isinstance(ids, str):
            return await self._run(self._documents.cancel_many(ids))
        return await self._run(self._documents.cancel(ids))

    @overload
    async def retry(self, ids: str) -> None: ...  # type: ignore[overload-overlap]
    @overload
    async def retry(self, ids: Iterable[str]) -> States: ...
    async def retry(self, ids: str | Iterable[str]) -> States | None:
        """Let dead documents wait again, with their old priority and all their attempts."""
        if not isinstance(ids, str):
            return await self._run(self._documents.retry_many(ids))
        await self._run(self._documents.retry(ids))
        return None

    # ── Customers ─────────────────────────────────────────────────────────────────────────────────

    async def me(self) -> Me:
        """Who the access key says that one is; of a customer's, where the customer stands."""
        return await self._run(self._asker.me_now())

    async def customers(self, *, after: str | None = None, size: int = 100) -> CustomerPage:
        """Customers by name, with their counts and how many of their documents wait and run."""
        return await self._run(self._operating.customers(after, size))

    async def customer(self, name: str) -> Customer:
        """One customer."""
        return await self._run(self._operating.customer(name))

    async def set_customer(
        self,
        name: str,
        *,
        weight: float | Unchanged = UNCHANGED,
        limit: int | Unchanged | None = UNCHANGED,
        paused: bool | Unchanged = UNCHANGED,
    ) -> Customer:
        """Change a customer's share, its limit of running documents (None: no limit), or pause it.

        What is not given stays as it is. A name that is new becomes known by this.
        """
        return await self._run(self._operating.set_customer(name, weight, limit, paused))

    async def purge(self, customer: str) -> None:
        """Delete a customer with every document, setting, count and key; running work is lost."""
        await self._run(self._operating.purge(customer))

    # ── The queue itself ──────────────────────────────────────────────────────────────────────────

    async def summary(self) -> Summary:
        """How many documents wait in each priority, are delayed, and run."""
        return await self._run(self._operating.summary())

    async def settings(self) -> Settings:
        """The settings in force, the same for every process."""
        return await self._run(self._operating.settings())

    async def rule(self) -> Rule:
        """The priority rule in force; it needs no key."""
        return await self._run(self._operating.rule())

    async def configure(self, **changes: Unpack[SettingChanges]) -> Settings:
        """Change settings, for every process. Priorities and counts stay what they are."""
        return await self._run(self._operating.configure(changes))

    async def close(self) -> None:
        """Give back the connections. Calling it twice does no harm."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # ── Doing what an exchange says ──────────────────────────────────────────────────────────────

    async def _run(self, exchange: Exchange[T]) -> T:
        with closing(exchange):
            try:
                step = next(exchange)
                while True:
                    try:
                        given = await self._do(step)
                    except BaseException as error:
                        step = exchange.throw(error)  # who asked for it knows what it means
                    else:
                        step = exchange.send(given)
            except StopIteration as stop:
                result: T = stop.value
                return result

    async def _do(self, step: Step) -> Any:
        if isinstance(step, Ask):
            return await self._ask(step)
        if isinstance(step, Pause):
            return await self._pause(step.seconds)
        return await self._in_thread(step.do)

    async def _ask(self, ask: Ask) -> Answer | Broken:
        body = self._pieces(ask.body) if isinstance(ask.body, Upload) else ask.body
        try:
            request = self._http.build_request(**arguments_of(ask, self._timeout_s), content=body)
            async with aclosing(await self._http.send(request, stream=True)) as response:
                if ask.into is None or not response.is_success:
                    return answer_of(response, await response.aread())
                ask.into.begin()
                async for chunk in response.aiter_bytes(CHUNK_BYTES):
                    await self._in_thread(ask.into.write, chunk)
                return answer_of(response, b"")
        except self._httpx.RequestError as error:
            return broken_by(error)

    async def _pieces(self, upload: Upload) -> AsyncIterator[bytes]:
        pieces = upload.pieces()
        while (piece := await self._in_thread(next, pieces, None)) is not None:
            yield piece


class AsyncKeys:
    """Access keys, by the methods of `fairturn.access.registry.Keys`: for operators."""

    def __init__(
        self, run: Callable[[Exchange[Any]], Awaitable[Any]], exchanges: KeyExchanges
    ) -> None:
        self._run = run
        self._exchanges = exchanges

    async def make(
        self, role: Role | str, *, name: str = "", customer: str | None = None
    ) -> NewKey:
        """A new key. `shown` is the key itself; nobody can ask for it again."""
        made: NewKey = await self._run(self._exchanges.make(role, name, customer))
        return made

    async def list(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> Keys:
        """Keys by their ids, also those that have ended."""
        found: Keys = await self._run(self._exchanges.list(customer, after, size))
        return found

    async def rotate(self, id: str, *, overlap_s: float = 0.0) -> NewKey:
        """A new key in place of one, which ends after the overlap."""
        made: NewKey = await self._run(self._exchanges.rotate(id, overlap_s))
        return made

    async def revoke(self, id: str) -> AccessKey:
        """Let a key end now."""
        ended: AccessKey = await self._run(self._exchanges.revoke(id))
        return ended
