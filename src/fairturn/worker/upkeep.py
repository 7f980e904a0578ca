"""Calls that a worker makes at intervals: heartbeats, and recording documents that have expired."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fairturn.clock import stopwatch
from fairturn.explain.snapshot import SIGN_ON_EVERY_US
from fairturn.model import EXPIRE_MAX
from fairturn.queue import Queue
from fairturn.worker.backoff import Outage
from fairturn.worker.kinds import ServedKinds
from fairturn.worker.store_calls import StoreCalls, StoreOperation

SIGN_ON_S = SIGN_ON_EVERY_US / 1_000_000
EXPIRE_S = 1.0


class PeriodicCall(NamedTuple):
    """A call, and the function that returns the pause after it, given its result (None: failed)."""

    call: Callable[[], int | None]
    pause_s: Callable[[int | None], float]


class Upkeep:
    """Makes each call when it is due, in the background, with one of each in flight."""

    def __init__(
        self,
        queue: Queue,
        calls: StoreCalls,
        outage: Outage,
        *,
        worker: str,
        slots: int,
        kinds: ServedKinds,
    ) -> None:
        self._calls = calls
        self._outage = outage
        self._periodic: Sequence[PeriodicCall] = (
            PeriodicCall(
                partial(queue.sign_on, worker, slots, kinds.names, needs=kinds.needs),
                lambda _: SIGN_ON_S,
            ),
            PeriodicCall(queue.expire, lambda n: 0.0 if n == EXPIRE_MAX else EXPIRE_S),
        )
        self._due_s: dict[PeriodicCall, float] = dict.fromkeys(self._periodic, 0.0)

    def due_s(self) -> float | None:
        """Return when the next call is due; None while all are in flight."""
        due_s = min(self._due_s.values(), default=None)
        return None if due_s is None else max(due_s, self._outage.until_s)

    def begin(self, now_s: float) -> None:
        """Begin the calls that are due."""
        if now_s < self._outage.until_s:
            return
        for periodic in [one for one, at_s in self._due_s.items() if now_s >= at_s]:
            del self._due_s[periodic]
            self._calls.begin(
                StoreOperation.BACKGROUND, periodic.call, partial(self._schedule, periodic)
            )

    def _schedule(self, periodic: PeriodicCall, result: int | None) -> None:
        self._due_s[periodic] = stopwatch() + periodic.pause_s(result)
