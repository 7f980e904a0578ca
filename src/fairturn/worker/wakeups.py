"""Wakes the supervisor when the store changes."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from fairturn.errors import StoreError
from fairturn.queue import Queue


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

    def look(self, version: int) -> None:
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
