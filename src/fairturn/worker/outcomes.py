"""Outcomes on their way into the store: recorded, and the states that they led to."""

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
from fairturn.stores.contract import Store


class Recorded(NamedTuple):
    """What a call of the store gave: claims, attempts that had lost their lease, the states of
    documents as they were read after it, and documents that were cancelled before a claim."""

    claims: Sequence[Claim]
    lost: Sequence[Fence]
    states: Mapping[str, State]
    cancelled: Sequence[Document] = ()


class Recorder:
    """Records outcomes, alone or with a claim. Threads of `store_calls.py` call its methods.

    With `reads_states` it reads the documents whose final state depends on more than the outcome.
    """

    def __init__(self, store: Store, worker: str, lease_us: int, *, reads_states: bool) -> None:
        self._store = store
        self._worker = worker
        self._lease_us = lease_us
        self._reads_states = reads_states

    def claim(self, wanted: int, outcomes: Sequence[Outcome]) -> Recorded:
        """Record the outcomes and claim documents, in one transaction."""
        claimed = self._store.claim(
            wanted, worker=self._worker, lease_us=self._lease_us, outcomes=outcomes, synced=False
        )
        return Recorded(claimed.claims, claimed.lost, self._states(outcomes), claimed.cancelled)

    def finish(self, outcomes: Sequence[Outcome]) -> Recorded:
        """Record the outcomes."""
        return Recorded((), self._store.finish(outcomes), self._states(outcomes))

    def release(self, late: Recorded) -> None:
        """Release the documents of a claim whose reply came after the worker had stopped."""
        if late.claims:
            with suppress(StoreError):
                self._store.finish([Released(claim.fence) for claim in late.claims])

    def _states(self, outcomes: Sequence[Outcome]) -> dict[str, State]:
        if not self._reads_states:
            return {}
        ids = [one.fence.document for one in outcomes if isinstance(one, Failed | Released)]
        states: dict[str, State] = {}
        with suppress(StoreError):  # the outcomes are recorded; `state_after` knows the usual state
            for start in range(0, len(ids), PAGE_MAX):
                wanted = Filter(ids=tuple(ids[start : start + PAGE_MAX]))
                found = self._store.find(wanted, size=PAGE_MAX).documents
                states.update((document.id, document.state) for document in found)
        return states


def state_after(outcome: Outcome, read: State | None) -> State:
    """The state that an outcome led to, given the state that the document had shortly after.

    By then another worker may have claimed the document. A failure was the last one if the document
    is dead, and a request to cancel came first if it is cancelled.
    """
    if isinstance(outcome, Completed):
        return State.COMPLETED
    if isinstance(outcome, Stopped) or read is State.CANCELLED:
        return State.CANCELLED
    if isinstance(outcome, Released):
        return State.WAITING
    return State.DEAD if read is State.DEAD or outcome.retry_in_us is None else State.DELAYED
