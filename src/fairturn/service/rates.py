"""How often a key may ask. The numbers live in this process: two processes allow twice as much."""

import threading
from math import ceil

from limits import RateLimitItem, parse
from limits.storage import Storage
from limits.strategies import FixedWindowRateLimiter

from fairturn.clock import SECOND_US, Clock
from fairturn.service.options import REFUSED_PER_MINUTE

_WINDOWS_MAX = 10_000  # so many are kept before those that are over are forgotten


class Rates:
    """Counts requests by key, and refused keys by address."""

    def __init__(self, rate: str, clock: Clock) -> None:
        self._clock = clock
        self._rate = parse(rate)
        self._refused = parse(f"{REFUSED_PER_MINUTE}/minute")
        self._limiter = FixedWindowRateLimiter(_Windows(clock))

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


class _Windows(Storage):
    """Windows in memory, on the clock that was handed in. That of `limits` starts a thread every
    hundredth of a second to forget the old ones, which takes longer than all the rest."""

    STORAGE_SCHEME = None

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[str, tuple[int, float]] = {}  # the count, and the second of the end
        self._forget_at = _WINDOWS_MAX

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
            if len(self._windows) > self._forget_at:
                self._forget(now)
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
            forgotten = len(self._windows)
            self._windows.clear()
        return forgotten

    def clear(self, key: str) -> None:
        self._windows.pop(key, None)

    def _now(self) -> float:
        return self._clock.now() / SECOND_US

    def _forget(self, now: float) -> None:
        """Twice as many as are left may come before the next look, so that looking stays rare."""
        self._windows = {key: held for key, held in self._windows.items() if held[1] > now}
        self._forget_at = max(_WINDOWS_MAX, 2 * len(self._windows))
