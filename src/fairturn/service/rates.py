"""Rate limits. Counters are per process: two processes allow twice the rate."""

import threading
from math import ceil

from limits import RateLimitItem, parse
from limits.storage import Storage
from limits.strategies import FixedWindowRateLimiter

from fairturn.clock import SECOND_US, Clock
from fairturn.service.options import LOGINS_PER_MINUTE, REFUSED_PER_MINUTE

_WINDOWS_MAX = 10_000  # in memory before expired ones are evicted


class RateLimiter:
    """Counts requests and logins per key; unknown keys and anonymous requests per network."""

    def __init__(self, rate: str, clock: Clock, anonymous_per_minute: int = 300) -> None:
        self._clock = clock
        self._rate = parse(rate)
        self._refused = parse(f"{REFUSED_PER_MINUTE}/minute")
        self._logins = parse(f"{LOGINS_PER_MINUTE}/minute")
        self._anonymous = parse(f"{anonymous_per_minute}/minute")
        self._limiter = FixedWindowRateLimiter(_WindowStorage(clock))

    def seconds_to_wait(self, key: str) -> int:
        """Count a request; return 0 if it is allowed, or the seconds until the next one is."""
        return self._hit(self._rate, "key", key)

    def seconds_to_login(self, key: str) -> int:
        """Count a login, as `seconds_to_wait` counts a request."""
        return self._hit(self._logins, "login", key)

    def seconds_refused(self, network: str) -> int:
        """Count an unknown key. A known key is never counted, nor refused for unknown ones of its
        network: other customers may share the address."""
        return self._hit(self._refused, "refused", network)

    def seconds_anonymous(self, network: str) -> int:
        """Count a request without a key or a session."""
        return self._hit(self._anonymous, "anonymous", network)

    def _hit(self, item: RateLimitItem, *identifiers: str) -> int:
        if self._limiter.hit(item, *identifiers):
            return 0
        return self._left(item, *identifiers)

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
