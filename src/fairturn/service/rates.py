"""Rate limits. Counters are per process: two processes allow twice the rate."""

import threading
from math import ceil

from limits import RateLimitItem, parse

from fairturn.clock import SECOND_US, Clock
from fairturn.service.options import LOGINS_PER_MINUTE, REFUSED_PER_MINUTE

_WINDOWS_MAX = 10_000  # in memory before expired ones are evicted


class RateLimiter:
    """Counts requests and logins per key; unknown keys and anonymous requests per network.

    Windows are counted here because the in-memory storage of `limits` starts a thread every 10 ms
    to evict old ones, which costs more than all other work of this class."""

    def __init__(self, rate: str, clock: Clock, anonymous_per_minute: int = 300) -> None:
        self._clock = clock
        self._rate = parse(rate)
        self._refused = parse(f"{REFUSED_PER_MINUTE}/minute")
        self._logins = parse(f"{LOGINS_PER_MINUTE}/minute")
        self._anonymous = parse(f"{anonymous_per_minute}/minute")
        self._lock = threading.Lock()
        self._windows: dict[str, tuple[int, float]] = {}  # the count, and the end in seconds
        self._evict_above = _WINDOWS_MAX

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

    def _hit(self, rate: RateLimitItem, *identifiers: str) -> int:
        """Count in the fixed window of the identifiers."""
        name, now = rate.key_for(*identifiers), self._clock.now() / SECOND_US
        with self._lock:
            count, end = self._windows.get(name, (0, 0.0))
            if end <= now:
                count, end = 0, now + rate.get_expiry()
            self._windows[name] = (count + 1, end)
            if len(self._windows) > self._evict_above:
                self._evict(now)
        return 0 if count < rate.amount else max(1, ceil(end - now))

    def _evict(self, now: float) -> None:
        # Evicts again after the number has doubled, so that the amortised cost is constant.
        self._windows = {name: held for name, held in self._windows.items() if held[1] > now}
        self._evict_above = max(_WINDOWS_MAX, 2 * len(self._windows))
