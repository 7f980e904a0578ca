"""`Executor`, the base class of the process and thread executors, and the claims that it shares
with the supervisor."""

import os
import selectors
import stat
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fairturn.contents.local import Contents, chunks_of
from fairturn.model import BodyType, Claim, ContentRef, Fence, Progress
from fairturn.worker.handler import RETRY, Answer, DocumentFields, folder_of, remove_folder
from fairturn.worker.output import Output
from fairturn.worker.prefetch import PrefetchPolicy


@dataclass(slots=True, eq=False)
class ActiveClaim:
    """A claimed document, from the claim until its outcome is recorded."""

    claim: Claim
    claimed_s: float
    path: str | None  # of the stored content
    begun_s: float | None = None  # start of the handler
    dropped: bool = False  # its result is discarded
    progress: Progress | None = None
    reported: Progress | None = None

    @property
    def fence(self) -> Fence:
        return self.claim.fence

    def fields(self) -> DocumentFields:
        """Return what the handler gets of the document."""
        document = self.claim.document
        return DocumentFields(
            id=document.id,
            number=self.fence.number,
            customer=document.customer,
            name=document.name,
            metadata_json=document.metadata_json,
            priority=document.priority,
            count=document.count,
            attempt=document.attempts,
            size_bytes=document.size_bytes,
            submitted_at_us=document.submitted_at_us,
            is_payload=document.body_type is BodyType.PAYLOAD,
            body=self.claim.body,
            path=self.path,
            sha256=document.sha256,
        )

    def report(self, done: float, total: float | None) -> None:
        self.progress = Progress(done, total)

    def ran_s(self, now_s: float) -> float:
        """Return how long the handler has run; 0 if it has not started."""
        return 0.0 if self.begun_s is None else max(0.0, now_s - self.begun_s)


class AttemptResult(NamedTuple):
    """A finished attempt."""

    held: ActiveClaim
    answer: Answer
    seconds: float
    content: ContentRef | None = None  # the result file


class Executor(ABC):
    """Runs handlers in its slots. The supervisor's thread calls its methods."""

    can_end: bool  # whether a running handler can be killed

    def __init__(
        self, contents: Contents, folder: Path, pace: PrefetchPolicy, output: Output
    ) -> None:
        self._contents = contents
        self._folders = str(folder)  # each attempt has one in it
        self._pace = pace
        self._output = output
        self._wakeup = WakeupPipe()
        self._ready: deque[ActiveClaim] = deque()  # given, and in no slot
        self._done: deque[AttemptResult] = deque()  # until `collect`
        self._closed = False

    @abstractmethod
    def free(self) -> int:
        """Return the number of idle slots."""

    def unstarted(self) -> int:
        """Return how many given documents have not started."""
        return len(self._ready)

    def unstarted_since_s(self) -> float | None:
        """Return when the oldest of them was claimed; None if there is none."""
        try:
            return self._ready[0].claimed_s
        except IndexError:
            return None

    @abstractmethod
    def running(self) -> list[ActiveClaim]:
        """Return the documents that have started."""

    @abstractmethod
    def give(self, documents: list[ActiveClaim]) -> None:
        """Start the documents in this order, as slots become free."""

    def collect(self) -> list[AttemptResult]:
        """Return the attempts that ended since the last call."""
        return [one for one in self._take_done() if not one.held.dropped]

    def _take_done(self) -> list[AttemptResult]:
        return [self._done.popleft() for _ in range(len(self._done))]

    @abstractmethod
    def tend(self, now_s: float) -> None:
        """Enforce limits, replace children, and move documents from stuck slots."""

    @abstractmethod
    def due_s(self) -> float | None:
        """Return when `tend` is due; None if nothing is."""

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of an attempt, for `ring`, or for the timeout."""
        self._wakeup.wait(timeout_s)

    def ring(self) -> None:
        """End `wait`, from any thread or a signal handler."""
        self._wakeup.ring()

    @abstractmethod
    def take_back(self) -> list[ActiveClaim]:
        """Remove and return the documents that have not started."""

    @abstractmethod
    def stop(self, held: ActiveClaim) -> None:
        """Kill a running handler, or set `stop_requested`; its result is discarded."""

    @abstractmethod
    def stop_replacing(self) -> None:
        """Do not replace children that end from now on."""

    @abstractmethod
    def close(self) -> None:
        """Kill all handlers and free the resources. Idempotent."""

    def _folder_of(self, held: ActiveClaim) -> str:
        return folder_of(self._folders, *held.fence)

    def _kept(self, ended: AttemptResult) -> AttemptResult:
        """Copy the result file to the contents and remove the attempt's folder. If the copy fails,
        the answer is `RETRY`. Not called in the supervisor's thread."""
        path = ended.answer.path
        assert path is not None
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise OSError(f"{path} is not a regular file")
                return ended._replace(content=self._contents.put(chunks_of(file)))
        except Exception as error:  # the thread must survive any error of the contents
            text = f"result file {path} cannot be stored: {error}"
            return ended._replace(answer=Answer(RETRY, text))
        finally:
            remove_folder(self._folder_of(ended.held))


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
