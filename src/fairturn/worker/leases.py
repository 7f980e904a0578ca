"""Renewals: every lease each `lease_s / 3`, and in between those with new progress or a new
checkpoint."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from fairturn.clock import stopwatch
from fairturn.model import Fence, Progress, Renewed
from fairturn.queue import Queue
from fairturn.worker.backoff import Outage
from fairturn.worker.executor import ActiveClaim
from fairturn.worker.store_calls import StoreCalls, StoreOperation

PROGRESS_S = 1.0  # interval of renewals that store progress and checkpoints


class Reports(NamedTuple):
    """What attempts have reported since the last renewal."""

    progress: dict[Fence, Progress]
    checkpoints: dict[Fence, str]

    @staticmethod
    def of(some: Iterable[ActiveClaim]) -> "Reports":
        reports = Reports({}, {})
        for held in some:
            if held.progress is not None and held.progress is not held.reported:
                reports.progress[held.fence] = held.progress
            if held.checkpoint is not None and held.checkpoint is not held.saved:
                reports.checkpoints[held.fence] = held.checkpoint
        return reports

    def note(self, some: Iterable[ActiveClaim]) -> None:
        """Note on each attempt that these are stored."""
        for held in some:
            held.reported = self.progress.get(held.fence, held.reported)
            held.saved = self.checkpoints.get(held.fence, held.saved)


Take = Callable[[Renewed, Reports], None]


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
        """Begin a renewal if one is due; `take` receives the reply and what was stored."""
        due_s = self.due_s()
        if due_s is None or now_s < due_s:
            return
        some = list(held)
        if now_s >= self._renew_s:
            self._renew_s = now_s + self._lease_s / 3
        else:
            some = [one for one in some if one.has_news]
        self._progress_s = now_s + PROGRESS_S
        if not some:
            return
        self._renewing = True
        reports = Reports.of(some)

        def then(renewed: Renewed | None) -> None:
            self._renewing = False
            if renewed is None:
                self._renew_s = min(self._renew_s, self._outage.until_s)
            else:
                reports.note(some)
                take(renewed, reports)

        fences = [held.fence for held in some]
        renew = partial(self._queue.renew, fences, lease_s=self._lease_s, **reports._asdict())
        self._calls.begin(StoreOperation.RENEW, renew, then)
