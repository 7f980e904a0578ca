"""What the supervisor and those who run the handlers, children or threads, have in common."""

import os
import selectors
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol

from fairturn.model import Claim, ContentRef, Fence, Kind, Progress
from fairturn.worker.handler import Answer, Told

# Documents that wait longer than this behind others that turned out slow are taken elsewhere.
STUCK_S = 0.05


class Held:
    """A document that this worker has claimed, until its outcome is recorded."""

    __slots__ = (
        "begun_s",
        "claim",
        "claimed_s",
        "dropped",
        "fence",
        "progress",
        "reported",
        "told",
    )

    def __init__(self, claim: Claim, claimed_s: float, path: str | None) -> None:
        document = claim.document
        self.claim = claim
        self.fence: Fence = claim.fence
        self.claimed_s = claimed_s
        self.begun_s: float | None = None  # since when its handler runs
        self.dropped = False  # nothing of it is to be recorded any more
        self.progress: Progress | None = None
        self.reported: Progress | None = None
        self.told: Told = (
            document.id,
            claim.fence.number,
            document.customer,
            document.name,
            document.metadata_json,
            document.priority,
            document.count,
            document.attempts,
            document.size_bytes,
            document.submitted_at,
            document.kind,  # a text as well
            claim.body,
            path,
            document.sha256,
        )

    def report(self, done: float, total: float | None) -> None:
        """What a handler says about its progress."""
        self.progress = Progress(done, total)

    def ran_s(self, now_s: float) -> float:
        """For how long it has run; 0 if it has not started."""
        return 0.0 if self.begun_s is None else max(0.0, now_s - self.begun_s)

    @property
    def is_content(self) -> bool:
        """Whether it carries bytes, and not JSON."""
        return self.claim.document.kind is Kind.CONTENT


class Ended(NamedTuple):
    """An attempt that ran and is over, one way or another."""

    held: Held
    answer: Answer
    seconds: float
    content: ContentRef | None = None  # of the file that is the result


class Crew(Protocol):
    """Those who run the handlers."""

    can_end: bool  # whether what has started can be ended

    def free(self) -> int:
        """How many documents could start at once."""
        ...

    def unstarted(self) -> int:
        """How many documents were given and have not started."""
        ...

    def unstarted_since_s(self) -> float | None:
        """Since when the first of them waits."""
        ...

    def running(self) -> list[Held]:
        """Those that have started."""
        ...

    def give(self, documents: list[Held]) -> None:
        """Start these as slots become free, in this order."""
        ...

    def make_way(self) -> None:
        """Let those begin that could start at once, before anything else is done here."""
        ...

    def collect(self) -> list[Ended]:
        """Those that have ended since the last call."""
        ...

    def tend(self, now_s: float) -> None:
        """Do what is due: limits, replacements, a better distribution."""
        ...

    def due_s(self) -> float | None:
        """When `tend` has something to do again."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until something has ended, somebody rang, or the time is over."""
        ...

    def ring(self) -> None:
        """Wake who waits, from any thread or a signal handler."""
        ...

    def take_back(self) -> list[Held]:
        """Everything that has not started."""
        ...

    def stop(self, held: Held) -> None:
        """End one that has started, as far as that is possible; it is not collected any more."""
        ...

    def replace_no_more(self) -> None:
        """The end is near: who ends is not replaced."""
        ...

    def close(self) -> None:
        """End everything. Calling it twice does no harm."""
        ...


class Bell:
    """A pipe to wake a thread that waits, and whatever else it waits for."""

    def __init__(self) -> None:
        self._hear, self._pull = os.pipe()
        os.set_blocking(self._hear, False)
        os.set_blocking(self._pull, False)
        self._rung = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._hear, selectors.EVENT_READ, None)

    def ring(self) -> None:
        """Wake the thread; many rings before it looks are one."""
        if not self._rung:
            self._rung = True
            with suppress(BlockingIOError, OSError):
                os.write(self._pull, b"!")

    def watch(self, descriptor: int, events: int, then: Callable[[int], None]) -> None:
        """Call `then` with what happened when the descriptor is ready."""
        self._selector.register(descriptor, events, then)

    def forget(self, descriptor: int) -> None:
        """Watch it no more."""
        with suppress(KeyError, ValueError):
            self._selector.unregister(descriptor)

    def wait(self, timeout_s: float) -> None:
        """Until something happens or the time is over."""
        for key, events in self._selector.select(max(0.0, timeout_s)):
            # One of those before may have closed the descriptor, and its number may be another's.
            if key.data is not None and self._selector.get_map().get(key.fd) == key:
                key.data(events)
        # Read before the flag falls: who rings in between is heard by what follows this call.
        with suppress(BlockingIOError):
            os.read(self._hear, 64)
        self._rung = False

    def close(self) -> None:
        """Give back the descriptors."""
        self._selector.close()
        os.close(self._hear)
        os.close(self._pull)
