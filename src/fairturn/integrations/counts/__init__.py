"""Counts without a queue: where an app with a queue of its own keeps what the rule needs.

A store keeps its customers' counts with their documents. An integration has no documents, only
published messages; what it needs of the rule is one number for each customer and the moment of its
last update. `config.open_counts` opens them by name: Redis or Valkey, PostgreSQL, a file, memory.

The rule is `priority.Rule`, called under a lock of the database. Redis cannot call it; there a
script does the same in one step, and the vectors and generated sequences prove that it is the same.
"""

from collections.abc import Callable
from typing import Protocol

TIMEOUT_S = 0.25  # what a publisher waits at most, in all

Answer = Callable[[], int]


class Counts(Protocol):
    """The counts of all customers, shared by all processes that name the same place."""

    def begin(self, customer: str) -> Answer:
        """Begin one check of the rule; what comes back waits for the count that it found.

        The check is one atomic step, so checks of one customer that come at once are as if one came
        after the other. Between the two calls a caller can do other work. An answer that nobody
        waits for may have moved the count. Both calls together take at most about 250 ms and raise
        `StoreUnavailable` then; a place that can never be used raises `StoreRefused`.
        """
        ...

    def concerns(self) -> list[str]:
        """What an operator should know about the place, as sentences. It may raise as `begin`."""
        ...

    def close(self) -> None:
        """Give back connections. Calling it twice does no harm."""
        ...
