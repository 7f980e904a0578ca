"""The API of a queue.

A `Queue` has no state but its store and contents, so any number of instances, in any number of
processes, are one queue.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, Self, Unpack, overload

from fairturn import config
from fairturn.access.registry import KeyRegistry
from fairturn.clock import Clock, SystemClock, microseconds, stopwatch
from fairturn.contents import local
from fairturn.contents.local import DISCARD_S, Contents
from fairturn.errors import NotFound, Refused, StoreError, StoreFull, WrongState
from fairturn.explain.analysis import Audience, Explanation, explain
from fairturn.explain.snapshot import ALIVE_US
from fairturn.model import (
    CUSTOMER_BYTES_MAX,
    ENDED,
    NO_CAPS,
    NO_CHECKPOINTS,
    NO_NEEDS,
    NO_PROGRESS,
    PAGE_MAX,
    RESUMABLE_BYTES_MAX,
    SUBMIT_DOCUMENTS_MAX,
    AttemptRecord,
    Claimed,
    Customer,
    CustomerPage,
    CustomerSettings,
    Document,
    Fence,
    Kind,
    KindSettings,
    NewDocument,
    Outcome,
    Page,
    Progress,
    Pruned,
    Receipt,
    Renewed,
    ServiceOutage,
    SettingChanges,
    Settings,
    State,
    Stored,
    Submission,
    SubmissionFields,
    Summary,
)
from fairturn.priority import Rule
from fairturn.stores import crash, ids
from fairturn.stores.contract import Checkable, Interruptible, QueryStore, QueueStore
from fairturn.validation import text
from fairturn.validation.changes import UNCHANGED, Unchanged, changed, setting_changes
from fairturn.validation.filters import Filters, page_size, to_filter
from fairturn.validation.submission import SubmissionEncoder, expiry

# The sweep deletes unreferenced contents after an hour; a longer call must fail before.
SUBMIT_S_MAX = 1_800.0
_WAIT_S = 3_600.0  # of one wait: some clocks reject an infinite timeout
_BATCH = 1_000  # documents to cancel or retry in one transaction
# Errors after which nothing was stored. After any other, such as a connection lost during the
# commit, the documents may have been stored, and their contents are left to the sweep.
_STORED_NOTHING = (Refused, NotFound, StoreFull, ValueError, TypeError)


Receipts = list[Receipt]
States = list[State | None]
Fences = list[Fence]
Kinds = list[Kind]
Attempts = list[AttemptRecord]
Outages = list[ServiceOutage]


class Queue:
    """A fair document queue in a database.

    `Queue("documents.db")` opens or creates an SQLite file, with a folder `documents.db.contents`
    for documents of more than 64 KiB. `Queue(":memory:")` ends with its process. Settings given as
    keywords apply to a new queue; with an existing queue, a keyword that differs from its settings
    raises `SettingsConflict`.

    `synchronous="NORMAL"` is faster and may lose the last documents in a power cut;
    `allow_network=True` permits a file on a network file system, which is slow and risks
    corruption. `contents_shared=True` gives the group of the contents folder access to it.

    `Queue("postgresql://...")` opens the schema `fairturn`, or `schema`, of a PostgreSQL database,
    which is created or migrated unless `migrate=False`. Documents of more than 64 KiB need
    `contents=Folder(...)`, shared by all machines, or `contents=Bucket("s3://...")`. `listen_url`
    is a direct connection for LISTEN, for use with a connection pooler.

    It has more than 20 methods because it is the one object that users hold. `queries` has the
    reads of pages and metrics, `keys` the access keys of the service.
    """

    def __init__(
        self,
        database: str | os.PathLike[str] | QueueStore,
        *,
        contents: Contents | None = None,
        contents_shared: bool = False,
        clock: Clock | None = None,
        synchronous: str = "FULL",
        allow_network: bool = False,
        migrate: bool = True,
        listen_url: str | None = None,
        schema: str | None = None,
        **settings: Unpack[SettingChanges],
    ) -> None:
        wanted = changed(Settings(), settings)
        if contents is not None and contents_shared:
            raise ValueError(
                "contents_shared applies only to the default folder, and contents was given; "
                "use contents=Folder(..., shared=True)"
            )
        if isinstance(database, str | os.PathLike):
            store = config.open_store(
                os.fspath(database),
                wanted,
                clock=clock,
                synchronous=synchronous,
                allow_network=allow_network,
                migrate=migrate,
                listen_url=listen_url,
                schema=schema,
            )
        else:
            store = database
        try:
            config.refuse_conflict(store.settings(), wanted, settings)
            self.contents = contents or config.contents_of(store, clock, shared=contents_shared)
        except BaseException:
            if store is not database:
                store.close()
            raise
        self.store = store
        self.queries: QueryStore = store
        self.keys = KeyRegistry(store, clock=clock)
        self._clock = clock or SystemClock()

    # ── Submit ───────────────────────────────────────────────────────────────────────────────────

    def submit(
        self, customer: str, *, connection: Any = None, **fields: Unpack[SubmissionFields]
    ) -> Receipt:
        """Submit one document: a JSON payload, content from bytes or a binary stream, or a file.

        The document is durable when this returns; a file is copied. The idempotency `key` is valid
        for 24 hours: a submission with the same key is replayed and returns the first receipt.

        Raises `KeyReused` if the key belongs to a document that differs in more than name and
        parent, `QueueFull` if too many documents wait, and `QuotaExceeded` if the customer's stored
        documents have too many bytes, and `ExpiryPassed` if the document would have expired
        already. After these and every other `Refused`, nothing was stored and the customer's count
        is unchanged. After a `StoreError`, submit again
        with the same key: the document is stored once.
        """
        submission = Submission(customer, **fields)
        return self._submit([self._encoder().encode(submission)], connection)[0]

    async def asubmit(
        self, customer: str, *, connection: Any = None, **fields: Unpack[SubmissionFields]
    ) -> Receipt:
        """`submit` in a thread, for an application with an event loop. If the task is cancelled,
        the document may still be stored."""
        from asyncio import to_thread

        return await to_thread(self.submit, customer, connection=connection, **fields)

    def submit_many(self, submissions: Iterable[Submission], *, connection: Any = None) -> Receipts:
        """Submit all of the documents or none, in order; at most 10,000 in one call."""
        documents = self._encode_all(submissions)
        return self._submit(documents, connection) if documents else []

    def _encoder(self) -> SubmissionEncoder:
        return SubmissionEncoder(self.contents, self._clock)

    def _encode_all(self, submissions: Iterable[Submission]) -> list[NewDocument]:
        begun = stopwatch()
        encode = self._encoder().encode
        documents: list[NewDocument] = []
        try:
            for submission in submissions:
                if len(documents) == SUBMIT_DOCUMENTS_MAX:
                    raise ValueError(
                        f"at most {SUBMIT_DOCUMENTS_MAX:,} documents are accepted in one call"
                    )
                try:
                    documents.append(encode(submission))
                except (TypeError, ValueError) as error:
                    kind = TypeError if isinstance(error, TypeError) else ValueError
                    raise kind(f"submission {len(documents)}: {error}") from error
            if stopwatch() - begun > SUBMIT_S_MAX:
                raise Refused(
                    f"copying the contents of {len(documents):,} documents took more than "
                    f"{SUBMIT_S_MAX / 60:g} minutes; submit fewer in one call"
                )
        except BaseException:
            self._discard_contents(documents)
            raise
        return documents

    def _submit(self, documents: list[NewDocument], connection: Any) -> Receipts:
        try:
            receipts = self.store.submit(documents, connection=connection)
        except _STORED_NOTHING:
            self._discard_contents(documents, connection)
            raise
        pairs = zip(documents, receipts, strict=True)
        replayed = [document for document, receipt in pairs if receipt.replayed]
        if replayed:
            self._discard_contents(replayed, connection)
        return receipts

    def _discard_contents(self, documents: list[NewDocument], connection: Any = None) -> None:
        names = [d.content_name for d in documents if d.content_name is not None]
        # The caller's own transaction stays open until this call returns: do not wait for it.
        self.discard(names, timeout_s=DISCARD_S if connection is None else 0.0)

    def discard(self, content_names: list[str], *, timeout_s: float = DISCARD_S) -> None:
        """Delete contents of a rejected submission or attempt, unless a document refers to them.

        Errors of the store and the contents are ignored: the next sweep deletes the rest.
        """
        unreferenced = partial(self.store.unreferenced, timeout_s=timeout_s)
        with suppress(StoreError):
            local.delete_unreferenced(self.contents, unreferenced, content_names)

    def wait_for_room(
        self, customer: str | None = None, n: int = 1, timeout_s: float | None = None
    ) -> bool:
        """Wait until `n` more documents, of this customer, would be accepted; False on timeout.

        Another producer may be faster, so the next submission can still raise `QueueFull`.
        """
        return any(self.has_room(customer, n) for _ in self._polls(timeout_s))

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
            raise ValueError(f"n is {n:,}; it must be at most {maximum:,}, the limit of the queue")
        return n <= room_of(self, customer)

    # ── Query ────────────────────────────────────────────────────────────────────────────────────

    def get(self, id: str) -> Document:
        """Return the document; raises `NotFound`, like all methods with an id."""
        return self._stored(id).document

    def payload(self, id: str) -> Any:
        """Return the payload of the document; raises `ValueError` if it has content."""
        document, body, *_ = self._stored(id)
        return local.payload_of(document, body, self.contents)

    def open(self, id: str) -> BinaryIO:
        """Open the content of the document, after verifying its SHA-256.

        Raises `ValueError` if it has a payload, `ContentDamaged` if it does not match.
        """
        document, body, *_ = self._stored(id)
        return local.open_content(document, body, self.contents)

    def read(self, id: str) -> bytes:
        """Return the content of the document, verified as in `open`."""
        with self.open(id) as stream:
            return stream.read()

    def result(self, id: str) -> Any:
        """Return the value that the handler returned, also beside a file.

        Raises `WrongState` if the document is not completed.
        """
        result = self._completed(id).result
        return None if result is None else json.loads(result)

    def open_result(self, id: str) -> BinaryIO:
        """Open the file that the handler returned, after verifying its SHA-256.

        Raises `NotFound` if it returned none, `WrongState` if the document is not completed.
        """
        content = self._completed(id).result_content
        if content is None:
            raise NotFound(f"document {id} has no result file; call result()")
        return self.contents.open(content)

    def result_file_bytes(self, id: str) -> int | None:
        """Return the size of the file that the handler returned; None if there is none."""
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

    def attempts(self, id: str, *, values: bool = False) -> Attempts:
        """Return the attempts of the document that failed, lost their lease or ended a step, oldest
        first; with `values`, also the values of its steps, as JSON text."""
        found = self.store.attempts(id, values=values)
        if found is None:
            raise NotFound(f"there is no document {id!r}")
        return found

    def list(
        self, *, after: str | None = None, size: int = 100, **filters: Unpack[Filters]
    ) -> Page:
        """Return one page of the documents that match, newest first.

        `after` is the `next` of the previous page.
        """
        if after is not None and not ids.is_id(after):
            raise ValueError(f"after is {after!r}; it must be the `next` of a page")
        return self.store.find(to_filter(filters), after=after, size=page_size(size))

    def iterate(self, **filters: Unpack[Filters]) -> Iterator[Document]:
        """Iterate over all documents that match, newest first, without later submissions."""
        wanted = to_filter(filters)
        after = None
        while True:
            documents, after = self.store.find(wanted, after=after, size=PAGE_MAX)
            yield from documents
            if after is None:
                return

    def wait(self, id: str, timeout_s: float | None = None) -> Document:
        """Wait until the document has ended, and return it.

        Raises `TimeoutError` after `timeout_s`.
        """
        for _ in self._polls(timeout_s):
            document = self.get(id)
            if document.ended:
                return document
        raise TimeoutError(f"document {id} is still {document.state} after {timeout_s} s")

    def explain(self, id: str, audience: Audience | str = Audience.OPERATOR) -> Explanation:
        """Return why the document has its priority, the documents ahead of it and when it is
        expected to start; or how it ended. `fairturn.explain.sentences.tell` renders it as text.

        For the audience `"customer"`, other customers are counted but not named.
        """
        audience = Audience(audience)
        snapshot = self.store.snapshot(id)
        if snapshot is None:
            raise NotFound(f"there is no document {id!r}")
        return explain(snapshot, audience)

    def _polls(self, timeout_s: float | None) -> Iterator[None]:
        """Yield at once, then after each change of the store, until the timeout."""
        until = None if timeout_s is None else stopwatch() + timeout_s
        while True:
            version = self.store.version()
            yield
            left = _WAIT_S if until is None else min(_WAIT_S, until - stopwatch())
            if left <= 0:
                return
            self.store.wait(version, left)

    # ── Claim, renew, finish ─────────────────────────────────────────────────────────────────────

    @property
    def single_writer(self) -> bool:
        """Whether only one transaction can write at a time, as in an SQLite file."""
        return self.store.single_writer

    def claim(
        self,
        n: int = 1,
        *,
        worker: str,
        lease_s: float,
        kinds: Sequence[str] | None = None,
        at_most: Mapping[str, int] = NO_CAPS,
        outcomes: Sequence[Outcome] = (),
        synced: bool = True,
    ) -> Claimed:
        """Record the outcomes, then claim up to `n` documents of these kinds (None: of every kind)
        in the order of service; of a kind in `at_most`, at most that many.

        `Worker` calls this. A claim is valid until its lease expires: `renew` it, and `finish` it
        with one outcome. With `synced=False` a power cut may undo the claim until `sync` returns.
        """
        return self.store.claim(
            n,
            worker=worker,
            lease_us=microseconds(lease_s),
            kinds=kinds,
            at_most=at_most,
            outcomes=outcomes,
            synced=synced,
        )

    def renew(
        self,
        fences: Sequence[Fence],
        *,
        lease_s: float,
        progress: Mapping[Fence, Progress] = NO_PROGRESS,
        checkpoints: Mapping[Fence, str] = NO_CHECKPOINTS,
    ) -> Renewed:
        """Extend the leases of attempts to `lease_s` from now, and store their progress and their
        checkpoints (JSON text)."""
        return self.store.renew(
            fences, lease_us=microseconds(lease_s), progress=progress, checkpoints=checkpoints
        )

    def finish(self, outcomes: Sequence[Outcome]) -> Fences:
        """Record outcomes, each exactly once; return the attempts that had lost their lease."""
        return self.store.finish(outcomes)

    def sync(self) -> None:
        """Make every claim durable."""
        self.store.sync()

    def sign_on(
        self,
        worker: str,
        slots: int,
        kinds: Sequence[str] | None = None,
        *,
        needs: Mapping[str, Sequence[str]] = NO_NEEDS,
    ) -> None:
        """Record a worker's heartbeat, its number of slots, the kinds that it serves (None: every
        kind) and the services that each kind needs. New kinds are created."""
        for kind in kinds or ():
            text.kind_name(kind)
        self.store.sign_on(worker, slots, kinds, needs=needs)

    def expire(self) -> int:
        """Record up to `EXPIRE_MAX` documents that have expired; return how many. Claims do the
        same; workers and the service call this so that it is recorded also while nothing claims."""
        return self.store.expire()

    def sign_off(self, worker: str) -> None:
        """Remove a stopped worker from the list of workers."""
        self.store.sign_off(worker)

    def version(self) -> int:
        """Return a number that changes with every change that any process makes."""
        return self.store.version()

    def wait_for_change(self, version: int, timeout_s: float, *, certain: bool = True) -> int:
        """Wait up to `timeout_s` until the version is not `version`; return it."""
        return self.store.wait(version, timeout_s, certain=certain)

    # ── Cancel, retry ────────────────────────────────────────────────────────────────────────────

    # A str is an Iterable[str] too, hence the overlapping overloads.
    @overload
    def cancel(self, ids: str) -> State: ...  # type: ignore[overload-overlap]
    @overload
    def cancel(self, ids: Iterable[str]) -> States: ...
    def cancel(self, ids: str | Iterable[str]) -> State | States:
        """Cancel documents that have not started, and request running ones to stop.

        Return the state afterwards: a running document stays `running` until its worker stops it;
        in a list, None for an id that does not exist. For a single id, raises `NotFound`, and
        `WrongState` if the document has ended otherwise.
        """
        if not isinstance(ids, str):
            return [state for batch in _batches(ids) for state in self.store.cancel(batch)]
        (state,) = self.store.cancel([ids])
        if state is None:
            raise NotFound(f"there is no document {ids!r}")
        if state in ENDED and state is not State.CANCELLED:
            raise WrongState(f"document {ids} is already {state}; it cannot be cancelled")
        return state

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
        the documents expires again.

        Idempotent: a waiting document without attempts is left unchanged. For a single id, raises
        `NotFound`, and `WrongState` in any other state. For several, return the state of each
        before: those that were `dead` (with an expiry, also `expired`) wait again, None is an id
        that does not exist, and all others are left unchanged. Raises `ExpiryPassed` if the expiry
        is not later than now.
        """
        at = expiry(expires_at, expires_in_s, self._clock)
        if not isinstance(ids, str):
            batches = (self.store.retry(batch, expires_at=at) for batch in _batches(ids))
            return [state for states in batches for state in states]
        (state,) = self.store.retry([ids], expires_at=at)
        if state is None:
            raise NotFound(f"there is no document {ids!r}")
        if state is State.DEAD or (state is State.EXPIRED and at is not None):
            return None
        if state is State.WAITING and self._is_unattempted(ids):
            return None
        if state is State.EXPIRED:
            raise WrongState(f"document {ids} is expired; retry it with expires_at or expires_in_s")
        raise WrongState(f"document {ids} is {state}; only a dead document can be retried")

    def _is_unattempted(self, id: str) -> bool:
        """Whether a document that was just waiting had no attempts, as after a retry; a worker may
        have claimed it since."""
        document = self.get(id)
        return document.attempts == (0 if document.state is State.WAITING else 1)

    # ── Customers ────────────────────────────────────────────────────────────────────────────────

    def customers(self, *, after: str | None = None, size: int = 100) -> CustomerPage:
        """Return one page of the customers, by name; `after` is the `next` of the previous page."""
        if after is not None:
            text.identity(after, "after", CUSTOMER_BYTES_MAX)
        return self.store.customers(after=after, size=page_size(size))

    def customer(self, name: str) -> Customer:
        """Return one customer.

        Raises `NotFound`, also for an idle customer without settings that `prune` has deleted.
        """
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
        bytes_max: int | Unchanged | None = UNCHANGED,
    ) -> Customer:
        """Change a customer's weight, its concurrency limit (None: no limit) or the bytes that its
        documents may have (None: `bytes_per_customer_max`), or pause it.

        Parameters that are not given stay as they are. A new name creates the customer.
        """
        text.identity(name, "customer", CUSTOMER_BYTES_MAX)
        changes = setting_changes(weight=weight, limit=limit, paused=paused, bytes_max=bytes_max)
        while True:
            known = self.store.customers(names=[name]).customers
            settings = known[0].settings if known else CustomerSettings()
            # Retry if another process has changed the settings in between.
            if self.store.adjust(name, replace(settings, **changes), expected=settings):
                return self.customer(name)

    def purge(self, customer: str) -> None:
        """Delete a customer with its documents, settings, count and access keys; running work is
        lost. Raises `NotFound` if there is neither a customer nor an access key of this name."""
        text.identity(customer, "customer", CUSTOMER_BYTES_MAX)
        if not self.store.customers(names=[customer]).customers and not self.store.access_keys(
            customer=customer, size=1
        ):
            raise NotFound(f"there is no customer {customer!r}")
        names = self.store.purge(customer)
        crash.point("prune-after-delete")
        # A retried submission may have stored its document again in the meantime.
        local.delete_unreferenced(self.contents, self.store.unreferenced, names)

    # ── Kinds of work ────────────────────────────────────────────────────────────────────────────

    def kinds(self) -> Kinds:
        """Return all kinds of work, by name."""
        return kinds_of(self.store, self._clock.now())

    def kind(self, name: str) -> Kind:
        """Return one kind of work; raises `NotFound`."""
        text.kind_name(name)
        for kind in self.kinds():
            if kind.name == name:
                return kind
        raise NotFound(f"there is no kind {name!r}")

    def set_kind(
        self,
        name: str,
        *,
        limit: int | Unchanged | None = UNCHANGED,
        paused: bool | Unchanged = UNCHANGED,
        attempts_max: int | Unchanged | None = UNCHANGED,
        expires_in_s: float | Unchanged | None = UNCHANGED,
    ) -> Kind:
        """Change the concurrency limit of a kind over all machines (None: no limit), its maximum
        of attempts (None: that of the queue), or after what time its documents expire if they are
        submitted without an expiry (None: never); or pause it.

        Parameters that are not given stay as they are. A new name creates the kind; raises
        `KindRefused` if the queue has the maximum of kinds.
        """
        text.kind_name(name)
        changes = setting_changes(
            limit=limit, paused=paused, attempts_max=attempts_max, expires_in_s=expires_in_s
        )
        while True:
            known = {kind.name: kind.settings for kind in self.store.kinds()}
            settings = known.get(name, KindSettings())
            # Retry if another process has changed the settings in between.
            if self.store.configure_kind(name, replace(settings, **changes), expected=settings):
                return self.kind(name)

    # ── Outages ──────────────────────────────────────────────────────────────────────────────────

    def outages(self) -> Outages:
        """Return the services that hold kinds of work, or that work resumes from, by name."""
        return self.store.outages()

    def resume(self, service: str) -> None:
        """End the hold of a service; the work of all kinds that need it resumes over some seconds.
        Raises `NotFound` if the service is not held."""
        text.identity(service, "service", RESUMABLE_BYTES_MAX)
        if not self.store.resume(service):
            raise NotFound(f"no service {service!r} is held; outages() returns those that are")

    # ── Administration ───────────────────────────────────────────────────────────────────────────

    def summary(self) -> Summary:
        """Return how many documents wait at each priority, are delayed, run and have ended."""
        return self.store.summary()

    @property
    def settings(self) -> Settings:
        """The current settings, the same for every process."""
        return self.store.settings()

    @property
    def rule(self) -> Rule:
        """The current priority rule."""
        return self.settings.rule

    def configure(self, **changes: Unpack[SettingChanges]) -> Settings:
        """Change settings for every process. Existing priorities and counts stay as they are."""
        while True:
            settings = self.store.settings()
            # Retry if another process has changed the settings in between.
            if self.store.configure(changed(settings, changes), expected=settings):
                return changed(settings, changes)

    def prune(self, progress: Callable[[int], None] = lambda batches: None) -> Pruned:
        """Delete old data: ended documents past their retention, old idempotency keys, idle
        customers, unreferenced contents. `progress` is called with the number of batches done.

        Return how many documents were past their retention, and how many contents were deleted.
        """
        documents = self._count_prunable()
        batches = contents = 0
        while (names := self.store.prune()) is not None:
            crash.point("prune-after-delete")
            self.contents.delete(names)
            contents += len(names)
            batches += 1
            progress(batches)
        return Pruned(documents, contents + self.sweep())

    def _count_prunable(self) -> int:
        settings, now = self.settings, self._clock.now()
        number = 0
        for state in ENDED:
            before = now - settings.kept_us(state)
            if before > 0:
                number += sum(
                    document.ended_at_us is not None and document.ended_at_us < before
                    for document in self.iterate(states=state, submitted_before=before)
                )
        return number

    def sweep(self) -> int:
        """Delete unreferenced contents, which crashes leave behind; return how many."""
        return local.sweep(self.contents, self.store.unreferenced, self._clock.now())

    def begin_epoch(self) -> None:
        """Skip all numbers and fences that were issued after a restored backup was made."""
        self.store.begin_epoch()

    def check(self) -> None:
        """Raise `StoreError` if the store cannot be read or written: `StoreFull` if its disk is
        full."""
        self.store.summary()
        self.store.probe()
        if isinstance(self.store, Checkable):
            self.store.check()

    def interrupt(self) -> None:
        """Make waits for locks of other processes raise `StoreBusy`. Callable from any thread or a
        signal handler."""
        if isinstance(self.store, Interruptible):
            self.store.interrupt()

    def close(self) -> None:
        """Close files and connections. Idempotent."""
        self.store.close()
        self.contents.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def room_of(queue: Queue, customer: str | None) -> int:
    """Return how many more documents, of this customer, would be accepted now."""
    settings, summary = queue.store.settings(), queue.store.summary()
    room = settings.waiting_max - summary.waiting - summary.delayed
    if customer is not None:
        for known in queue.store.customers(names=[customer]).customers:
            own = settings.waiting_per_customer_max - known.waiting - known.delayed
            room = min(room, own)
    return room


def kinds_of(store: QueryStore, now: int) -> Kinds:
    """Return all kinds of work, by name, with the number of live workers that serve each."""
    alive = [seen for seen in store.workers() if now - seen.seen_at <= ALIVE_US]
    return [
        replace(kind, workers=sum(seen.serves(kind.name) for seen in alive))
        for kind in store.kinds()
    ]


def not_completed(document: Document) -> WrongState:
    """Return the error for the result of a document that is not completed."""
    why = f" ({document.error})" if document.error else ""
    return WrongState(
        f"document {document.id} is {document.state}{why}; only a completed document has a result"
    )


def _batches(wanted: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(wanted)
    while batch := list(islice(rest, _BATCH)):
        yield batch
