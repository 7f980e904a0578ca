"""Calls of the store in separate threads, so that the supervisor never blocks on the store, and a
thread that waits for changes of the store.

Each kind of call has its own thread: a claim that waits for a lock delays no renewal or outcome.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from enum import StrEnum
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from fairturn.clock import stopwatch
from fairturn.errors import StoreError
from fairturn.queue import Queue

T = TypeVar("T")


class StoreOperation(StrEnum):
    """A kind of call. Calls of one kind run one after the other, in order."""

    CLAIM = "claim"
    FINISH = "finish"
    RENEW = "renew"
    BACKGROUND = "background"  # reads, heartbeats, cleanup


class StoreCall(NamedTuple):
    """A call and its callbacks: `then` runs in the supervisor's thread, with the result, or None if
    the call failed; `late` in the thread of the call, if the supervisor has ended."""

    kind: StoreOperation
    begun_s: float
    call: Callable[[], Any]
    reply: Future[Any]
    then: Callable[[Any], None]
    late: Callable[[Any], None]

    def make(self) -> None:
        """Make the call and set its reply.

        `StoreCalls.leave` cancels replies, and setting a cancelled one raises. So each result
        reaches either the supervisor or `late`, never both.
        """
        try:
            result = self.call()
        except BaseException as error:
            with suppress(InvalidStateError):
                self.reply.set_exception(error)
            return
        try:
            self.reply.set_result(result)
        except InvalidStateError:
            self.late(result)


class StoreCalls:
    """Makes calls of the store and wakes the supervisor after each."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._muted = False
        self._lock = threading.Lock()  # so that no thread rings after `mute`
        self._lanes: dict[StoreOperation, SimpleQueue[StoreCall | None]] = {}
        self._begun: list[StoreCall] = []  # until `returned` has reported them

    def begin(
        self,
        kind: StoreOperation,
        call: Callable[[], T],
        then: Callable[[T | None], None] = lambda result: None,
        *,
        late: Callable[[T], None] = lambda result: None,
    ) -> None:
        """Make a call in the thread of its kind, and return at once."""
        if kind not in self._lanes:
            lane = self._lanes[kind] = SimpleQueue[StoreCall | None]()
            # A daemon thread: a call that never returns must not keep the process alive.
            name = f"fairturn-{kind}"
            threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True).start()
        begun = StoreCall(kind, stopwatch(), call, Future(), then, late)
        self._begun.append(begun)
        self._lanes[kind].put(begun)

    def _serve(self, lane: "SimpleQueue[StoreCall | None]") -> None:
        while (begun := lane.get()) is not None:
            begun.make()
            self.ring()

    def returned(self) -> list[StoreCall]:
        """Return the calls that ended since the last time."""
        returned = [call for call in self._begun if call.reply.done()]
        if returned:
            self._begun = [call for call in self._begun if call not in returned]
        return returned

    def ring(self) -> None:
        """Wake the supervisor, from any thread; after `mute`, do nothing."""
        with self._lock:
            if not self._muted:
                self._ring()

    def mute(self) -> None:
        """Do not wake the supervisor any more."""
        with self._lock:
            self._muted = True

    def wait(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for all calls to end."""
        wait([call.reply for call in self._begun], max(0.0, timeout_s))

    def leave(self) -> None:
        """Abandon the calls in flight; their threads end after them."""
        self.mute()
        for call in self._begun:
            call.reply.cancel()
        for lane in self._lanes.values():
            lane.put(None)


class StoreListener:
    """A thread that waits for a change of the store and then calls `ring`."""

    _SLICE_S = 0.1  # of one wait, so that `close` takes effect soon

    def __init__(self, queue: Queue, ring: Callable[[], None]) -> None:
        self._queue = queue
        self._ring = ring
        self.changed = False
        self.version = -1  # the last version seen
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="fairturn-watch", daemon=True)
        self._thread.start()

    def wait_beyond(self, version: int) -> None:
        """Call `ring` when the version of the store is not `version`."""
        self.changed = False
        self._asked.put(version)

    def close(self) -> None:
        """End the thread. One that is blocked by the store is abandoned."""
        self._asked.put(None)
        self._thread.join(2 * self._SLICE_S)

    def _serve(self) -> None:
        while (version := self._asked.get()) is not None:
            while self._asked.empty():
                try:
                    seen = self._queue.wait_for_change(version, self._SLICE_S, certain=False)
                    if seen == version:
                        continue
                    self.version = seen
                except StoreError:
                    pass  # the next claim raises it
                self.changed = True
                self._ring()
                break
