"""Handlers in threads of this process: cheap to start, impossible to kill.

All threads take documents from one deque, so that none is queued behind a slow one. Its operations
are atomic, so no lock is needed.
"""

import threading
from collections import deque
from queue import SimpleQueue

from fairturn.clock import stopwatch
from fairturn.worker.executor import ActiveClaim, AttemptResult, Executor, ExecutorResources
from fairturn.worker.handler import ClaimedDocument, HandlerRunner
from fairturn.worker.output import pass_on, tail_of
from fairturn.worker.registry import Handler, Handlers

# The supervisor collects results at least this often, so that not every document wakes it.
POLL_S = 0.004
_CLOSE_S = 0.2  # for threads that are idle or store a result file
WORTH_WAKING_S = 0.005  # of work: the switch interval of the GIL


class ThreadExecutor(Executor):
    """Runs handlers in threads.

    It has more than 15 attributes because it shares its state with the threads.
    """

    def __init__(
        self, handlers: Handler | Handlers, slots: int, resources: ExecutorResources
    ) -> None:
        super().__init__(slots, resources)
        self._handlers = handlers
        self._traces: deque[tuple[str, str]] = deque()  # tracebacks, with their documents
        self._started: dict[int, tuple[ActiveClaim, ClaimedDocument]] = {}
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._idle: set[int] = set()
        self._given_s = 0.0
        self._slow = False  # the ready documents take longer than expected
        self._threads = [
            threading.Thread(target=self._serve, args=(n,), name=f"fairturn-{n}", daemon=True)
            for n in range(slots)
        ]
        for thread in self._threads:
            thread.start()

    def free(self) -> int:
        return len(self._idle)

    def running(self) -> list[ActiveClaim]:
        return [held for held, _ in list(self._started.values())]

    def give(self, documents: list[ActiveClaim]) -> None:
        self._ready.extend(documents)
        self._slow = False
        self._given_s = stopwatch()
        self._wake_some()

    def _wake_some(self) -> None:
        """Wake a thread for each 5 ms of expected work: more would only compete for the GIL. If the
        work takes longer, `tend` wakes the others."""
        worth = 1 + int(len(self._ready) * self._pace.mean_s / WORTH_WAKING_S)
        if self._slow or not self._pace.ahead:
            worth = len(self._ready)
        for _ in range(min(worth, len(self._ready), len(self._idle)) - self._wake.qsize()):
            self._wake.put(True)

    def take_done(self) -> list[AttemptResult]:
        ended = super().take_done()
        while self._traces:
            pass_on(self._output, *self._traces.popleft())
        if ended:
            self._pace.add(sum([one.seconds for one in ended]), len(ended))
        return ended

    def tend(self, now_s: float) -> None:
        self._slow = bool(self._ready and now_s > self._given_s + WORTH_WAKING_S)
        if self._slow and self._idle:
            self._wake_some()

    def due_s(self) -> float | None:
        return stopwatch() + POLL_S if self._ready or self._done else None

    def take_back(self) -> list[ActiveClaim]:
        taken = []
        try:
            while True:
                taken.append(self._ready.pop())
        except IndexError:
            return taken[::-1]

    def stop(self, held: ActiveClaim) -> bool:
        held.dropped = True
        for running, document in list(self._started.values()):
            if running is held:
                document.stop_requested = True
        return False

    def stop_replacing(self) -> None:
        """Do nothing: threads are never replaced."""

    def close(self) -> bool:
        if not self._closed:
            self._closed = True
            self._ready.clear()
            busy = set(self._started)
            for _ in self._threads:
                self._wake.put(False)
            until_s = stopwatch() + _CLOSE_S
            for number, thread in enumerate(self._threads):
                if number not in busy:
                    thread.join(max(0.0, until_s - stopwatch()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, number: int) -> None:
        running = HandlerRunner(self._handlers)
        while True:
            # Register as idle before checking for documents: otherwise `give` in between would not
            # wake this thread.
            self._idle.add(number)
            self._wakeup.ring()
            if not self._ready and not self._wake.get():
                break
            self._idle.discard(number)
            try:
                while True:
                    ended = self._run(running, number, self._ready.popleft())
                    self._done.append(ended)
                    if self._ready and ended.seconds > POLL_S:
                        self._wakeup.ring()
            except IndexError:
                continue
        running.close()

    def _run(self, running: HandlerRunner, number: int, held: ActiveClaim) -> AttemptResult:
        document = ClaimedDocument(held.fields(), self._folders, held)
        self._started[number] = held, document
        held.begun_s = begun_s = stopwatch()
        answer = running.run(document)
        seconds = stopwatch() - begun_s
        details = None
        if traceback := running.last_traceback():
            self._traces.append((held.fence.document, traceback))
            details = tail_of(traceback)
        del self._started[number]
        ended = AttemptResult(held, answer, seconds, details=details)
        return ended if answer.path is None else self._kept(ended)
