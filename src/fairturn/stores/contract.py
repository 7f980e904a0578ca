"""The contract of a store.

A store holds documents, counts and turns. It applies the rule (`priority.py`) and the order of
service (`scheduling/turns.py`) under its locks; PostgreSQL has both in SQL, and tests compare the
results. `memory/` is the executable specification; every store passes the suite in `conformance/`.

Unless a method states otherwise:

- a call is durable when it returns;
- a call is atomic, except that `prune` and `purge` may work in batches, and that a claim with many
  events to fold may take several transactions;
- a call raises `ValueError` or `TypeError` for misuse, and otherwise errors of `fairturn.errors`.

Submissions, outcomes, cancels and retries do not write flows and clocks, except for the counter of
waiting documents of a flow. They insert an event where a claim must know: arrivals, cancels,
requeues, outcomes of customers with a limit, completions with learned costs. The next claim folds
events in the order of insertion. A submission in an open transaction therefore delays no claim.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from fairturn.access.keys import AccessKey
from fairturn.explain.snapshot import DocumentSnapshot, WorkerHeartbeat
from fairturn.model import (
    EXPIRE_MAX,
    NO_CAPS,
    NO_CHECKPOINTS,
    NO_NEEDS,
    NO_PROGRESS,
    AttemptRecord,
    Claimed,
    CustomerPage,
    CustomerSettings,
    Fence,
    Filter,
    Kind,
    KindSettings,
    Lanes,
    NewDocument,
    Outcome,
    Page,
    Progress,
    Receipt,
    Renewed,
    ServiceOutage,
    Settings,
    State,
    Stored,
    Summary,
)

UNREFERENCED_S = 5.0  # the default timeout of `AdminStore.unreferenced`


@runtime_checkable
class Interruptible(Protocol):
    """A store whose calls wait for locks of other processes."""

    def interrupt(self) -> None:
        """Raise `StoreBusy` in every call that is waiting for a lock. Later calls wait as usual.
        May be called from any thread and from a signal handler."""
        ...


@runtime_checkable
class Checkable(Protocol):
    """A store that detects damaged data."""

    def check(self) -> None:
        """Raise the `StoreError` of the last call in this process that found damage, if any."""
        ...


class Store(Protocol):
    """The path of a document, from submission to outcome, and notifications of changes."""

    @property
    def single_writer(self) -> bool:
        """Whether only one transaction can write at a time. Submissions are then cheaper in
        batches, and a claim blocks them even if it finds no document."""
        ...

    def settings(self) -> Settings:
        """Return the settings in force for every process that uses this store."""
        ...

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        """Accept all of the documents or none, and return their receipts in the order given.

        Each document counts as one check of the rule, in the order given; checks are atomic per
        customer.
        A document whose idempotency key the same customer used within 24 h is not stored and not
        checked: the receipt of the first submission is replayed (`Receipt.replayed`). The first
        20 documents with the same parent inherit its count and priority without a check.

        With `connection`, a database server stores the documents inside the caller's transaction;
        an embedded store raises `ValueError`.

        Raises `KeyReused` if a known key comes with another digest, `NotFound` if the customer has
        no such parent document, `QueueFull` if more documents would wait or be delayed than the
        settings allow, `KindRefused` if the queue does not have a document's kind and does not
        create it, `ExpiryPassed` if a document that no key replays expires now or earlier, and
        `QuotaExceeded` if the stored documents of a customer would have more
        bytes (`NewDocument.stored_bytes`) than its settings or those of the queue allow. A document
        counts until it is deleted, whatever its state; results do not count.

        A document without `expires_at` in a kind with `expires_in_s` expires that long after it is
        due. Expiry applies while a document waits or is delayed and no attempt counts in its first
        step.
        """
        ...

    def claim(
        self,
        n: int,
        *,
        worker: str,
        lease_us: int,
        kinds: Sequence[str] | None = None,
        at_most: Mapping[str, int] = NO_CAPS,
        outcomes: Sequence[Outcome] = (),
        synced: bool = True,
    ) -> Claimed:
        """Record the outcomes as `finish` does, then claim up to `n` documents of these kinds in
        the order of service. None stands for every kind, also for those that are created later;
        unknown kinds are ignored. Of a kind in `at_most`, this call takes at most that many
        documents. The cost of a claim does not grow with kinds that it does not serve.

        Claims of all processes are serialized. A claim first records all documents that have
        expired, then folds expired leases (oldest first), then events, then documents that became
        due. Each claimed document is running, has one more
        attempt and a fence number higher than every earlier one. It comes with the value and the
        file of its last step, its finished steps, and the last checkpoint of the present step.

        A claim returns fewer than `n` documents if no other document may be claimed now: none of
        these kinds waits, or the customers or kinds of those that wait are paused or at their
        limit, which is exact over all processes, or a service holds their kinds. Of all kinds that
        need a held service, a claim takes one document, as a probe, if `scheduling/outages.py`
        permits one. Flows of a held kind do not change. It may also leave out documents that
        another transaction has locked, and flows that wait for a repair. If it takes several
        transactions and a later one fails, it returns the documents of those before. A later claim
        takes the rest.

        Each transaction also reports up to `CANCELS_REPORTED_MAX` documents that were cancelled
        while they were waiting or delayed, in the order of the cancels, even if it claims nothing.
        A document is reported at most once: if the reply is lost, so is the report. Documents that
        have been pruned or purged are not reported.

        With `synced=False` and no outcomes, a power cut may undo the claim until `sync` is called.
        Its documents then wait as before and its cancels are reported again, but its fence numbers
        are never reused.
        """
        ...

    def sync(self) -> None:
        """Make every claim that has returned durable."""
        ...

    def renew(
        self,
        fences: Sequence[Fence],
        *,
        lease_us: int,
        progress: Mapping[Fence, Progress] = NO_PROGRESS,
        checkpoints: Mapping[Fence, str] = NO_CHECKPOINTS,
    ) -> Renewed:
        """Extend the leases of these attempts to `lease_us` from now, and store their progress and
        checkpoints.

        `Renewed.lost` lists attempts that have ended or lost their lease. `Renewed.cancelled` lists
        attempts that were renewed and whose document should be cancelled. Progress is kept until
        the document's next claim, a checkpoint (JSON text) until its step ends; those of attempts
        that are not in `fences` or have lost their lease are ignored. Raises `ValueError` for a
        checkpoint of more than `CHECKPOINT_BYTES_MAX`.
        """
        ...

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        """Record how attempts ended, each exactly once; return the fences of stale outcomes.

        An outcome is recorded only if the document is running under this fence; otherwise it is
        stale and has no effect. `Failed` makes a document dead if it has no attempts left. After
        every outcome but `Completed`, a document becomes cancelled if its cancellation was
        requested.

        `Advanced` moves the document to another kind, in which it waits with its priority and
        order and without attempts; no call sees it in neither kind or in both. It is dead instead
        if it has finished `STEPS_MAX` steps, if the queue neither has nor creates the kind, or if
        the value is too large; a retry repeats the step.

        `Snoozed` and `OutageReport` delay the document without counting the attempt. After
        `SNOOZES_MAX` of them, a document that is snoozed is dead, and reports count as failures.

        `OutageReport` changes the state of the service as `scheduling/outages.py` specifies, with
        the documents of its kind that waited before the call. Other outcomes do so for each service
        that the kind needs: a success (`Completed`, or `Advanced` unless it makes the document
        dead), or another end of an attempt.

        Attempts that failed, lost their lease or ended a step are stored (`attempts`).
        """
        ...

    def cancel(self, ids: Sequence[str]) -> list[State | None]:
        """Cancel waiting and delayed documents, and request that running ones stop at their next
        renewal.

        Returns the state of each document afterwards, or None for an unknown id. Ended documents do
        not change. The next claims report the documents that this call cancelled; the store keeps
        the newest `CANCELS_KEPT_MAX` that no claim has reported.
        """
        ...

    def retry(self, ids: Sequence[str], *, expires_at: int | None = None) -> list[State | None]:
        """Return dead documents to waiting, with all attempts available, their old priority and
        order, and without a check of the rule. They repeat the step that failed, and expire at
        `expires_at` or not at all.

        With `expires_at`, expired documents return as well: to waiting, or to delayed if they have
        never been due. Raises `ExpiryPassed` if it is not later than now.

        Returns the state of each document before the call, or None for an unknown id. Other
        documents do not change, so a repeated call has no effect and returns `waiting`.
        """
        ...

    def sign_on(
        self,
        worker: str,
        slots: int,
        kinds: Sequence[str] | None = None,
        *,
        needs: Mapping[str, Sequence[str]] = NO_NEEDS,
    ) -> None:
        """Record a worker's heartbeat and the kinds that it serves (None: every kind), which
        `workers` and `snapshot` report. Kinds that are new are created; raises `KindRefused` if
        there would be more than `KINDS_MAX`.

        `needs` replaces, for each of its kinds, the services that the kind needs. Every kind also
        needs the service `kind:NAME`, which stands for the kind alone.

        A worker sends one every `SIGN_ON_EVERY_US`, also while all its slots are in use. The call
        need not be durable when it returns, and does not change the version.
        """
        ...

    def expire(self, limit: int = EXPIRE_MAX) -> int:
        """Record up to `limit` (at most `EXPIRE_MAX`) documents that have expired, by the time of
        their expiry; return how many."""
        ...

    def resume(self, service: str) -> bool:
        """End the hold of a service, as the success of a probe does. Return whether it was held."""
        ...

    def sign_off(self, worker: str) -> None:
        """Remove a worker that has stopped. An unknown name has no effect. The call does not change
        the version."""
        ...

    def version(self) -> int:
        """Return a number that changes with every write of any process."""
        ...

    def wait(self, version: int, timeout_s: float, *, certain: bool = True) -> int:
        """Block until the version differs from `version` or `timeout_s` has passed; return the
        current version.

        With `certain=False` the call may return sooner, on a notification, and may return although
        nothing has changed; the caller must poll as well. The number that it returns is valid only
        as the `version` of the next wait with `certain=False`.
        """
        ...

    def close(self) -> None:
        """Close files and connections. A second call has no effect."""
        ...


class QueryStore(Protocol):
    """Queries of pages, metrics and lists. Each reads one snapshot."""

    def find(
        self,
        filter: Filter,
        *,
        after: str | None = None,
        size: int = 100,
        reach: int | None = None,
    ) -> Page:
        """Return one page of matching documents, newest submission first.

        With `reach`, at most that many documents are examined, starting below `after`. The page may
        then be short or empty although `next` is not None.
        """
        ...

    def read(self, id: str) -> Stored | None:
        """Return a document with its body and result, or None for an unknown id."""
        ...

    def attempts(self, id: str, *, values: bool = False) -> list[AttemptRecord] | None:
        """Return the stored attempts of a document, oldest first, with the values of its steps if
        requested; None for an unknown id."""
        ...

    def outages(self) -> list[ServiceOutage]:
        """Return the services that are held or that work resumes from, ordered by name."""
        ...

    def customers(
        self, *, names: Sequence[str] | None = None, after: str | None = None, size: int = 100
    ) -> CustomerPage:
        """Return one page of customers in the order of their names; with `names`, only those."""
        ...

    def summary(self) -> Summary:
        """Return the numbers of waiting (by priority), delayed and running documents, and totals of
        attempts and outcomes.

        Totals never decrease, whatever is pruned or purged. The call never scans a table.
        """
        ...

    def kinds(self) -> list[Kind]:
        """Return all kinds of work, ordered by name."""
        ...

    def lanes(self, *, size: int = 24, kind: str | None = None) -> Lanes:
        """Return the next documents of each priority, up to `size`, of one kind or of all. Turns of
        kinds are those of a worker that serves all of them; a paused kind is included.

        They are in the order in which claims will take them from their level if nothing else
        happens, not counting turns for the customer that has waited longest. Documents of customers
        that are paused or at their limit are left out. The call reads no more flows and documents
        than it needs.
        """
        ...

    def oldest_waiting(self) -> Mapping[int, int]:
        """Return, for each level with waiting documents, the time since which its oldest head of
        line has been waiting.

        The result includes events that no claim has folded, so it is correct without a running
        worker.
        """
        ...

    def workers(self) -> list[WorkerHeartbeat]:
        """Return up to 1,000 registered workers, ordered by name. A worker is registered until it
        signs off, or `prune` removes it a day after it was last seen."""
        ...


class SnapshotStore(Protocol):
    """The input of explanations."""

    def snapshot(self, id: str) -> DocumentSnapshot | None:
        """Return a document and the state of the queue around it; None for an unknown id.

        All values are from one snapshot, as the next claim will see it: with expired leases, events
        and due documents folded. Nothing is written.
        """
        ...


class AdminStore(Protocol):
    """Settings, epochs and retention."""

    def configure(self, settings: Settings, *, expected: Settings | None = None) -> bool:
        """Replace the settings for every process. Return whether they were replaced.

        With `expected` this is a compare-and-set: nothing is changed unless `expected` equals the
        settings in force.

        A new mode moves the waiting documents to new flows in their order and sets all clocks to 0;
        priorities and counts do not change.
        """
        ...

    def adjust(
        self,
        customer: str,
        settings: CustomerSettings,
        *,
        expected: CustomerSettings | None = None,
    ) -> bool:
        """Replace the settings of a customer, which is created if its name is new. Return whether
        they were replaced; `expected` is as in `configure`.

        A weight applies from the next charge, a limit and a pause from the next claim.
        """
        ...

    def configure_kind(
        self, kind: str, settings: KindSettings, *, expected: KindSettings | None = None
    ) -> bool:
        """Replace the settings of a kind, which is created if its name is new. Return whether they
        were replaced; `expected` is as in `configure`.

        A pause and a limit apply from the next claim, `attempts_max` from the next attempt or lease
        that ends, `expires_in_s` to later submissions. Raises `KindRefused` if there would be more
        than `KINDS_MAX` kinds.
        """
        ...

    def probe(self) -> None:
        """Write a row and read it, as a check that submissions can be stored.

        Raises `StoreFull` if the disk has no room for them, and other `StoreError`s as a submission
        would. The call need not be durable when it returns, and does not change the version.
        """
        ...

    def begin_epoch(self) -> None:
        """Begin a new epoch after the database was restored from a backup.

        No later document gets a number, and no later attempt a fence, that the database may have
        issued before: both jump by at least 2^32. Every process reloads its caches. A copy made by
        `fairturn backup` begins an epoch by itself.
        """
        ...

    def prune(self, *, documents_max: int = 1_000) -> list[str] | None:
        """Delete a batch of old rows: ended documents past their retention, idempotency keys older
        than 24 h, workers not seen for a day, idle customers without settings, and the states of
        outages that are over.

        Returns the names of contents that can now be deleted, or None if nothing was left to
        delete.
        """
        ...

    def purge(self, customer: str) -> list[str]:
        """Delete a customer with all its documents, settings, count and access keys.

        Attempts in flight lose their leases. Returns the names of contents that can now be deleted.
        After an error, some of the documents may have been deleted: repeat the call.
        """
        ...

    def unreferenced(
        self, content_names: Sequence[str], *, timeout_s: float = UNREFERENCED_S
    ) -> list[str]:
        """Return those of these contents that can be deleted, in the order given.

        No document, result or step refers to them, and no transaction in flight can add a
        reference. Waits up to `timeout_s` for such transactions; returns an empty list if one is
        still open.
        """
        ...


class AccessKeyStore(Protocol):
    """The access keys of the service."""

    def add_key(self, key: AccessKey) -> None:
        """Store a new access key. Raises `ValueError` if its id exists, or if the store already has
        `ACCESS_KEYS_MAX` keys."""
        ...

    def access_key(self, id: str) -> AccessKey | None:
        """Return an access key, including a revoked one; None for an unknown id."""
        ...

    def access_keys(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> list[AccessKey]:
        """Return up to `size` access keys, or those of one customer, by id, after `after`."""
        ...

    def end_key(self, id: str, at: int) -> AccessKey | None:
        """Revoke an access key as of time `at`, unless it expires earlier, and return it; return
        None for an unknown id."""
        ...

    def note_use(self, id: str, at: int) -> None:
        """Record when an access key was used. The stored timestamp never moves back. The call need
        not be durable when it returns, and does not change the version."""
        ...


class QueueStore(Store, QueryStore, SnapshotStore, AdminStore, AccessKeyStore, Protocol):
    """A complete store, as a `Queue` needs it."""
