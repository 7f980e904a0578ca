"""Counts in memory, for tests and for applications of one process."""

import threading

from fairturn.clock import Clock, SystemClock
from fairturn.integrations.counts import Answer
from fairturn.priority import Count, Rule

CUSTOMERS_MAX = 100_000  # before counts that would be reset are evicted


class MemoryCounts:
    """Counts of one process."""

    def __init__(self, *, rule: Rule, clock: Clock | None = None) -> None:
        self._rule = rule
        self._clock = clock or SystemClock()
        self._counts: dict[str, Count] = {}
        self._lock = threading.Lock()
        self._evict_above = CUSTOMERS_MAX

    def begin(self, customer: str) -> Answer:
        with self._lock:
            now = self._clock.now()
            count = self._counts[customer] = self._rule.check(self._counts.get(customer), now)
            if len(self._counts) > self._evict_above:
                self._evict(now)
        return lambda: count.value

    def concerns(self) -> list[str]:
        return ["counts are in the memory of each process and are not shared between processes"]

    def close(self) -> None:
        self._counts.clear()

    def _evict(self, now: int) -> None:
        kept = {n: c for n, c in self._counts.items() if now <= self._rule.resets_at(c)}
        self._counts = kept
        self._evict_above = max(CUSTOMERS_MAX, 2 * len(kept))
