"""A limit on how many submissions of one process wait for the same customer.

A transaction of the caller's own that has submitted holds the row of its customer until it ends.
Submissions for this customer wait for it, each with a connection. Only a few may: the others wait
here, without one, so that submissions for other customers go on.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fairturn.errors import StoreUnavailable

SUBMISSIONS_PER_CUSTOMER_MAX = 2


class CustomerGate:
    """Lets at most a few submissions for each customer pass at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[str] = Counter()

    @contextmanager
    def passed(self, customers: Iterable[str], timeout_s: float) -> Iterator[None]:
        """Wait until a submission for these customers may pass, for the time of a block."""
        names = set(customers)
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_room(names), timeout_s):
                name = max(names, key=self._inside.__getitem__)
                raise StoreUnavailable(
                    f"submissions for customer {name!r} have waited for {timeout_s:g} s, perhaps "
                    "for a transaction that submitted and was not committed; try again"
                )
            self._inside.update(names)
        try:
            yield
        finally:
            with self._changed:
                self._inside.subtract(names)
                for name in names:
                    if not self._inside[name]:
                        del self._inside[name]
                self._changed.notify_all()

    def _has_room(self, names: set[str]) -> bool:
        return all(self._inside[name] < SUBMISSIONS_PER_CUSTOMER_MAX for name in names)
