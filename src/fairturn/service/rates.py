"""How often a key may ask. The numbers live in this process: two processes allow twice as much."""

from math import ceil

from limits import RateLimitItem, parse
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from fairturn.clock import SECOND_US, Clock
from fairturn.service.plan import REFUSED_PER_MINUTE


class Rates:
    """Counts requests by key, and refused keys by address."""

    def __init__(self, rate: str, clock: Clock) -> None:
        self._clock = clock
        self._rate = parse(rate)
        self._refused = parse(f"{REFUSED_PER_MINUTE}/minute")
        self._limiter = FixedWindowRateLimiter(MemoryStorage())

    def seconds_to_wait(self, key: str) -> int:
        """Count a request of a key. 0: it may go on; otherwise after so many seconds."""
        if self._limiter.hit(self._rate, "key", key):
            return 0
        return self._left(self._rate, "key", key)

    def refuse(self, address: str) -> None:
        """Count a key that is not known."""
        self._limiter.hit(self._refused, "refused", address)

    def seconds_shut_out(self, address: str) -> int:
        """0, or after how many seconds an address may show another key."""
        if self._limiter.test(self._refused, "refused", address):
            return 0
        return self._left(self._refused, "refused", address)

    def _left(self, item: RateLimitItem, *who: str) -> int:
        stats = self._limiter.get_window_stats(item, *who)
        return max(1, ceil(stats.reset_time - self._clock.now() / SECOND_US))
