"""A cached list of all customers, read page by page in the background, to sort by any column.

A store lists customers by name. An index by waiting documents would slow down every submission, so
the page sorts this list and shows its age. A list that fits into one page is cached for a second.
"""

import threading
from typing import NamedTuple

from fairturn.clock import SECOND_US, Clock, stopwatch
from fairturn.model import PAGE_MAX, Customer
from fairturn.stores.contract import QueryStore

KEPT_US = 30 * SECOND_US
SMALL_US = SECOND_US
CUSTOMERS_MAX = 200_000
# Pause after each page, in multiples of the time that the page took. Without it the reading thread
# would compete with requests for the GIL.
RESTS = 2


class CustomerListing(NamedTuple):
    at: int  # when it was read
    customers: list[Customer]
    paused: tuple[str, ...]  # names


def _list(at: int, customers: list[Customer]) -> CustomerListing:
    return CustomerListing(at, customers, tuple(c.name for c in customers if c.settings.paused))


class CustomerIndex:
    """Reads the customers on demand, at most once in `KEPT_US`."""

    def __init__(self, store: QueryStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._listed: CustomerListing | None = None
        self._reading: threading.Thread | None = None
        self._pause = threading.Event()

    def listed(self) -> CustomerListing | None:
        """Return the last list; None while the first one is being read."""
        listed, now = self._listed, self._clock.now()
        if listed is not None:
            small = len(listed.customers) < PAGE_MAX
            if now - listed.at <= (SMALL_US if small else KEPT_US):
                return listed
        with self._lock:
            if self._reading is not None:
                return self._listed
            page = self._store.customers(size=PAGE_MAX)
            if page.next is None:
                self._listed = _list(now, page.customers)
                return self._listed
            self._reading = threading.Thread(
                target=self._read_on, args=(page.customers, page.next), daemon=True
            )
            self._reading.start()
            return self._listed

    def changed(self) -> None:
        """Invalidate a list of one page after a change by an operator."""
        listed = self._listed
        if listed is not None and len(listed.customers) < PAGE_MAX:
            self._listed = None

    def _read_on(self, customers: list[Customer], after: str | None) -> None:
        now = self._clock.now()
        customers = list(customers)
        try:
            while after is not None and len(customers) < CUSTOMERS_MAX:
                begun = stopwatch()
                page = self._store.customers(after=after, size=PAGE_MAX)
                customers += page.customers
                after = page.next
                self._pause.wait(RESTS * (stopwatch() - begun))
            self._listed = _list(now, customers)
        finally:
            self._reading = None
