"""Outcomes: from the end of an attempt until the store has recorded it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple

from fairturn.clock import microseconds
from fairturn.errors import StoreError
from fairturn.model import (
    PAGE_MAX,
    Advanced,
    Claim,
    Completed,
    Document,
    Failed,
    Fence,
    Filter,
    OutageReport,
    Outcome,
    Released,
    Snoozed,
    State,
    Stopped,
    cost_in_millionths,
)
from fairturn.queue import Queue
from fairturn.scheduling.outages import PROBE_US
from fairturn.worker import results
from fairturn.worker.backoff import delay_us
from fairturn.worker.dispatcher import ClaimLimits
from fairturn.worker.events import DocumentEnded, DocumentLost, OnEvent
from fairturn.worker.executor import ActiveClaim, AttemptResult
from fairturn.worker.leases import Reports

_COUNTED: dict[type[Outcome], str] = {
    Completed: "completed",
    Advanced: "advanced",
    Failed: "failed",
    Snoozed: "snoozed",
    OutageReport: "unavailable",
    Released: "released",
    Stopped: "cancelled",
}


class WorkerTotals(NamedTuple):
    """How many attempts ended in each way."""

    completed: int = 0
    failed: int = 0  # retried or not
    released: int = 0
    cancelled: int = 0
    lost: int = 0
    advanced: int = 0  # to the next step
    snoozed: int = 0
    unavailable: int = 0


class UnrecordedOutcome(NamedTuple):
    """An attempt that has ended and is not recorded yet."""

    outcome: Outcome
    held: ActiveClaim
    seconds: float

    @property
    def lacks_checkpoint(self) -> bool:
        """Whether the next attempt of this step needs a checkpoint that no renewal has stored."""
        is_unsaved = self.held.checkpoint is not self.held.saved
        return is_unsaved and not isinstance(self.outcome, Completed | Advanced | Stopped)


class CallResult(NamedTuple):
    """The result of a call of the store."""

    claims: Sequence[Claim]
    lost: Sequence[Fence]  # attempts whose lease was lost
    documents: Mapping[str, Document]  # as read after the call
    cancelled: Sequence[Document] = ()  # cancelled before they were claimed


class Attempts:
    """The attempts of a worker, from the claim until the store has recorded their outcomes."""

    def __init__(self, on_event: OnEvent | None, discard: Callable[[str], None]) -> None:
        self._on_event = on_event
        self._discard = discard  # a result file, by its name
        self._counts: Counter[str] = Counter()
        self._in_flight: list[list[UnrecordedOutcome]] = []  # in calls that record them
        self.held: dict[Fence, ActiveClaim] = {}
        self.unrecorded: list[UnrecordedOutcome] = []
        self.oldest_s = 0.0  # end of the first of them

    def totals(self) -> WorkerTotals:
        return WorkerTotals(**self._counts)

    def end(self, held: ActiveClaim, outcome: Outcome, seconds: float, now_s: float) -> None:
        """Add an outcome that is to be recorded."""
        if not self.unrecorded:
            self.oldest_s = now_s
        self.unrecorded.append(UnrecordedOutcome(outcome, held, seconds))

    def release(self, some: list[ActiveClaim], now_s: float) -> None:
        """End attempts that have not started."""
        for held in some:
            if not held.dropped:
                held.dropped = True
                self.end(held, Released(held.fence), 0.0, now_s)

    def open(self) -> dict[Fence, ActiveClaim]:
        """Return the attempts that have not ended; those whose recording is in flight have."""
        ended = {one.held.fence for one in chain(self.unrecorded, *self._in_flight)}
        return {fence: held for fence, held in self.held.items() if fence not in ended}

    def take(self) -> list[UnrecordedOutcome]:
        """Return all outcomes for a call that records them; end it with `put_back` or `settle`."""
        recorded, self.unrecorded = self.unrecorded, []
        self._in_flight.append(recorded)
        return recorded

    def put_back(self, recorded: list[UnrecordedOutcome]) -> None:
        """Record these outcomes again: the call that recorded them failed."""
        self._land(recorded)
        self.unrecorded[:0] = recorded

    def settle(self, recorded: list[UnrecordedOutcome], reply: CallResult) -> None:
        """Count the recorded outcomes and emit their events, except for lost leases."""
        self._land(recorded)
        lost = set(reply.lost)
        kept = [attempt for attempt in recorded if attempt.held.fence not in lost]
        for attempt in recorded:
            if attempt.held.fence in lost:
                self.lose(attempt.held, attempt.outcome)
        for attempt in kept:
            self._counts[_COUNTED[type(attempt.outcome)]] += 1
            del self.held[attempt.held.fence]
        if self._on_event is not None:
            for outcome, held, seconds in kept:
                document = held.claim.document
                document = ended_document(outcome, document, reply.documents.get(document.id))
                self._on_event(DocumentEnded(document, outcome, seconds))

    def lose(self, held: ActiveClaim, outcome: Outcome | None = None) -> None:
        """Drop an attempt whose lease was lost, and delete its result file."""
        held.dropped = True
        if self.held.pop(held.fence, None) is None:
            return
        self._counts["lost"] += 1
        if isinstance(outcome, Completed | Advanced) and outcome.content is not None:
            self._discard(outcome.content.name)
        if self._on_event is not None:
            self._on_event(DocumentLost(held.claim.document, held.fence))

    def _land(self, recorded: list[UnrecordedOutcome]) -> None:
        self._in_flight = [one for one in self._in_flight if one is not recorded]


class OutcomeRecorder:
    """Records outcomes, alone or with a claim. Threads of `store_calls.py` call its methods.

    With `on_event` it reads the documents whose final state depends on more than the outcome.
    """

    def __init__(
        self,
        queue: Queue,
        worker: str,
        lease_s: float,
        kinds: Sequence[str] | None,
        on_event: OnEvent | None,
    ) -> None:
        self._queue = queue
        self._worker = worker
        self._lease_s = lease_s
        self._kinds = kinds
        self._reads_documents = on_event is not None

    def claim(self, wanted: ClaimLimits, recorded: Sequence[UnrecordedOutcome]) -> CallResult:
        """Record the outcomes and claim documents, in one transaction."""
        outcomes = self._prepare(recorded)
        claimed = self._queue.claim(
            wanted.n,
            worker=self._worker,
            lease_s=self._lease_s,
            kinds=self._kinds,
            at_most=wanted.at_most,
            outcomes=outcomes,
            synced=False,
        )
        return CallResult(claimed.claims, claimed.lost, self._read(outcomes), claimed.cancelled)

    def finish(self, recorded: Sequence[UnrecordedOutcome]) -> CallResult:
        outcomes = self._prepare(recorded)
        return CallResult((), self._queue.finish(outcomes), self._read(outcomes))

    def _prepare(self, recorded: Sequence[UnrecordedOutcome]) -> list[Outcome]:
        """Return the outcomes, after storing the checkpoints that the next attempts need and that
        no renewal has stored. A renewal in flight may still replace one by the one before."""
        unsaved = Reports.of(one.held for one in recorded if one.lacks_checkpoint).checkpoints
        if unsaved:
            self._queue.renew(list(unsaved), lease_s=self._lease_s, checkpoints=unsaved)
        return [one.outcome for one in recorded]

    def release(self, late: CallResult) -> None:
        """Release the documents of a claim that returned after the worker had stopped."""
        if late.claims:
            with suppress(StoreError):
                self._queue.finish([Released(claim.fence) for claim in late.claims])

    def _read(self, outcomes: Sequence[Outcome]) -> dict[str, Document]:
        if not self._reads_documents:
            return {}
        certain = Completed, Stopped
        ids = [one.fence.document for one in outcomes if not isinstance(one, certain)]
        documents: dict[str, Document] = {}
        with suppress(StoreError):  # the outcomes are recorded; `state_after` has defaults
            for start in range(0, len(ids), PAGE_MAX):
                wanted = Filter(ids=tuple(ids[start : start + PAGE_MAX]))
                found = self._queue.queries.find(wanted, size=PAGE_MAX).documents
                documents.update((document.id, document) for document in found)
        return documents


def outcome_of(ended: AttemptResult, random: Callable[[], float]) -> Outcome:
    """Return what to record of an attempt that a handler ended."""
    held, answer, seconds, content, details = ended
    fence, text = held.fence, answer.text
    match answer.type:
        case results.DONE:
            return Completed(fence, text, content, microseconds(seconds))
        case results.NEXT:
            assert answer.target is not None
            cost = None if answer.cost is None else cost_in_millionths(answer.cost)
            return Advanced(fence, answer.target, text, content, cost)
        case results.LATER:
            return Snoozed(fence, microseconds(answer.after_s or 0.0))
        case results.UNAVAILABLE:
            after_us = PROBE_US if answer.after_s is None else microseconds(answer.after_s)
            return OutageReport(fence, text or "", after_us, answer.target)
        case results.GIVE_UP:
            return Failed(fence, text or "", details=details)
    assert answer.type == results.RETRY
    attempt, backoff = held.claim.document.attempts, held.options.retry
    delay = delay_us(backoff, attempt, random, answer.after_s)
    return Failed(fence, text or "", delay, details)


def retry_us_of(outcome: Outcome) -> int | None:
    """Return after which time the document can be claimed again at the earliest; None: never."""
    match outcome:
        case Failed():
            return outcome.retry_in_us
        case Snoozed():
            return outcome.delay_us
        case OutageReport():
            return outcome.retry_after_us
    return None


def ended_document(outcome: Outcome, claimed: Document, read: Document | None) -> Document:
    """Return the document as it was claimed, with the state that the outcome led to, and the error
    if the store refused the outcome."""
    state = state_after(outcome, claimed, read)
    if state is State.DEAD and read is not None:
        return claimed._replace(state=state, error=read.error)
    return claimed._replace(state=state)


def state_after(outcome: Outcome, claimed: Document, read: Document | None) -> State:
    """Return the state that an outcome led to, given the document as it was claimed, and as it was
    `read` shortly after.

    Another worker may have claimed the document in between. DEAD in the same step means that this
    was the last attempt, or that the outcome was refused; CANCELLED that a cancellation preceded
    the outcome.
    """
    if isinstance(outcome, Completed):
        return State.COMPLETED
    if isinstance(outcome, Stopped) or (read is not None and read.state is State.CANCELLED):
        return State.CANCELLED
    if isinstance(outcome, Released):
        return State.WAITING
    if read is not None and read.state is State.DEAD and read.step == claimed.step:
        return State.DEAD
    if isinstance(outcome, Advanced):
        return State.WAITING
    if isinstance(outcome, Failed) and outcome.retry_in_us is None:
        return State.DEAD
    return State.DELAYED
