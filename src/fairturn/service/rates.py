"""Rate limits. Counters are per process: two processes allow twice the rate."""

import threading
from math import ceil

from limits import RateLimitItem, parse
from limits.storage import Storage
from limits.strategies import FixedWindowRateLimiter

from fairturn.clock import SECOND_US, Clock
from fairturn.service.options import REFUSED_PER_MINUTE

_WINDOWS_MAX = 10_000  # in memory before expired ones are evicted


class RateLimiter:
    """Counts requests per key, and unknown keys per client address."""

    def __init__(self, rate: str, clock: Clock) -> None:
        self._clock = clock
        self._rate = parse(rate)
        self._refused = parse(f"{REFUSED_PER_MINUTE}/minute")
        self._limiter = FixedWindowRateLimiter(_WindowStorage(clock))

    def seconds_to_wait(self, key: str) -> int:
        """Count a request; return 0 if it is allowed, or the seconds until the next one is."""
        if self._limiter.hit(self._rate, "key", key):
            return 0
        return self._left(self._rate, "key", key)

    def refuse(self, address: str) -> None:
        """Count a request with an unknown key."""
        self._limiter.hit(self._refused, "refused", address)

    def seconds_shut_out(self, address: str) -> int:
        """Return 0, or the seconds for which all requests of an address are rejected."""
        if self._limiter.test(self._refused, "refused", address):
            return 0
        return self._left(self._refused, "refused", address)

    def _left(self, item: RateLimitItem, *identifiers: str) -> int:
        stats = self._limiter.get_window_stats(item, *identifiers)
        return max(1, ceil(stats.reset_time - self._clock.now() / SECOND_US))


class _WindowStorage(Storage):
    """Fixed windows in memory, on the injected clock. The storage of `limits` starts a thread every
    10 ms to evict old windows, which costs more than everything else here."""

    STORAGE_SCHEME = None

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[str, tuple[int, float]] = {}  # the count, and the end in seconds
        self._evict_above = _WINDOWS_MAX

    @property
    def base_exceptions(self) -> type[Exception]:
        return ValueError

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        now = self._now()
        with self._lock:
            count, end = self._windows.get(key, (0, 0.0))
            if end <= now:
                count, end = 0, now + expiry
            self._windows[key] = (count + amount, end)
            if len(self._windows) > self._evict_above:
                self._evict(now)
        return count + amount

    def get(self, key: str) -> int:
        count, end = self._windows.get(key, (0, 0.0))
        return count if self._now() < end else 0

    def get_expiry(self, key: str) -> float:
        return self._windows.get(key, (0, self._now()))[1]

    def check(self) -> bool:
        return True

    def reset(self) -> int:
        with self._lock:
            removed = len(self._windows)
            self._windows.clear()
        return removed

    def clear(self, key: str) -> None:
        self._windows.pop(key, None)

    def _now(self) -> float:
        return self._clock.now() / SECOND_US

    def _evict(self, now: float) -> None:
        # Evicts again after the number has doubled, so that the amortised cost is constant.
        self._windows = {key: held for key, held in self._windows.items() if held[1] > now}
        self._evict_above = max(_WINDOWS_MAX, 2 * len(self._windows))
