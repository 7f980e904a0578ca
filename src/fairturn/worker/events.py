"""The events of a worker, which `Worker(on_event=…)` receives; those of one document in order."""

from collections.abc import Callable
from typing import NamedTuple

from fairturn.model import Document, Fence, Outcome, Progress


class DocumentClaimed(NamedTuple):
    """The worker has claimed the document. These events arrive in the order of service."""

    document: Document
    fence: Fence


class DocumentProgressed(NamedTuple):
    """The progress that the handler reported is stored."""

    fence: Fence
    progress: Progress


class DocumentEnded(NamedTuple):
    """The attempt has ended and its outcome is recorded. After `Advanced`, `Snoozed` and
    `OutageReport` the document waits or is delayed."""

    document: Document  # as it was claimed, with the state that the outcome led to
    outcome: Outcome
    seconds: float  # how long the handler ran; 0 if the document was released before its start


class DocumentLost(NamedTuple):
    """The lease was lost: nothing from this attempt is recorded, and its process is killed."""

    document: Document
    fence: Fence


class DocumentCancelled(NamedTuple):
    """The document was cancelled while it waited or was delayed. The next worker that claims
    receives this event; if that worker dies, no worker does."""

    document: Document


class LinePrinted(NamedTuple):
    """A handler printed a line; its control characters are replaced."""

    document: str  # its id; empty for output outside a document
    line: str


class StoreFailed(NamedTuple):
    """A call of the store failed; it is retried after `pause_s`."""

    error: str
    pause_s: float


class StoreRecovered(NamedTuple):
    """The store responds again, after an outage of `away_s`."""

    away_s: float


class WorkerIdle(NamedTuple):
    """A worker with `until_empty` has been idle for 2 s. Emitted once, with the documents left."""

    waiting: int  # not claimable: their customers or kinds are paused, at a limit or held
    delayed: int
    running: int  # in other workers


class WorkerStopping(NamedTuple):
    """The worker is stopping and claims no more documents."""

    now: bool  # without a grace period
    running: int
    unrecorded: int = 0  # attempts that have ended and are not recorded yet


Event = (
    DocumentClaimed
    | DocumentProgressed
    | DocumentEnded
    | DocumentLost
    | DocumentCancelled
    | LinePrinted
    | StoreFailed
    | StoreRecovered
    | WorkerIdle
    | WorkerStopping
)
OnEvent = Callable[[Event], None]
