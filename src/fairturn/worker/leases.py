"""Renewals: of all leases every third of their time, and in between of those with progress."""

from collections.abc import Callable, Iterable
from functools import partial

from fairturn.clock import microseconds, stopwatch
from fairturn.model import Fence, Progress, Renewed
from fairturn.stores.contract import Store
from fairturn.worker.executor import Held
from fairturn.worker.outage import Outage
from fairturn.worker.store_calls import Calls, Kind

PROGRESS_S = 1.0  # between two reports of one document's progress

Take = Callable[[Renewed, dict[Fence, Progress]], None]


class Leases:
    """Renews the leases of a worker, one call at a time, beside all other calls."""

    def __init__(self, store: Store, calls: Calls, outage: Outage, lease_s: float) -> None:
        self._store = store
        self._calls = calls
        self._outage = outage
        self._lease_s = lease_s
        self._renewing = False
        self._renew_s = stopwatch() + lease_s / 3
        self._progress_s = 0.0

    def due_s(self) -> float | None:
        """When `renew` has something to do again; None while a call is in flight."""
        return None if self._renewing else min(self._renew_s, self._progress_s)

    def renew(self, held: Iterable[Held], now_s: float, take: Take) -> None:
        """Begin a renewal if one is due; `take` gets its reply and the progress that it stored."""
        due_s = self.due_s()
        if due_s is None or now_s < due_s:
            return
        some = list(held)
        if now_s >= self._renew_s:
            self._renew_s = now_s + self._lease_s / 3
        else:
            some = [one for one in some if one.progress is not one.reported]
        self._progress_s = now_s + PROGRESS_S
        if some:
            self._begin(some, take)

    def _begin(self, some: list[Held], take: Take) -> None:
        self._renewing = True
        progress = {
            held.fence: held.progress
            for held in some
            if held.progress is not None and held.progress is not held.reported
        }

        def take_reply(renewed: Renewed) -> None:
            self._renewing = False
            take(renewed, progress)

        def fail() -> None:
            self._renewing = False
            self._renew_s = min(self._renew_s, self._outage.until_s)

        fences = [held.fence for held in some]
        lease_us = microseconds(self._lease_s)
        renew = partial(self._store.renew, fences, lease_us=lease_us, progress=progress)
        self._calls.begin(Kind.RENEW, renew, take_reply, fail=fail)
