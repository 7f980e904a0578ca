"""What happens in a worker, as values: `Worker(on_event=…)` gets each of them, in this order for
one document. One place turns them into lines, another into a picture."""

from typing import NamedTuple

from fairturn.model import Document, Fence, Outcome, Progress


class DocumentClaimed(NamedTuple):
    """The document is ours; these events come in the order of the claims."""

    document: Document
    fence: Fence


class DocumentProgressed(NamedTuple):
    """The handler said how far it is."""

    fence: Fence
    progress: Progress


class DocumentEnded(NamedTuple):
    """The attempt is over and its outcome is recorded."""

    document: Document  # as it was claimed, with the state that the outcome led to
    outcome: Outcome
    seconds: float  # that the handler took; 0 if it was given back before it started


class DocumentLost(NamedTuple):
    """The lease was lost: nothing of this attempt is recorded, and its child is ended."""

    document: Document
    fence: Fence


class DocumentCancelled(NamedTuple):
    """The document was cancelled while it waited or was delayed. Of all workers of the queue, the
    next one that claims gets this event; it is lost if that worker dies."""

    document: Document


class LinePrinted(NamedTuple):
    """A handler printed a line, without control characters; the id is empty outside a document."""

    document: str
    line: str


class StoreFailed(NamedTuple):
    """The store did not answer as it should; the same is tried again after the pause."""

    error: str
    pause_s: float


class StoreAnswers(NamedTuple):
    """The store answers again, after it had not for so long."""

    away_s: float


class Idle(NamedTuple):
    """A worker that ends when the queue is empty has had nothing to do for 2 s, and says once how
    many documents it waits for: these wait and nobody may claim them, because their customers are
    paused or at their limit; these are delayed; these run in other workers."""

    waiting: int
    delayed: int
    running: int


class Stopping(NamedTuple):
    """The worker was asked to stop and claims no more. `running` documents have not ended, and
    `unrecorded` have ended without being recorded yet."""

    now: bool
    running: int
    unrecorded: int = 0


Event = (
    DocumentClaimed
    | DocumentProgressed
    | DocumentEnded
    | DocumentLost
    | DocumentCancelled
    | LinePrinted
    | StoreFailed
    | StoreAnswers
    | Idle
    | Stopping
)
