"""Renewals: every lease each `lease_s / 3`, and in between those with new progress."""

from collections.abc import Callable, Iterable
from functools import partial

from fairturn.clock import stopwatch
from fairturn.model import Fence, Progress, Renewed
from fairturn.queue import Queue
from fairturn.worker.backoff import Outage
from fairturn.worker.executor import ActiveClaim
from fairturn.worker.store_calls import StoreCalls, StoreOperation

PROGRESS_S = 1.0  # interval of renewals that store progress

Take = Callable[[Renewed, dict[Fence, Progress]], None]


class LeaseRenewer:
    """Renews the leases of a worker, with one call in flight at a time."""

    def __init__(self, queue: Queue, calls: StoreCalls, outage: Outage, lease_s: float) -> None:
        self._queue = queue
        self._calls = calls
        self._outage = outage
        self._lease_s = lease_s
        self._renewing = False
        self._renew_s = stopwatch() + lease_s / 3
        self._progress_s = 0.0

    def due_s(self) -> float | None:
        """Return when `renew` is due; None while a call is in flight."""
        return None if self._renewing else min(self._renew_s, self._progress_s)

    def renew(self, held: Iterable[ActiveClaim], now_s: float, take: Take) -> None:
        """Begin a renewal if one is due; `take` receives the reply and the stored progress."""
        due_s = self.due_s()
        if due_s is None or now_s < due_s:
            return
        some = list(held)
        if now_s >= self._renew_s:
            self._renew_s = now_s + self._lease_s / 3
        else:
            some = [one for one in some if one.progress is not one.reported]
        self._progress_s = now_s + PROGRESS_S
        if not some:
            return
        self._renewing = True
        progress = {
            held.fence: held.progress
            for held in some
            if held.progress is not None and held.progress is not held.reported
        }

        def then(renewed: Renewed | None) -> None:
            self._renewing = False
            if renewed is None:
                self._renew_s = min(self._renew_s, self._outage.until_s)
            else:
                take(renewed, progress)

        fences = [held.fence for held in some]
        renew = partial(self._queue.renew, fences, lease_s=self._lease_s, progress=progress)
        self._calls.begin(StoreOperation.RENEW, renew, then)
