"""The parts that every request needs, put together once for a process."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anyio import CapacityLimiter, Semaphore, to_thread
from fastapi import Request

from fairturn.access.registry import Keys
from fairturn.clock import Clock
from fairturn.queue import Queue
from fairturn.service.change_feed import Watch
from fairturn.service.options import BATCHES_AT_ONCE, Plan
from fairturn.service.rates import Rates

# Of the threads that work on the store, and as many for contents: a bucket that answers slowly must
# not hold up what needs none. One that waits for a disk holds no lock of Python.
THREADS = 40

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Service:
    """A queue as the service sees it."""

    queue: Queue
    keys: Keys
    clock: Clock
    plan: Plan
    rates: Rates
    watch: Watch
    threads: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(THREADS))
    movers: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(THREADS))
    batches: Semaphore = field(default_factory=lambda: Semaphore(BATCHES_AT_ONCE))
    uploads: dict[str, int] = field(default_factory=dict)  # under way, by key
    streams: Counter[str] = field(default_factory=Counter)  # of events, that are open, by key

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Do something that may wait for the store, in a thread: the event loop never does."""
        return await to_thread.run_sync(lambda: work(*args), limiter=self.threads)

    async def move(self, work: Callable[..., T], *args: Any) -> T:
        """The same with what a document carries."""
        return await to_thread.run_sync(lambda: work(*args), limiter=self.movers)


def service_of(request: Request) -> Service:
    """The service that a request came to."""
    service: Service = request.app.state.service
    return service
