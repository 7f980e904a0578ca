"""All customers, sorted by anything: read in the background, page by page, and kept for a while.

A store lists customers by name. To sort a hundred thousand of them by what waits would need an
index that every submission pays for; so a list is made here, of rows that were read lately, and
says how old it is. A queue with one page of customers is read anew each time.
"""

import threading
from typing import NamedTuple

from fairturn.clock import SECOND_US, Clock, stopwatch
from fairturn.model import PAGE_MAX, Customer
from fairturn.stores.contract import Store

KEPT_US = 30 * SECOND_US
SMALL_US = SECOND_US
CUSTOMERS_MAX = 200_000
# Between two pages it rests so many times as long as one took. Threads of Python share one core:
# without this, whoever asks for a page meanwhile would wait for half of every page that is read.
RESTS = 2


class Listed(NamedTuple):
    """The customers as they were at a moment. `complete`: all of them are here."""

    at: int
    customers: list[Customer]
    complete: bool
    paused: tuple[str, ...]  # their names


def _list(at: int, customers: list[Customer], complete: bool) -> Listed:
    paused = tuple(c.name for c in customers if c.settings.paused)
    return Listed(at, customers, complete, paused)


class Directory:
    """Reads the customers when somebody asks, at most once in a while."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._listed: Listed | None = None
        self._reading: threading.Thread | None = None
        self._resting = threading.Event()

    def listed(self) -> Listed | None:
        """What is known; None while many are being read for the first time."""
        listed, now = self._listed, self._clock.now()
        if listed is not None:
            small = listed.complete and len(listed.customers) < PAGE_MAX
            if now - listed.at <= (SMALL_US if small else KEPT_US):
                return listed
        with self._lock:
            if self._reading is not None:
                return self._listed
            page = self._store.customers(size=PAGE_MAX)
            if page.next is None:
                self._listed = _list(now, page.customers, True)
                return self._listed
            self._reading = threading.Thread(
                target=self._read_on, args=(page.customers, page.next), daemon=True
            )
            self._reading.start()
            return self._listed

    def changed(self) -> None:
        """Forget a short list, because something was changed by hand."""
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
                self._resting.wait(RESTS * (stopwatch() - begun))
            self._listed = _list(now, customers, after is None)
        finally:
            self._reading = None
