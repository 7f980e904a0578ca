"""Calls of the store that the supervisor does not wait for."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_AT_ONCE = 2  # a claim, and outcomes

T = TypeVar("T")


class Errands:
    """Threads that make such calls, each as soon as one is free, and ring when a call is over."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._threads: ThreadPoolExecutor | None = None  # made when they are first needed

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Let a thread make the call."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_AT_ONCE, "fairturn-errand")
        begun = self._threads.submit(call)
        begun.add_done_callback(lambda _: self._ring())
        return begun

    def close(self) -> None:
        """Wait for what is under way."""
        if self._threads is not None:
            self._threads.shutdown()
