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
    Claim,
    Completed,
    Document,
    Failed,
    Fence,
    Filter,
    Outcome,
    Released,
    State,
    Stopped,
)
from fairturn.queue import Queue
from fairturn.worker.backoff import Backoff, delay_us
from fairturn.worker.events import DocumentEnded, DocumentLost, OnEvent
from fairturn.worker.executor import ActiveClaim, AttemptResult
from fairturn.worker.handler import DONE, FILE, GIVE_UP, RETRY

_COUNTED: dict[type[Outcome], str] = {
    Completed: "completed",
    Failed: "failed",
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


class UnrecordedOutcome(NamedTuple):
    """An attempt that has ended and is not recorded yet."""

    outcome: Outcome
    held: ActiveClaim
    seconds: float


class CallResult(NamedTuple):
    """The result of a call of the store."""

    claims: Sequence[Claim]
    lost: Sequence[Fence]  # attempts whose lease was lost
    states: Mapping[str, State]  # read after the call
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
                state = state_after(outcome, reply.states.get(document.id))
                self._on_event(DocumentEnded(document._replace(state=state), outcome, seconds))

    def lose(self, held: ActiveClaim, outcome: Outcome | None = None) -> None:
        """Drop an attempt whose lease was lost, and delete its result file."""
        held.dropped = True
        if self.held.pop(held.fence, None) is None:
            return
        self._counts["lost"] += 1
        if isinstance(outcome, Completed) and outcome.content is not None:
            self._discard(outcome.content.name)
        if self._on_event is not None:
            self._on_event(DocumentLost(held.claim.document, held.fence))

    def _land(self, recorded: list[UnrecordedOutcome]) -> None:
        self._in_flight = [one for one in self._in_flight if one is not recorded]


class OutcomeRecorder:
    """Records outcomes, alone or with a claim. Threads of `store_calls.py` call its methods.

    With `on_event` it reads the documents whose final state depends on more than the outcome.
    """

    def __init__(self, queue: Queue, worker: str, lease_s: float, on_event: OnEvent | None) -> None:
        self._queue = queue
        self._worker = worker
        self._lease_s = lease_s
        self._reads_states = on_event is not None

    def claim(self, wanted: int, outcomes: Sequence[Outcome]) -> CallResult:
        """Record the outcomes and claim documents, in one transaction."""
        claimed = self._queue.claim(
            wanted, worker=self._worker, lease_s=self._lease_s, outcomes=outcomes, synced=False
        )
        return CallResult(claimed.claims, claimed.lost, self._states(outcomes), claimed.cancelled)

    def finish(self, outcomes: Sequence[Outcome]) -> CallResult:
        return CallResult((), self._queue.finish(outcomes), self._states(outcomes))

    def release(self, late: CallResult) -> None:
        """Release the documents of a claim that returned after the worker had stopped."""
        if late.claims:
            with suppress(StoreError):
                self._queue.finish([Released(claim.fence) for claim in late.claims])

    def _states(self, outcomes: Sequence[Outcome]) -> dict[str, State]:
        if not self._reads_states:
            return {}
        ids = [one.fence.document for one in outcomes if isinstance(one, Failed | Released)]
        states: dict[str, State] = {}
        with suppress(StoreError):  # the outcomes are recorded; `state_after` has defaults
            for start in range(0, len(ids), PAGE_MAX):
                wanted = Filter(ids=tuple(ids[start : start + PAGE_MAX]))
                found = self._queue.queries.find(wanted, size=PAGE_MAX).documents
                states.update((document.id, document.state) for document in found)
        return states


def outcome_of(
    ended: AttemptResult, retry: Backoff, random: Callable[[], float]
) -> Completed | Failed:
    """Return what to record of an attempt that a handler ended."""
    held, answer, seconds, content = ended
    if answer.kind in (DONE, FILE):
        return Completed(held.fence, answer.text, content, microseconds(seconds))
    if answer.kind == GIVE_UP:
        return Failed(held.fence, answer.text or "")
    assert answer.kind == RETRY
    delay = delay_us(retry, held.claim.document.attempts, random, answer.after_s)
    return Failed(held.fence, answer.text or "", delay)


def state_after(outcome: Outcome, read: State | None) -> State:
    """Return the state that an outcome led to, given the state that was `read` shortly after.

    Another worker may have claimed the document in between. DEAD means that this failure was the
    last attempt, CANCELLED that a cancellation preceded the outcome.
    """
    if isinstance(outcome, Completed):
        return State.COMPLETED
    if isinstance(outcome, Stopped) or read is State.CANCELLED:
        return State.CANCELLED
    if isinstance(outcome, Released):
        return State.WAITING
    return State.DEAD if read is State.DEAD or outcome.retry_in_us is None else State.DELAYED
