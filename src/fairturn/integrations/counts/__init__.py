"""Counts for applications that use another queue (decision 0017).

A store keeps the counts of its customers with their documents. An integration has only published
messages: it needs one number per customer and the time of its last update. `config.open_counts`
opens counts by URL: Redis or Valkey, PostgreSQL, an SQLite file, memory.

The rule is `priority.Rule`, called under a lock of the database. Redis runs a script instead, which
test vectors and generated sequences compare with the rule.
"""

from collections.abc import Callable
from typing import Protocol

TIMEOUT_S = 0.25  # of one check, including a new connection

Answer = Callable[[], int]


class Counts(Protocol):
    """The counts of all customers, shared by all processes that open the same URL."""

    def begin(self, customer: str) -> Answer:
        """Request one check of the rule; return a function that waits for the count.

        The check is atomic: concurrent checks of one customer are serialised. The caller can do
        other work between the two calls. If it never waits for the count, the check may still have
        been applied. Both calls together take about 250 ms at most and then raise
        `StoreUnavailable`; a place that can never be used raises `StoreRefused`.
        """
        ...

    def concerns(self) -> list[str]:
        """Return warnings for operators about the place. Raises as `begin`."""
        ...

    def close(self) -> None:
        """Close connections. This is idempotent."""
        ...
