"""Handlers in threads of this process: cheap to start, impossible to end.

Threads take documents from one queue, each as soon as it is free, so that none waits behind a slow
one. Nothing is locked for a document: appending to a deque and taking from it are atomic.
"""

import threading
import time
from collections import deque
from pathlib import Path
from queue import SimpleQueue

from fairturn.clock import stopwatch
from fairturn.contents.local import Contents
from fairturn.worker.executor import Bell, Ended, Held
from fairturn.worker.handler import (
    AGAIN,
    NEVER,
    ClaimedDocument,
    Handler,
    Running,
    folder_of,
)
from fairturn.worker.output import Output, pass_on
from fairturn.worker.prefetch import Pace
from fairturn.worker.results import keep_file

# While documents end one after the other, the supervisor looks by itself after this time at most.
LOOK_S = 0.004
_FAILED = (AGAIN, NEVER)
_CLOSE_S = 0.2  # for threads that are between two documents, or store the file of a result
_WAKING_S = 0.000_05  # about as long as a thread takes to wake up
WORTH_WAKING_S = 0.005  # of work, which is how long a thread may keep the interpreter's lock


class ThreadCrew:
    """As many threads as documents run at once."""

    can_end = False

    def __init__(
        self,
        handler: Handler,
        *,
        concurrency: int,
        contents: Contents,
        folder: Path,
        pace: Pace,
        output: Output,
    ) -> None:
        self._handler = handler
        self._output = output
        self._pace = pace
        self._contents = contents
        self._folders = str(folder)
        self._bell = Bell()
        self._ready: deque[Held] = deque()
        self._done: deque[Ended] = deque()
        self._traces: deque[tuple[str, str]] = deque()  # of documents that failed
        self._started: dict[int, tuple[Held, ClaimedDocument]] = {}
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._idle: set[int] = set()
        self._closed = False
        self._given_s = 0.0
        self._slow = False  # what is ready takes longer than was thought
        self._threads = [
            threading.Thread(target=self._serve, args=(n,), name=f"fairturn-{n}", daemon=True)
            for n in range(concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def free(self) -> int:
        return len(self._idle)

    def unstarted(self) -> int:
        return len(self._ready)

    def unstarted_since_s(self) -> float | None:
        try:
            return self._ready[0].claimed_s
        except IndexError:
            return None

    def running(self) -> list[Held]:
        return [held for held, _ in list(self._started.values())]

    def give(self, documents: list[Held]) -> None:
        self._ready.extend(documents)
        self._slow = False
        self._given_s = stopwatch()
        self._wake_some()

    def make_way(self) -> None:
        """A thread that was woken begins only when it has the interpreter, and one that runs would
        keep it until it waits for something."""
        time.sleep(_WAKING_S)

    def _wake_some(self) -> None:
        """Wake a thread for each 5 ms of work: more would only fight over the interpreter's lock.
        If the work takes longer than it used to, `tend` wakes the others."""
        worth = 1 + int(len(self._ready) * self._pace.mean_s / WORTH_WAKING_S)
        if self._slow or not self._pace.ahead:
            worth = len(self._ready)
        for _ in range(min(worth, len(self._ready), len(self._idle)) - self._wake.qsize()):
            self._wake.put(True)

    def collect(self) -> list[Ended]:
        done = self._done
        ended = [done.popleft() for _ in range(len(done))]
        while self._traces:
            pass_on(self._output, *self._traces.popleft())
        if ended:
            self._pace.add(sum([one.seconds for one in ended]), len(ended))
        return [one for one in ended if not one.held.dropped]

    def tend(self, now_s: float) -> None:
        self._slow = bool(self._ready and now_s > self._given_s + WORTH_WAKING_S)
        if self._slow and self._idle:
            self._wake_some()

    def due_s(self) -> float | None:
        return stopwatch() + LOOK_S if self._ready or self._done else None

    def wait(self, timeout_s: float) -> None:
        self._bell.wait(timeout_s)

    def ring(self) -> None:
        self._bell.ring()

    def take_back(self) -> list[Held]:
        taken = []
        try:
            while True:
                taken.append(self._ready.pop())
        except IndexError:
            return taken[::-1]

    def stop(self, held: Held) -> None:
        held.dropped = True
        for running, document in list(self._started.values()):
            if running is held:
                document.stop_requested = True

    def replace_no_more(self) -> None:
        """A thread is never replaced."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._ready.clear()
        busy = set(self._started)
        for _ in self._threads:
            self._wake.put(False)
        until_s = stopwatch() + _CLOSE_S
        for number, thread in enumerate(self._threads):
            if number not in busy:
                thread.join(max(0.0, until_s - stopwatch()))
        # A thread that still runs may ring, and the descriptor must not be another's by then.
        if not any(thread.is_alive() for thread in self._threads):
            self._bell.close()

    def _serve(self, number: int) -> None:
        def trace(text: str) -> None:
            held, _ = self._started[number]
            self._traces.append((held.fence.document, text))

        running = Running(self._handler, trace)
        while True:
            # Idle first, then look: who gives a document in between sees that it must wake us.
            self._idle.add(number)
            self._bell.ring()
            if not self._ready and not self._wake.get():
                break
            self._idle.discard(number)
            try:
                while True:
                    ended = self._run(running, number, self._ready.popleft())
                    self._done.append(ended)
                    if self._ready and ended.seconds > LOOK_S:
                        self._bell.ring()
            except IndexError:
                continue
        running.close()

    def _run(self, running: Running, number: int, held: Held) -> Ended:
        document = ClaimedDocument(held.told, self._folders, held.report)
        self._started[number] = held, document
        held.begun_s = begun_s = stopwatch()
        answer = running.run(document)
        seconds = stopwatch() - begun_s
        if answer[0] in _FAILED:
            running.explain()
        del self._started[number]
        if answer[2] is None:
            return Ended(held, answer, seconds)
        answer, content = keep_file(self._contents, answer, folder_of(self._folders, *held.fence))
        return Ended(held, answer, seconds, content)
