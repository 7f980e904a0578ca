"""The interface between the supervisor and the executors, processes or threads."""

import os
import selectors
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from fairturn.model import BodyType, Claim, ContentRef, Fence, Progress
from fairturn.worker.handler import Answer, DocumentFields

# Documents queued behind a document that runs for longer than this move to another slot.
STUCK_S = 0.05


class ActiveClaim:
    """A claimed document, from the claim until its outcome is recorded."""

    __slots__ = (
        "begun_s",
        "claim",
        "claimed_s",
        "dropped",
        "fence",
        "fields",
        "progress",
        "reported",
    )

    def __init__(self, claim: Claim, claimed_s: float, path: str | None) -> None:
        document = claim.document
        self.claim = claim
        self.fence: Fence = claim.fence
        self.claimed_s = claimed_s
        self.begun_s: float | None = None  # start of the handler
        self.dropped = False  # its result is discarded
        self.progress: Progress | None = None
        self.reported: Progress | None = None
        self.fields: DocumentFields = (
            document.id,
            claim.fence.number,
            document.customer,
            document.name,
            document.metadata_json,
            document.priority,
            document.count,
            document.attempts,
            document.size_bytes,
            document.submitted_at_us,
            document.body_type,
            claim.body,
            path,
            document.sha256,
        )

    def report(self, done: float, total: float | None) -> None:
        self.progress = Progress(done, total)

    def ran_s(self, now_s: float) -> float:
        """Return how long the handler has run; 0 if it has not started."""
        return 0.0 if self.begun_s is None else max(0.0, now_s - self.begun_s)

    @property
    def is_content(self) -> bool:
        return self.claim.document.body_type is BodyType.CONTENT


class AttemptResult(NamedTuple):
    """A finished attempt."""

    held: ActiveClaim
    answer: Answer
    seconds: float
    content: ContentRef | None = None  # the result file


class Executor(Protocol):
    """Runs handlers in its slots."""

    can_end: bool  # whether a running handler can be killed

    def free(self) -> int:
        """Return the number of idle slots."""
        ...

    def unstarted(self) -> int:
        """Return how many given documents have not started."""
        ...

    def unstarted_since_s(self) -> float | None:
        """Return when the oldest of them was claimed; None if there is none."""
        ...

    def running(self) -> list[ActiveClaim]:
        """Return the documents that have started."""
        ...

    def give(self, documents: list[ActiveClaim]) -> None:
        """Start the documents in this order, as slots become free."""
        ...

    def make_way(self) -> None:
        """Let idle slots start their documents before the caller continues."""
        ...

    def collect(self) -> list[AttemptResult]:
        """Return the attempts that ended since the last call."""
        ...

    def tend(self, now_s: float) -> None:
        """Enforce limits, replace children, and move documents from stuck slots."""
        ...

    def due_s(self) -> float | None:
        """Return when `tend` is due; None if nothing is."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of an attempt, for `ring`, or for the timeout."""
        ...

    def ring(self) -> None:
        """End `wait`, from any thread or a signal handler."""
        ...

    def take_back(self) -> list[ActiveClaim]:
        """Remove and return the documents that have not started."""
        ...

    def stop(self, held: ActiveClaim) -> None:
        """Kill a running handler, or set `stop_requested`; its result is discarded."""
        ...

    def stop_replacing(self) -> None:
        """Do not replace children that end from now on."""
        ...

    def close(self) -> None:
        """Kill all handlers and free the resources. Idempotent."""
        ...


class WakeupPipe:
    """A selector with a pipe that wakes the thread waiting in it."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._rung = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read_end, selectors.EVENT_READ, None)

    def ring(self) -> None:
        """Wake the thread. Calls before it wakes are combined."""
        if not self._rung:
            self._rung = True
            with suppress(BlockingIOError, OSError):
                os.write(self._write_end, b"!")

    def watch(self, descriptor: int, events: int, then: Callable[[int], None]) -> None:
        """Call `then` with the event mask when the descriptor is ready."""
        self._selector.register(descriptor, events, then)

    def forget(self, descriptor: int) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def wait(self, timeout_s: float) -> None:
        """Wait for a descriptor, for `ring`, or for the timeout."""
        for key, events in self._selector.select(max(0.0, timeout_s)):
            # An earlier callback may have closed the descriptor, and its number may be reused.
            if key.data is not None and self._selector.get_map().get(key.fd) == key:
                key.data(events)
        # Drain before clearing the flag: the caller handles a `ring` that comes in between.
        with suppress(BlockingIOError):
            os.read(self._read_end, 64)
        self._rung = False

    def close(self) -> None:
        self._selector.close()
        os.close(self._read_end)
        os.close(self._write_end)
