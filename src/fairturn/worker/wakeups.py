"""Waiting for changes of the store, while the supervisor waits for its crew."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from fairturn.errors import StoreError
from fairturn.stores.contract import Store


class Watch:
    """A thread that waits until the store has changed, and then rings."""

    _SLICE_S = 0.1  # so that it ends soon when it is to end

    def __init__(self, store: Store, ring: Callable[[], None]) -> None:
        self._store = store
        self._ring = ring
        self.changed = False
        self.version = -1  # as it was seen the last time
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="fairturn-watch", daemon=True)
        self._thread.start()

    def look(self, version: int) -> None:
        """Ring when the store has another version than this one."""
        self.changed = False
        self._asked.put(version)

    def close(self) -> None:
        """Let the thread end. One that waits for a lock of the store is left behind."""
        self._asked.put(None)
        self._thread.join(2 * self._SLICE_S)

    def _serve(self) -> None:
        while (version := self._asked.get()) is not None:
            while self._asked.empty():
                try:
                    seen = self._store.wait(version, self._SLICE_S, certain=False)
                    if seen == version:
                        continue
                    self.version = seen
                except StoreError:
                    pass  # whoever claims next hears of it
                self.changed = True
                self._ring()
                break
