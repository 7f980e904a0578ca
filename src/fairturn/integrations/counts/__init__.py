"""Counts for applications that use another queue (decision 0017).

A store keeps the counts of its customers with their documents. An integration has only published
messages: it needs one number per customer and the time of its last update. `config.open_counts`
opens counts by URL: Redis or Valkey, PostgreSQL, an SQLite file, memory.

The rule is `priority.Rule`, called under a lock of the database. Redis runs a script instead, which
test vectors and generated sequences compare with the rule.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

from fairturn.errors import StoreUnavailable

TIMEOUT_S = 0.25  # of one check, including a new connection

Answer = Callable[[], int]
T = TypeVar("T")


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


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """Return what the call returns or raise what it raises; `StoreUnavailable` after a timeout.

    Drivers have no timeout for some waits, such as name resolution or a server that accepts a
    connection and never responds. The call runs in a thread; a late result is discarded.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    # A daemon thread, so that the process can exit while it waits.
    threading.Thread(target=run, name="fairturn-counts", daemon=True).start()
    if not wait([result], seconds).done:
        raise StoreUnavailable(f"{what} did not respond within {seconds * 1000:.0f} ms")
    return result.result()
