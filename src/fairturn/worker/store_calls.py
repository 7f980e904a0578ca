"""Calls of the store in threads of their own, so that the supervisor never waits for the store.

Each kind of call has its own thread: a claim that waits for a lock delays no renewal and no
outcome.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from enum import StrEnum
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from fairturn.clock import stopwatch

T = TypeVar("T")


class Kind(StrEnum):
    """A kind of call. Calls of one kind are made one after the other, in order."""

    CLAIM = "claim"
    FINISH = "finish"
    RENEW = "renew"
    LOOK = "look"  # reads, and what nothing waits for


class Call(NamedTuple):
    """A call, and what becomes of its result: `take` or `fail` in the supervisor's thread, `late`
    in the thread of the call, if the supervisor has left."""

    kind: Kind
    begun_s: float
    call: Callable[[], Any]
    reply: Future[Any]
    take: Callable[[Any], None]
    fail: Callable[[], None]
    late: Callable[[Any], None]

    def make(self) -> None:
        """Make the call and hand over its result, or its error.

        `Calls.leave` cancels the reply, and to set the result of a cancelled one raises. So every
        result reaches either the supervisor or `late`, and never both.
        """
        try:
            result = self.call()
        except BaseException as error:
            self._hand_over(self.reply.set_exception, error)
        else:
            if not self._hand_over(self.reply.set_result, result):
                self.late(result)

    def _hand_over(self, give: Callable[[Any], None], value: object) -> bool:
        try:
            give(value)
        except InvalidStateError:
            return False
        return True


class Calls:
    """Makes calls, and rings after each of them."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._muted = False
        self._lock = threading.Lock()  # so that no thread rings after `mute`
        self._lanes: dict[Kind, SimpleQueue[Call | None]] = {}
        self._begun: list[Call] = []  # whose replies were not taken

    def begin(
        self,
        kind: Kind,
        call: Callable[[], T],
        take: Callable[[T], None] = lambda result: None,
        *,
        fail: Callable[[], None] = lambda: None,
        late: Callable[[T], None] = lambda result: None,
    ) -> None:
        """Make a call in the thread of its kind."""
        if kind not in self._lanes:
            lane = self._lanes[kind] = SimpleQueue[Call | None]()
            # A daemon, because a call that never returns must not keep the process alive.
            name = f"fairturn-{kind}"
            threading.Thread(target=self._serve, args=(lane,), name=name, daemon=True).start()
        begun = Call(kind, stopwatch(), call, Future(), take, fail, late)
        self._begun.append(begun)
        self._lanes[kind].put(begun)

    def _serve(self, lane: "SimpleQueue[Call | None]") -> None:
        while (begun := lane.get()) is not None:
            begun.make()
            self.ring()

    def returned(self) -> list[Call]:
        """The calls that have returned since the last time."""
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
        """Ring no more: the supervisor waits for nothing but calls."""
        with self._lock:
            self._muted = True

    def wait(self, timeout_s: float) -> None:
        """Wait until every call has returned, for `timeout_s` at most."""
        wait([call.reply for call in self._begun], max(0.0, timeout_s))

    def leave(self) -> None:
        """Give up the calls that have not returned, and let the threads end after them."""
        self.mute()
        for call in self._begun:
            call.reply.cancel()
        for lane in self._lanes.values():
            lane.put(None)
