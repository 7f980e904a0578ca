"""The contract of a store: what the path from submission to outcome needs of a database.

A store keeps documents, counts and turns. It applies the rule (`priority.py`) and the order
(`turns.py`) under its locks; PostgreSQL has both in SQL, and tests compare the results.
`memory.py` is the executable specification; `conformance/` holds the suite that every store must
pass. Every call is durable when it returns, and raises nothing but the errors of
`fairturn.errors`. Every call is atomic, except that `prune` and `purge` may work in batches, and
that a claim with much to fold may take several transactions.

Only claims write flows and clocks. Every other call records events, and the next claim folds them
in, in the order of recording; so a submission in an open transaction delays no claim.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from fairturn.access.keys import AccessKey
from fairturn.explain.snapshot import Seen, Situation
from fairturn.model import (
    NO_PROGRESS,
    Claimed,
    CustomerPage,
    CustomerSettings,
    Fence,
    Filter,
    Lanes,
    NewDocument,
    Outcome,
    Page,
    Progress,
    Receipt,
    Renewed,
    Settings,
    State,
    Stored,
    Summary,
)

UNREFERENCED_S = 5.0  # how long `Store.unreferenced` waits for transactions in flight


@runtime_checkable
class Interruptible(Protocol):
    """A store whose calls wait for locks of other processes."""

    def interrupt(self) -> None:
        """End every wait for a lock that is under way with `StoreBusy`. It may be called from any
        thread, and from a signal handler. Later calls wait as usual."""
        ...


@runtime_checkable
class Checkable(Protocol):
    """A store that remembers damage that a call has met."""

    def check(self) -> None:
        """Raise the `StoreError` of the last call of this process that met damage, if one did."""
        ...


class Store(Protocol):
    """Where documents, counts and turns are kept."""

    @property
    def one_writer(self) -> bool:
        """Whether submissions are stored one after the other, so that those of several callers are
        stored sooner together; and whether a claim keeps them waiting, even if it finds nothing."""
        ...

    def settings(self) -> Settings:
        """The settings in force for every process that uses this store."""
        ...

    def configure(self, settings: Settings, *, expected: Settings | None = None) -> bool:
        """Put other settings in force, for every process.

        With `expected` only if these are the settings in force: so a change that is computed from
        them never undoes another one. Returns whether they were put in force.

        A new mode puts the waiting documents into new flows in their order, with all clocks at
        0; priorities and counts stay what they are.
        """
        ...

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        """Accept all of the documents or none, each one check of the rule, in the order given.

        The check is atomic per customer. A known idempotency key of the same customer, not older
        than 24 h, gives its first receipt again and makes no check; with another digest it raises
        `KeyReused`. More waiting documents than the settings allow raise `QueueFull`. A document
        with a parent takes the parent's count and priority without a check, the first 20 times
        for each parent. With `connection` a database server stores the documents inside the
        caller's own transaction; an embedded store refuses it with a `ValueError`.
        """
        ...

    def claim(
        self,
        n: int,
        *,
        worker: str,
        lease_us: int,
        outcomes: Sequence[Outcome] = (),
        synced: bool = True,
    ) -> Claimed:
        """Record the outcomes, then take up to `n` documents in the order of service.

        Folds in, in this order: leases that ran out (oldest first), what was recorded, documents
        that became due. Claims of several processes come one after the other. Each claimed
        document is running, has one attempt more and a fence number higher than every earlier
        one. Fewer than `n` are given only if nothing else may be claimed now.

        Reports, in each transaction, up to `CANCELS_REPORTED_MAX` documents that were cancelled
        while they waited or were delayed, in the order of the cancels. No two claims report the
        same document, and a claim that finds no document to take reports too. If the reply is lost,
        the report is lost with it. Documents that were pruned or purged since are not reported.

        A claim that need not be `synced`, and has no outcomes, may be undone by a power cut until
        `sync` was called: its documents wait again as before, and its cancelled documents are
        reported again. No fence that it gave comes again.
        """
        ...

    def sync(self) -> None:
        """Let every claim survive a power cut from now on."""
        ...

    def begin_epoch(self) -> None:
        """Begin a new epoch, after the database was restored: from now on no document has a number,
        and no attempt a fence, that the database may have given out before it was restored.

        Numbers and fences jump by at least 2^32, and every process reads anew what it has cached.
        It is durable when it returns. A copy that `fairturn backup` made begins one by itself.
        """
        ...

    def renew(
        self,
        fences: Sequence[Fence],
        *,
        lease_us: int,
        progress: Mapping[Fence, Progress] = NO_PROGRESS,
    ) -> Renewed:
        """Let the leases of these attempts end `lease_us` from now, and keep how far they are.

        An attempt whose document somebody else has taken, or that ended, is told so as lost; one
        whose document is to be cancelled is renewed and told so. Progress stays with the document
        until its next claim; that of an attempt that is not among `fences` is not kept.
        """
        ...

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        """Record how attempts ended, each exactly once; the answer names the ones that lost.

        An outcome counts only while its fence is the document's last and the document is running;
        otherwise nothing of it is recorded. `Failed` on a document whose attempts are used up
        makes it dead; on one that is to be cancelled it, like `Released`, makes it cancelled.
        """
        ...

    def cancel(self, ids: Sequence[str]) -> list[State | None]:
        """End documents that have not begun, and ask running ones to stop at their next renewal.

        Answers with the state of each afterwards (None: no such document). An ended document
        stays as it ended. The next claims report the documents that this call has ended; of those
        that no claim has reported yet, the store keeps the newest `CANCELS_KEPT_MAX`.
        """
        ...

    def retry(self, ids: Sequence[str]) -> list[State | None]:
        """Let dead documents wait again: no attempts used, the old priority and order, no check.

        Answers with the state that each had before (None: no such document); only those that were
        `dead` have been changed. So a repeated call changes nothing, and answers `waiting`.
        """
        ...

    def find(
        self,
        filter: Filter,
        *,
        after: str | None = None,
        size: int = 100,
        reach: int | None = None,
    ) -> Page:
        """One page of the documents that match, the newest submission first.

        With `reach` no more than so many documents are looked at, from `after` down: then a page
        may be short, or empty, although `next` says where to look on.
        """
        ...

    def read(self, id: str) -> Stored | None:
        """A document with its body and its result."""
        ...

    def customers(
        self, *, names: Sequence[str] | None = None, after: str | None = None, size: int = 100
    ) -> CustomerPage:
        """The customers by name, or those of these names that exist."""
        ...

    def adjust(
        self,
        customer: str,
        settings: CustomerSettings,
        *,
        expected: CustomerSettings | None = None,
    ) -> bool:
        """Put settings of one customer in force; a name that is new becomes known by it. With
        `expected` only if the customer has these settings. Returns whether they were put in force.

        A weight counts from the next charge on, a limit and a pause from the next claim on.
        """
        ...

    def summary(self) -> Summary:
        """How many documents wait in each priority, are delayed and run; how many attempts were
        ever begun, and how they ended. What is counted since ever never becomes less, whatever is
        pruned or purged. Never counts a table."""
        ...

    def lanes(self, *, size: int = 24) -> Lanes:
        """The next documents of each priority, up to `size`, from one snapshot.

        They are in the order in which claims will take them from their level if nothing else
        happens, the turns for the longest waiting apart. Those of customers who are paused or at
        their limit are left out. It reads no more lines and documents than it needs.
        """
        ...

    def situation(self, id: str) -> Situation | None:
        """Return what an explanation needs, from one snapshot; None if there is no such document.

        The snapshot is as the next claim will find it, with all events since the last claim
        applied. Nothing is written.
        """
        ...

    def workers(self) -> list[Seen]:
        """The workers that signed on within a day and have not signed off: by name, up to 1,000."""
        ...

    def sign_on(self, worker: str, slots: int) -> None:
        """List a worker in `workers` and `situation`, seen now, with the number of documents that
        it runs at the same time.

        This is a worker's heartbeat: it signs on again every `SIGN_ON_EVERY_US`, also while all its
        slots are busy. It need not be durable when it returns, and does not change the version.
        """
        ...

    def sign_off(self, worker: str) -> None:
        """Remove a worker that has stopped from `workers` and `situation`, until it signs on again.

        An unknown name changes nothing. It does not change the version.
        """
        ...

    def oldest_waiting(self) -> Mapping[int, int]:
        """By level, where anything waits: the moment since which the oldest document waits.

        It is that of the first document of each customer that has its turn next, so it is right
        also while nobody claims.
        """
        ...

    def prune(self, *, documents_max: int = 1_000) -> list[str] | None:
        """Forget a batch of what nobody needs: ended documents past their age, keys past 24 h,
        idle customers without settings.

        Answers with the names of contents that can now be deleted, or None if nothing was left.
        """
        ...

    def purge(self, customer: str) -> list[str]:
        """Delete a customer with all documents, waiting, running and ended, settings, count and
        access keys.

        Attempts in flight lose their lease. Returns the contents that can now be deleted. After an
        error a part of the documents may be deleted: repeat the call.
        """
        ...

    def unreferenced(
        self, content_names: Sequence[str], *, timeout_s: float = UNREFERENCED_S
    ) -> list[str]:
        """Return those of these contents that can be deleted, in the order given.

        Such a content belongs to no document, and no transaction in flight can make it belong to
        one. Waits up to `timeout_s` for transactions in flight; returns an empty list if one of
        them is still open then.
        """
        ...

    def add_key(self, key: AccessKey) -> None:
        """Keep a new access key. One of the same id, or too many of them, is a `ValueError`."""
        ...

    def access_key(self, id: str) -> AccessKey | None:
        """The access key of this id, whether it has ended or not."""
        ...

    def access_keys(
        self, *, customer: str | None = None, after: str | None = None, size: int = 100
    ) -> list[AccessKey]:
        """The access keys, or those of one customer, by their ids; those after `after`."""
        ...

    def end_key(self, id: str, at: int) -> AccessKey | None:
        """Let an access key end at a moment; one that ends before stays so. None: no such key."""
        ...

    def note_use(self, id: str, at: int) -> None:
        """Note that an access key was used; never an earlier moment than is noted already.

        It need not be durable when it returns, and does not change the version.
        """
        ...

    def version(self) -> int:
        """A number that changes with every change that any process has made."""
        ...

    def wait(self, version: int, timeout_s: float, *, certain: bool = True) -> int:
        """Wait until the version is another one than `version`, or the time is over.

        Who need not be `certain`, because it looks for itself, and looks now and then anyway, may
        be woken by a mere hint, and is then woken sooner. Such an answer is good for the next wait
        of the same kind, and for nothing else.
        """
        ...

    def close(self) -> None:
        """Give back files and connections. Calling it twice does no harm."""
        ...
