"""The objects that all requests of a process share."""

from collections.abc import Callable
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Request

from fairturn.clock import Clock
from fairturn.queue import Queue
from fairturn.service.change_feed import ChangeFeed
from fairturn.service.concurrency import ConcurrencyLimit, CoreLimiter, KnownKeys
from fairturn.service.options import BATCHES_AT_ONCE, CORES, POLLS_MAX, STREAMS_MAX, ServiceLimits
from fairturn.service.rates import RateLimiter

# For store calls, and as many for contents: a slow object store must not block requests that do not
# use it. Threads that wait for a disk do not hold the GIL.
THREADS = 40

T = TypeVar("T")


class Service:
    """The shared state of an application. `token` is the operator's until the first key exists."""

    def __init__(
        self, queue: Queue, plan: ServiceLimits, clock: Clock, token: str | None = None
    ) -> None:
        self.queue = queue
        self.keys = queue.keys
        self.plan = plan
        self.clock = clock
        self.token = token
        self.rates = RateLimiter(plan.rate, clock, plan.anonymous_per_minute)
        self.watch = ChangeFeed(queue)
        self.threads = CapacityLimiter(THREADS)
        self.movers = CapacityLimiter(THREADS)
        self.cores = CoreLimiter(CORES)  # verifies and scans
        self.batches = CoreLimiter(BATCHES_AT_ONCE)
        self.known_keys = KnownKeys()
        # What is in progress, by key; `newcomers` by network, as long as no key is known.
        self.uploads = ConcurrencyLimit(plan.uploads_per_key_max)
        self.streams = ConcurrencyLimit(
            plan.streams_per_key_max, total_max=STREAMS_MAX, retry_after_s=5
        )
        self.polls = ConcurrencyLimit(plan.polls_per_key_max, total_max=POLLS_MAX, retry_after_s=5)
        self.downloads = ConcurrencyLimit(plan.downloads_per_key_max)
        self.requests = ConcurrencyLimit(
            plan.requests_per_key_max, waiting_max=plan.requests_waiting_per_key_max
        )
        # Many customers may share an address, and be new after a restart: they wait.
        self.newcomers = ConcurrencyLimit(
            plan.requests_per_key_max, waiting_max=plan.connections_per_address_max
        )

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function that may block on the store, in a thread."""
        return await to_thread.run_sync(lambda: work(*args), limiter=self.threads)

    async def move(self, work: Callable[..., T], *args: Any) -> T:
        """Call a function that may block on contents, in a thread."""
        return await to_thread.run_sync(lambda: work(*args), limiter=self.movers)


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
