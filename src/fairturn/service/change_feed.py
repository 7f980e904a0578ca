"""Waiting for changes of the store: one thread for all who wait, however many they are.

Who waits for a document holds no thread and asks nothing: after a change, one read tells which of
the documents that anybody waits for have ended.
"""

import asyncio
from collections import defaultdict
from contextlib import suppress

from anyio import CapacityLimiter, to_thread

from fairturn.errors import StoreError
from fairturn.model import ENDED, PAGE_MAX, Filter
from fairturn.stores.contract import Store

EVERY_S = 0.1  # looks after changes, at most
_LOOK_S = 0.2  # how long the thread waits at a time: so long may an end of the process take


class Watch:
    """Tells those who wait that something has changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = CapacityLimiter(1)
        self._changed = asyncio.Event()
        self._waiting: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self.version = 0
        self.closed = False

    async def run(self) -> None:
        """Watch, until it is cancelled."""
        while not self.closed:
            try:
                version = await to_thread.run_sync(
                    self._store.wait, self.version, _LOOK_S, limiter=self._thread
                )
            except StoreError:
                await asyncio.sleep(_LOOK_S)
                continue
            if version != self.version:
                self.version = version
                await self._wake()
                await asyncio.sleep(EVERY_S)

    def close(self) -> None:
        """Wake everybody for the last time."""
        self.closed = True
        self._changed.set()
        for waiting in self._waiting.values():
            for each in waiting:
                if not each.done():
                    each.set_result(None)

    async def change(self, version: int, timeout_s: float) -> None:
        """Wait until the version is another one, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while version == self.version and not self.closed:
                    await self._changed.wait()

    async def ended(self, id: str, timeout_s: float) -> None:
        """Wait until a document has ended or is gone, or the time is over."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id].add(waiting)
        try:
            if not await self._ended_already(id) and not self.closed:
                await asyncio.wait([waiting], timeout=timeout_s)
        finally:
            self._waiting[id].discard(waiting)
            if not self._waiting[id]:
                del self._waiting[id]

    async def _ended_already(self, id: str) -> bool:
        return not await self._still_going([id])

    async def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        ids = list(self._waiting)
        for start in range(0, len(ids), PAGE_MAX):
            batch = ids[start : start + PAGE_MAX]
            try:
                going = await self._still_going(batch)
            except StoreError:
                return  # the next change tells
            for id in set(batch) - going:
                for waiting in self._waiting.get(id, ()):
                    if not waiting.done():
                        waiting.set_result(None)

    async def _still_going(self, ids: list[str]) -> set[str]:
        page = await to_thread.run_sync(
            lambda: self._store.find(Filter(ids=tuple(ids)), size=PAGE_MAX)
        )
        return {document.id for document in page.documents if document.state not in ENDED}
