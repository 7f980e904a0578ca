"""Records outcomes in the store, and reads the states that they led to."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

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


class CallResult(NamedTuple):
    """The result of a call of the store."""

    claims: Sequence[Claim]
    lost: Sequence[Fence]  # attempts whose lease was lost
    states: Mapping[str, State]  # read after the call
    cancelled: Sequence[Document] = ()  # cancelled before they were claimed


class OutcomeRecorder:
    """Records outcomes, alone or with a claim. Threads of `store_calls.py` call its methods.

    With `reads_states` it reads the documents whose final state depends on more than the outcome.
    """

    def __init__(self, queue: Queue, worker: str, lease_s: float, *, reads_states: bool) -> None:
        self._queue = queue
        self._worker = worker
        self._lease_s = lease_s
        self._reads_states = reads_states

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
