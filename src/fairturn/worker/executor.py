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
from fairturn.worker.handler import DocumentFields, StoredFile, folder_of, remove_folder
from fairturn.worker.kinds import KindOptions
from fairturn.worker.output import Output
from fairturn.worker.prefetch import PrefetchPolicy
from fairturn.worker.results import RETRY, Answer


@dataclass(slots=True, eq=False)
class ActiveClaim:
    """A claimed document, from the claim until its outcome is recorded."""

    claim: Claim
    claimed_s: float
    options: KindOptions
    path: str | None = None  # of the stored content
    previous_path: str | None = None  # of the file of the last step
    begun_s: float | None = None  # start of the handler
    dropped: bool = False  # its result is discarded
    progress: Progress | None = None
    reported: Progress | None = None
    checkpoint: str | None = None
    saved: str | None = None  # the checkpoint that is stored

    @property
    def fence(self) -> Fence:
        return self.claim.fence

    @property
    def kind(self) -> str:
        return self.claim.document.kind

    def fields(self) -> DocumentFields:
        """Return what the handler gets of the document."""
        claim, document = self.claim, self.claim.document
        content, sha256 = claim.previous_content, document.sha256
        return DocumentFields(
            id=document.id,
            number=self.fence.number,
            customer=document.customer,
            kind=document.kind,
            name=document.name,
            metadata_json=document.metadata_json,
            priority=document.priority,
            count=document.count,
            attempt=document.attempts,
            step=document.step,
            size_bytes=document.size_bytes,
            submitted_at_us=document.submitted_at_us,
            is_payload=document.body_type is BodyType.PAYLOAD,
            body=claim.body,
            path=self.path,
            sha256=None if sha256 is None else sha256.hex(),
            previous_json=claim.previous,
            previous_file=None
            if content is None
            else StoredFile(self.previous_path, content.size_bytes, content.sha256.hex()),
            steps=claim.steps,
            checkpoint_json=claim.checkpoint,
        )

    def report(self, done: float, total: float | None) -> None:
        self.progress = Progress(done, total)

    def save(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint

    @property
    def has_news(self) -> bool:
        """Whether it has progress or a checkpoint that is not stored."""
        return self.progress is not self.reported or self.checkpoint is not self.saved

    def ran_s(self, now_s: float) -> float:
        """Return how long the handler has run; 0 if it has not started."""
        return 0.0 if self.begun_s is None else max(0.0, now_s - self.begun_s)


class AttemptResult(NamedTuple):
    """A finished attempt."""

    held: ActiveClaim
    answer: Answer
    seconds: float
    content: ContentRef | None = None  # the result file
    details: str | None = None  # the end of its traceback and output, of a failed attempt


class ExecutorResources(NamedTuple):
    """What the executors of a worker share."""

    contents: Contents
    folder: Path  # each attempt has one in it
    pace: PrefetchPolicy
    wakeup: "WakeupPipe"
    output: Output


class Executor(ABC):
    """Runs handlers in threads, or in children with the same limits, up to `slots` at a time. The
    supervisor's thread calls its methods."""

    def __init__(self, slots: int, resources: ExecutorResources) -> None:
        self._slots_max = slots
        self._contents, folder, self._pace, self._wakeup, self._output = resources
        self._folders = str(folder)
        self._ready: deque[ActiveClaim] = deque()  # given, and in no slot
        self._done: deque[AttemptResult] = deque()  # until `take_done`
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

    def take_done(self) -> list[AttemptResult]:
        """Return the attempts that ended since the last call, also dropped ones."""
        return [self._done.popleft() for _ in range(len(self._done))]

    @abstractmethod
    def tend(self, now_s: float) -> None:
        """Enforce limits, replace children, and move documents from stuck slots."""

    @abstractmethod
    def due_s(self) -> float | None:
        """Return when `tend` is due; None if nothing is."""

    @abstractmethod
    def take_back(self) -> list[ActiveClaim]:
        """Remove and return the documents that have not started."""

    @abstractmethod
    def stop(self, held: ActiveClaim) -> bool:
        """Discard the result of a running document. Return True if its process is being killed,
        False if only `stop_requested` could be set."""

    @abstractmethod
    def stop_replacing(self) -> None:
        """Do not replace children that end from now on."""

    @abstractmethod
    def close(self) -> bool:
        """End all handlers, and return whether no thread is left that uses `wakeup`. Idempotent."""

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
