"""The documents that a worker could still run: whether to claim again, and when to end."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fairturn.model import NOT_ENDED, PAGE_MAX, Filter, State
from fairturn.queue import Queue
from fairturn.worker.dispatcher import ClaimLimits


class PendingDocuments(NamedTuple):
    """How many documents of a worker's kinds have not ended, and how many documents of the queue
    were cancelled in total."""

    waiting: int
    delayed: int
    running: int
    cancelled: int
    waiting_by_kind: Mapping[str, int] | None = None  # of a worker that serves some kinds

    def can_start(self, limits: ClaimLimits) -> bool:
        """Return whether a document waits that the worker may claim, or could if it had a slot."""
        if self.waiting_by_kind is None or not limits.n:
            return self.waiting > 0
        return any(n and limits.allow(kind) for kind, n in self.waiting_by_kind.items())


def read_pending(
    queue: Queue, kinds: Sequence[str] | None, *, until_empty: bool
) -> PendingDocuments:
    """Return the numbers for a worker that serves these kinds; None stands for every kind.

    Of some kinds, delayed and running documents are counted with `until_empty` if none waits, up to
    `PAGE_MAX`. They are read with the waiting ones in one snapshot, in which no document is missed.
    """
    summary = queue.summary()
    in_queue = summary.waiting, summary.delayed, summary.running
    if kinds is None:
        return PendingDocuments(*in_queue, summary.cancelled)
    waiting = {kind.name: kind.waiting for kind in queue.kinds() if kind.name in kinds}
    states = Counter({State.WAITING: sum(waiting.values())})
    if until_empty and any(in_queue) and not states[State.WAITING]:
        left = queue.queries.find(Filter(states=NOT_ENDED, kinds=tuple(kinds)), size=PAGE_MAX)
        states = Counter(document.state for document in left.documents)
    return PendingDocuments(
        states[State.WAITING],
        states[State.DELAYED],
        states[State.RUNNING],
        summary.cancelled,
        waiting,
    )
