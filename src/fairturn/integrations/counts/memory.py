"""Counts in this process: for tests, and for an app that is one process."""

import threading

from fairturn.clock import Clock, SystemClock
from fairturn.integrations.counts import Answer
from fairturn.priority import Count, Rule

CUSTOMERS_MAX = 100_000  # then those are forgotten whose count would be 0 again


class MemoryCounts:
    """Counts that end with their process; other processes have their own."""

    def __init__(self, *, rule: Rule, clock: Clock | None = None) -> None:
        self._rule = rule
        self._clock = clock or SystemClock()
        self._counts: dict[str, Count] = {}
        self._lock = threading.Lock()
        self._room = CUSTOMERS_MAX

    def begin(self, customer: str) -> Answer:
        with self._lock:
            now = self._clock.now()
            count = self._counts[customer] = self._rule.check(self._counts.get(customer), now)
            if len(self._counts) > self._room:
                self._forget(now)
        return lambda: count.value

    def concerns(self) -> list[str]:
        return ["the counts are in the memory of each process, so each process counts on its own"]

    def close(self) -> None:
        self._counts.clear()

    def _forget(self, now: int) -> None:
        kept = {n: c for n, c in self._counts.items() if now <= self._rule.resets_at(c)}
        self._counts = kept
        self._room = max(CUSTOMERS_MAX, 2 * len(kept))
