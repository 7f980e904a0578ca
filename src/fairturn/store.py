"""The contract of a store: what the road from submission to outcome needs of a database.

A store keeps documents, counts and turns. The rule (`priority.py`) and the order (`turns.py`) are
not its business: it calls them under its locks and writes down what they say. `stores/memory.py`
is this contract as a program that can be run; `fairturn.testing` holds the suite that every store
must pass. Every call is atomic and durable when it returns, and raises nothing but the errors of
`fairturn.errors`.

Only claims touch flows and clocks. Every other call records what happened, and the next claim
folds it in, in the order of recording; so a submitter stalled inside its transaction delays nobody.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from fairturn.access import AccessKey
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
from fairturn.situation import Seen, Situation


class Unready(Exception):
    """A payload cannot be stored as it is: nothing was stored, and it is to be looked at alone."""


class Payloads(Protocol):
    """Documents that are a payload and nothing else, in their order, encoded as late as can be:
    while a store waits for something, or is at work on the first of them."""

    customers: list[str]

    def prepare(self, n: int) -> None:
        """Encode the next ones, so that they are at hand later. Never raises."""
        ...

    def bodies(self) -> Iterator[str]:
        """The payload of each, from the first one on, as JSON in ASCII without a blank too many;
        or `Unready`."""
        ...


@runtime_checkable
class TakesPayloads(Protocol):
    """A store that gains by encoding late. It need not: all others have `submit` alone."""

    def submit_payloads(self, payloads: Payloads) -> list[Receipt]:
        """The same as `submit`. What is not ready raises `Unready`, and nothing was stored."""
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

    def configure(self, settings: Settings) -> None:
        """Put other settings in force, for everybody.

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

        A claim that need not be `synced`, and has no outcomes, may be undone by a power cut until
        `sync` was called: its documents wait again as before. No fence that it gave comes again.
        """
        ...

    def sync(self) -> None:
        """Let every claim survive a power cut from now on."""
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
        stays as it ended.
        """
        ...

    def retry(self, ids: Sequence[str]) -> list[State | None]:
        """Let dead documents wait again: no attempts used, the old priority and order, no check.

        Answers with the state that each had before (None: no such document); only those that were
        `dead` have been changed.
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

    def adjust(self, customer: str, settings: CustomerSettings) -> None:
        """Put settings of one customer in force; a name that is new becomes known by it.

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
        """A document and all that stands around it, from one snapshot: what `explain.py` needs.

        It is as the next claim will find it, with everything folded in that happened since the
        last one. Nothing is changed by asking. None: there is no such document.
        """
        ...

    def workers(self) -> list[Seen]:
        """Who has claimed, or asked for something to claim, within a day: by name, up to 1,000."""
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

        Attempts under way lose their lease. Answers with the contents that can now be deleted.
        """
        ...

    def unreferenced(self, content_names: Sequence[str]) -> list[str]:
        """Which of these contents belong to no document."""
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
