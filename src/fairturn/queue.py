"""The front door: submit documents, look at them, wait for them, and run the queue.

A `Queue` is a store, the contents beside it, and nothing else: every call reads or writes there, so
that several of them, in several processes, are one queue.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from operator import attrgetter
from types import TracebackType
from typing import Any, BinaryIO, Self, TypedDict, Unpack, overload

from fairturn import crash, ids
from fairturn.clock import Clock, SystemClock, stopwatch
from fairturn.contents import local
from fairturn.contents.local import DISCARD_S, Contents
from fairturn.errors import NotFound, Refused, StoreError, StoreFull, WrongState
from fairturn.explain.analysis import Audience, Explanation, explain
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    ENDED,
    PAGE_MAX,
    SUBMIT_DOCUMENTS_MAX,
    Customer,
    CustomerPage,
    CustomerSettings,
    Document,
    NewDocument,
    Page,
    Pruned,
    Receipt,
    Settings,
    State,
    Stored,
    Submission,
    Summary,
)
from fairturn.priority import Rule
from fairturn.stores.contract import Store
from fairturn.validation import text
from fairturn.validation.changes import (
    UNCHANGED,
    SettingChanges,
    Unchanged,
    changed,
    customer_changes,
)
from fairturn.validation.filters import Filters, page_size, to_filter
from fairturn.validation.submission import Encoder

# Contents are swept an hour after they were written; a call that takes this long gives up before.
SUBMIT_S_MAX = 1_800.0
_LATE_FROM = 50  # documents of a call that are encoded while a store is at work on others
_WAIT_S = 3_600.0  # at a time, because a wait without an end is too long for some clocks
_REPEATED = attrgetter("repeated")
_BATCH = 1_000  # of documents to cancel or retry in one transaction
# What a store raises when it has stored nothing. After another error the documents may have been
# stored all the same, for example if a connection was lost during the commit: the sweep decides.
_STORED_NOTHING = (Refused, NotFound, StoreFull, ValueError, TypeError)


class SubmissionFields(TypedDict, total=False):
    """What `submit` takes beside the customer."""

    payload: Any
    content: bytes | BinaryIO | None
    file: str | os.PathLike[str] | None
    name: str | None
    metadata: Mapping[str, Any] | None
    key: str | None
    cost: float | None
    due_at: datetime | int | None
    parent: str | None
    connection: Any


Receipts = list[Receipt]
States = list[State | None]


class Queue:
    """A fair document queue."""

    def __init__(self, store: Store, contents: Contents, *, clock: Clock | None = None) -> None:
        self.store = store
        self.contents = contents
        self._clock = clock or SystemClock()

    # ── Submitting ───────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        customer: str,
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
        connection: Any = None,
    ) -> Receipt:
        """Accept one document: a JSON payload, content from bytes or a binary stream, or a file.

        When this returns, the document is on stable storage. A file is copied in. The same `key`
        within 24 hours gives the first receipt again; with another content, metadata, cost or due
        time it raises `KeyReused`. Too many waiting documents raise `QueueFull`. With every kind of
        `Refused` nothing was stored and the customer's count did not move. After a `StoreError`
        submit again with the same key: the document is there once, whatever had happened.
        """
        submission = Submission(
            customer=customer,
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
        return self._submit([Encoder(self.contents).encode(submission)], connection)[0]

    async def asubmit(self, customer: str, **fields: Unpack[SubmissionFields]) -> Receipt:
        """`submit` for an application that runs an event loop: in a thread, so that the loop does
        not wait for the disk. Who is cancelled meanwhile may find the document stored."""
        from asyncio import to_thread

        return await to_thread(self.submit, customer, **fields)

    def submit_many(self, submissions: Iterable[Submission], *, connection: Any = None) -> Receipts:
        """Accept all of the documents or none, in the order given; at most 10,000 in one call."""
        documents = self._encode_all(submissions)
        return self._submit(documents, connection) if documents else []

    def _encode_all(self, submissions: Iterable[Submission]) -> list[NewDocument]:
        begun = stopwatch()
        encode = Encoder(self.contents).encode
        documents: list[NewDocument] = []
        try:
            for submission in submissions:
                if len(documents) == SUBMIT_DOCUMENTS_MAX:
                    raise ValueError(
                        f"at most {SUBMIT_DOCUMENTS_MAX:,} documents are accepted in one call"
                    )
                try:
                    documents.append(encode(submission))
                except TypeError as error:
                    raise TypeError(f"submission {len(documents)}: {error}") from error
                except ValueError as error:
                    raise ValueError(f"submission {len(documents)}: {error}") from error
            if stopwatch() - begun > SUBMIT_S_MAX:
                raise Refused(
                    f"copying the contents of {len(documents):,} documents took more than "
                    f"{SUBMIT_S_MAX / 60:g} minutes; submit fewer in one call"
                )
        except BaseException:
            self._take_back(documents)
            raise
        return documents

    def _submit(self, documents: list[NewDocument], connection: Any) -> Receipts:
        try:
            receipts = self.store.submit(documents, connection=connection)
        except _STORED_NOTHING:
            self._take_back(documents, connection)
            raise
        if any(map(_REPEATED, receipts)):
            answered = zip(documents, receipts, strict=True)
            replayed = [document for document, receipt in answered if receipt.repeated]
            self._take_back(replayed, connection)
        return receipts

    def _take_back(self, documents: list[NewDocument], connection: Any = None) -> None:
        names = [d.content_name for d in documents if d.content_name is not None]
        # The caller's own transaction is in flight until this call returns.
        self.discard(names, timeout_s=DISCARD_S if connection is None else 0.0)

    def discard(self, content_names: list[str], *, timeout_s: float = DISCARD_S) -> None:
        """Delete contents of a submission or an attempt that was not accepted, unless a document
        refers to them. The next sweep deletes what cannot be deleted now; no error of the store or
        the contents is raised."""
        unreferenced = partial(self.store.unreferenced, timeout_s=timeout_s)
        with suppress(StoreError):
            local.delete_unreferenced(self.contents, unreferenced, content_names)

    def wait_for_room(
        self, customer: str | None = None, n: int = 1, timeout_s: float | None = None
    ) -> bool:
        """Wait until `n` more documents, of this customer, would be accepted: after `QueueFull`.

        False if there is no room when the time is over. Another producer may be faster, so a
        submission that follows can be refused again.
        """
        return any(self.has_room(customer, n) for _ in self._looks(timeout_s))

    def has_room(self, customer: str | None = None, n: int = 1) -> bool:
        """Whether `n` more documents, of this customer, would be accepted now."""
        if customer is not None:
            text.identity(customer, "customer", CUSTOMER_BYTES_MAX)
        if n < 1:
            raise ValueError(f"n is {n}; it must be at least 1")
        settings = self.store.settings()
        maximum = settings.waiting_max
        if customer is not None:
            maximum = min(maximum, settings.waiting_per_customer_max)
        if n > maximum:
            raise ValueError(f"n is {n:,}; more than {maximum:,} documents may never wait")
        summary = self.store.summary()
        if summary.waiting + summary.delayed + n > settings.waiting_max:
            return False
        if customer is None:
            return True
        return all(
            known.waiting + known.delayed + n <= settings.waiting_per_customer_max
            for known in self.store.customers(names=[customer]).customers
        )

    # ── Looking ──────────────────────────────────────────────────────────────────────────────────

    def get(self, id: str) -> Document:
        """The document as it is now."""
        return self._stored(id).document

    def payload(self, id: str) -> Any:
        """The JSON value that the document carries."""
        document, body, *_ = self._stored(id)
        return local.payload_of(document, body, self.contents)

    def open(self, id: str) -> BinaryIO:
        """The content that the document carries, as a stream; it is checked before."""
        document, body, *_ = self._stored(id)
        return local.open_content(document, body, self.contents)

    def read(self, id: str) -> bytes:
        """The content that the document carries, whole."""
        with self.open(id) as stream:
            return stream.read()

    def result(self, id: str) -> Any:
        """What the handler gave back for a completed document; with a file, the value beside it."""
        result = self._completed(id).result
        return None if result is None else json.loads(result)

    def open_result(self, id: str) -> BinaryIO:
        """The file that the handler gave back, as a stream; it is checked before. `NotFound` if it
        gave none."""
        content = self._completed(id).result_content
        if content is None:
            raise NotFound(f"document {id} has no file as its result; see result()")
        return self.contents.open(content)

    def result_file_bytes(self, id: str) -> int | None:
        """The size of the file that the handler gave back; None if it gave none, or not yet."""
        content = self._stored(id).result_content
        return None if content is None else content.size_bytes

    def _completed(self, id: str) -> Stored:
        stored = self._stored(id)
        document = stored.document
        if document.state is not State.COMPLETED:
            raise not_completed(document)
        return stored

    def _stored(self, id: str) -> Stored:
        stored = self.store.read(id)
        if stored is None:
            raise NotFound(f"there is no document {id!r}")
        return stored

    def list(
        self, *, after: str | None = None, size: int = 100, **filters: Unpack[Filters]
    ) -> Page:
        """One page of the documents that match, the newest first; `after` is the `next` of the
        page before."""
        if after is not None and ids.decode(after, 0) is None:
            raise ValueError(f"after is {after!r}; it must be the `next` of a page")
        return self.store.find(to_filter(filters), after=after, size=page_size(size))

    def iterate(self, **filters: Unpack[Filters]) -> Iterator[Document]:
        """All documents that match, the newest first; those that come meanwhile are not among
        them."""
        wanted = to_filter(filters)
        after = None
        while True:
            documents, after = self.store.find(wanted, after=after, size=PAGE_MAX)
            yield from documents
            if after is None:
                return

    def wait(self, id: str, timeout_s: float | None = None) -> Document:
        """Wait until the document has ended: completed, dead or cancelled.

        `TimeoutError` says in which state it still is when the time is over.
        """
        for _ in self._looks(timeout_s):
            document = self.get(id)
            if document.ended:
                return document
        raise TimeoutError(f"document {id} is still {document.state} after {timeout_s} s")

    def explain(self, id: str, audience: Audience | str = Audience.OPERATOR) -> Explanation:
        """Why the document has its priority, what is before it, and when it will start; or what
        happened to it. `fairturn.explain.sentences.tell` makes sentences of it.

        What is made for a `"customer"` says of other customers only how many they are.
        """
        audience = Audience(audience)
        situation = self.store.situation(id)
        if situation is None:
            raise NotFound(f"there is no document {id!r}")
        return explain(situation, audience)

    def _looks(self, timeout_s: float | None) -> Iterator[None]:
        """Once at once, then again whenever the store has changed, until the time is over."""
        until = None if timeout_s is None else stopwatch() + timeout_s
        while True:
            version = self.store.version()
            yield
            left = _WAIT_S if until is None else min(_WAIT_S, until - stopwatch())
            if left <= 0:
                return
            self.store.wait(version, left)

    # ── Changing the course ──────────────────────────────────────────────────────────────────────

    # A text is a collection of texts too; who has one id in it means one document.
    @overload
    def cancel(self, ids: str) -> State: ...  # type: ignore[overload-overlap]
    @overload
    def cancel(self, ids: Iterable[str]) -> States: ...
    def cancel(self, ids: str | Iterable[str]) -> State | States:
        """End documents that have not begun, and ask running ones to stop.

        Answers with the state afterwards: a running document stays `running` until its worker
        hears of it. For one id, `NotFound` and `WrongState` (it has ended otherwise) are raised;
        in the answer for several, None says that there is no such document.
        """
        if not isinstance(ids, str):
            return [state for batch in _batches(ids) for state in self.store.cancel(batch)]
        (state,) = self.store.cancel([ids])
        if state is None:
            raise NotFound(f"there is no document {ids!r}")
        if state in ENDED and state is not State.CANCELLED:
            raise WrongState(f"document {ids} is {state} already; it cannot be cancelled")
        return state

    @overload
    def retry(self, ids: str) -> None: ...  # type: ignore[overload-overlap]
    @overload
    def retry(self, ids: Iterable[str]) -> States: ...
    def retry(self, ids: str | Iterable[str]) -> States | None:
        """Let dead documents wait again, with their old priority and all their attempts.

        A repeated call is harmless: a document that waits and has used no attempts stays as it is.
        For one id, `NotFound` and `WrongState` (it is in another state) are raised. For several,
        the answer is the state of each before: those that were `dead` wait again, None says that
        there is no such document, and all others stay as they are.
        """
        if not isinstance(ids, str):
            return [state for batch in _batches(ids) for state in self.store.retry(batch)]
        (state,) = self.store.retry([ids])
        if state is None:
            raise NotFound(f"there is no document {ids!r}")
        if state is State.DEAD or (state is State.WAITING and self._is_unattempted(ids)):
            return None
        raise WrongState(f"document {ids} is {state}; only a dead one can be tried again")

    def _is_unattempted(self, id: str) -> bool:
        """Whether a document that waited a moment ago had used no attempts, as after a retry. A
        worker may have claimed it since."""
        document = self.get(id)
        return document.attempts == (0 if document.state is State.WAITING else 1)

    # ── Customers ────────────────────────────────────────────────────────────────────────────────

    def customers(self, *, after: str | None = None, size: int = 100) -> CustomerPage:
        """Customers by name, with their counts and how many of their documents wait and run."""
        if after is not None:
            text.identity(after, "after", CUSTOMER_BYTES_MAX)
        return self.store.customers(after=after, size=page_size(size))

    def customer(self, name: str) -> Customer:
        """One customer. Who is idle for long and has no settings may be forgotten: `NotFound`."""
        text.identity(name, "customer", CUSTOMER_BYTES_MAX)
        for customer in self.store.customers(names=[name]).customers:
            return customer
        raise NotFound(f"there is no customer {name!r}")

    def set_customer(
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
        text.identity(name, "customer", CUSTOMER_BYTES_MAX)
        changes = customer_changes(weight, limit, paused)
        while True:
            known = self.store.customers(names=[name]).customers
            settings = known[0].settings if known else CustomerSettings()
            # Repeated if another process has changed the settings in between.
            if self.store.adjust(name, replace(settings, **changes), expected=settings):
                return self.customer(name)

    def purge(self, customer: str) -> None:
        """Delete a customer with every document, setting and count; running work is lost."""
        name = self.customer(customer).name
        names = self.store.purge(name)
        crash.point("prune-after-delete")
        # A submission whose reply was lost may have stored its document again since.
        local.delete_unreferenced(self.contents, self.store.unreferenced, names)

    # ── The queue itself ─────────────────────────────────────────────────────────────────────────

    def summary(self) -> Summary:
        """How many documents wait in each priority, are delayed, and run."""
        return self.store.summary()

    @property
    def settings(self) -> Settings:
        """The settings in force, the same for every process."""
        return self.store.settings()

    @property
    def rule(self) -> Rule:
        """The priority rule in force."""
        return self.settings.rule

    def configure(self, **changes: Unpack[SettingChanges]) -> Settings:
        """Change settings, for every process. Priorities and counts stay what they are."""
        while True:
            settings = self.store.settings()
            # Repeated if another process has changed the settings in between.
            if self.store.configure(changed(settings, changes), expected=settings):
                return changed(settings, changes)

    def prune(self, progress: Callable[[int], None] = lambda batches: None) -> Pruned:
        """Forget what nobody needs any more: ended documents past their age, old keys, idle
        customers, contents without a document. `progress` hears how many batches are done.

        Answers with how many documents were past their age, and how many contents were deleted.
        """
        documents = self._past_their_age()
        batches = contents = 0
        while (names := self.store.prune()) is not None:
            crash.point("prune-after-delete")
            self.contents.delete(names)
            contents += len(names)
            batches += 1
            progress(batches)
        return Pruned(documents, contents + self.sweep())

    def _past_their_age(self) -> int:
        settings, now = self.settings, self._clock.now()
        number = 0
        for state in ENDED:
            before = now - settings.kept_us(state)
            if before > 0:
                number += sum(
                    document.ended_at is not None and document.ended_at < before
                    for document in self.iterate(states=state, submitted_before=before)
                )
        return number

    def sweep(self) -> int:
        """Delete contents, left by crashes, that no document refers to; answers how many."""
        return local.sweep(self.contents, self.store.unreferenced, self._clock.now())

    def close(self) -> None:
        """Give back files and connections. Calling it twice does no harm."""
        self.store.close()
        self.contents.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def not_completed(document: Document) -> WrongState:
    """What there is to say about the result of a document that has none."""
    why = f" ({document.error})" if document.error else ""
    return WrongState(
        f"document {document.id} is {document.state}{why}; only a completed one has a result"
    )


def _batches(wanted: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(wanted)
    while batch := list(islice(rest, _BATCH)):
        yield batch
