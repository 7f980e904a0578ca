"""Wake-ups for requests that wait: one thread polls the store for all of them.

A request that waits for a document holds no thread and runs no query. After a change, one query
returns which of the awaited documents have ended.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from anyio import CapacityLimiter, to_thread

from fairturn.errors import StoreError
from fairturn.model import ENDED, PAGE_MAX, Filter
from fairturn.queue import Queue

EVERY_S = 0.1  # least time between two wake-ups
_POLL_S = 0.2  # timeout of one wait in the thread, and so the longest delay of a shutdown


class ChangeFeed:
    """Wakes requests when the store changes."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._thread = CapacityLimiter(1)
        self._changed = asyncio.Event()
        self._waiting: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self.version = 0
        self.closed = False

    async def run(self) -> None:
        """Poll until closed or cancelled."""
        while not self.closed:
            try:
                version = await to_thread.run_sync(
                    self._queue.wait_for_change, self.version, _POLL_S, limiter=self._thread
                )
            except StoreError:
                await asyncio.sleep(_POLL_S)
                continue
            if version != self.version:
                self.version = version
                await self._wake()
                await asyncio.sleep(EVERY_S)

    def close(self) -> None:
        """Wake all waiting requests; later ones return at once."""
        self.closed = True
        self._changed.set()
        for waiting in self._waiting.values():
            for each in waiting:
                if not each.done():
                    each.set_result(None)

    async def change(self, version: int, timeout_s: float) -> None:
        """Wait until the version differs, for at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while version == self.version and not self.closed:
                    await self._changed.wait()

    @contextmanager
    def watched(self, id: str) -> Iterator[asyncio.Future[None]]:
        """Yield a future that completes when a document has ended or was deleted."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[id].add(waiting)
        try:
            yield waiting
        finally:
            self._waiting[id].discard(waiting)
            if not self._waiting[id]:
                del self._waiting[id]

    async def wait(self, watched: asyncio.Future[None], timeout_s: float) -> None:
        """Wait for a future of `watched`, for at most `timeout_s`."""
        if not self.closed:
            await asyncio.wait([watched], timeout=timeout_s)

    async def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        ids = list(self._waiting)
        for start in range(0, len(ids), PAGE_MAX):
            batch = ids[start : start + PAGE_MAX]
            try:
                unfinished = await self._unfinished(batch)
            except StoreError:
                return  # the next change wakes them
            for id in set(batch) - unfinished:
                for waiting in self._waiting.get(id, ()):
                    if not waiting.done():
                        waiting.set_result(None)

    async def _unfinished(self, ids: list[str]) -> set[str]:
        page = await to_thread.run_sync(
            lambda: self._queue.queries.find(Filter(ids=tuple(ids)), size=PAGE_MAX)
        )
        return {document.id for document in page.documents if document.state not in ENDED}
