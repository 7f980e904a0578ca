"""Which kinds of work a claim may serve: limits of kinds, and holds of services during outages.

The rules of outages are those of the queue, `scheduling/outages.py`. A service is identified by the
kinds that need it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fairturn.scheduling.flows import Pick
from fairturn.scheduling.outages import (
    RESUME_STEP_US,
    RESUME_US,
    Report,
    ReportResult,
    ServiceState,
    after_probe,
    after_report,
    after_success,
    may_probe,
    probed,
    running_max,
)
from fairturn.simulator.orders import Order, Paper
from fairturn.simulator.plan import Outage, Plan
from fairturn.simulator.trace import Trace

NEVER = 1 << 63

Service = tuple[int, ...]  # the kinds that need it


class Hold(NamedTuple):
    """An interval in which a service held its kinds."""

    kinds: Service
    began_at: int
    ended_at: int


class HeldOrder:
    """Another order, of which claims see only the kinds that are not held.

    Attempts are numbered in the order of their claims, as fences are."""

    def __init__(self, order: Order, trace: Trace, plan: Plan) -> None:
        self._order = order
        self._kind_of = trace.kind_of
        self._limits = plan.kind_limits
        self._lease_us = plan.lease_us
        self._services: list[Service] = list(dict.fromkeys(o.kinds for o in plan.outages))
        self._states: dict[Service, ServiceState] = {}
        self._running: Counter[int] = Counter()  # by kind
        self._waiting: Counter[int] = Counter()  # by kind
        self._fences: dict[int, int] = {}  # of running documents
        self._last_fence = 0
        self._began_at: dict[Service, int] = {}  # of services that hold
        self.ended: list[Hold] = []
        self.change = order.change

    def arrive(self, paper: Paper, at: int) -> None:
        self._waiting[paper.kind] += 1
        self._order.arrive(paper, at)

    def leave(self, paper: Paper, at: int) -> None:
        self._waiting[paper.kind] -= 1
        self._order.leave(paper, at)

    def take_back(self, paper: Paper, at: int) -> None:
        self._fail(paper.number, at)
        self._waiting[paper.kind] += 1
        self._order.take_back(paper, at)

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        if real_cost is None:
            self._fail(pick.order, at)
        else:
            self._succeed(pick.order, at)
        self._order.end(pick, real_cost, at)

    def report(self, pick: Pick, outage: Outage, at: int) -> ReportResult:
        """End an attempt that found a service unavailable."""
        kind = self._kind_of(pick.order)
        fence = self._end(pick.order)
        for service, state in self._of_kind(kind):
            if service != outage.kinds:
                self._become(service, after_probe(state, fence, now=at), at)
        report = Report(
            document=pick.order,
            fence=fence,
            error="the service is unavailable",
            retry_after_us=outage.retry_after_us,
            others_wait=self._waiting[kind] > 0,
        )
        before = self._states.get(outage.kinds)
        result = after_report(before, report, last_fence=self._last_fence, now=at)
        self._become(outage.kinds, result.state, at)
        self._order.end(pick, None, at)
        return result

    def lose(self, n: int) -> None:
        """Let an attempt end without an effect on services: its worker is lost. If it is a probe,
        the next one may follow at the end of its lease."""
        self._fences[n] = 0

    def pick(self, now: int, kinds: Sequence[int]) -> Pick | None:
        pick = self._order.pick(now, [kind for kind in kinds if self._is_free(kind, now)])
        if pick is not None:
            kind = self._kind_of(pick.order)
            self._waiting[kind] -= 1
            self._running[kind] += 1
            self._last_fence += 1
            self._fences[pick.order] = self._last_fence
            for service, state in self._of_kind(kind):
                if state.held:
                    self._states[service] = probed(state, now=now, lease_us=self._lease_us)
        return pick

    def changes_after(self, at: int) -> int:
        """Return the next time at which claims may take documents that they may not take now."""
        times = [NEVER]
        for state in self._states.values():
            if state.held:
                times.append(state.probe_at)
            elif state.resumed_at is not None:
                step = (at - state.resumed_at) // RESUME_STEP_US + 1
                times.append(state.resumed_at + min(step * RESUME_STEP_US, RESUME_US))
        return min(time for time in times if time > at)

    def _is_free(self, kind: int, now: int) -> bool:
        limits = [self._limits.get(kind)]
        for _, state in self._of_kind(kind):
            if state.held and not may_probe(state, now):
                return False
            limits.append(running_max(state, now))
        return all(limit is None or self._running[kind] < limit for limit in limits)

    def _succeed(self, n: int, now: int) -> None:
        fence = self._end(n)
        for service, state in self._of_kind(self._kind_of(n)):
            after = after_success(state, fence, last_fence=self._last_fence, now=now)
            self._become(service, after, now)

    def _fail(self, n: int, now: int) -> None:
        fence = self._end(n)
        for service, state in self._of_kind(self._kind_of(n)):
            self._become(service, after_probe(state, fence, now=now), now)

    def _end(self, n: int) -> int:
        self._running[self._kind_of(n)] -= 1
        return self._fences.pop(n)

    def _of_kind(self, kind: int) -> Iterator[tuple[Service, ServiceState]]:
        for service in self._services:
            if kind in service and (state := self._states.get(service)) is not None:
                yield service, state

    def _become(self, service: Service, state: ServiceState | None, now: int) -> None:
        if state is None:
            self._states.pop(service, None)
        else:
            self._states[service] = state
        if state is not None and state.held:
            self._began_at.setdefault(service, now)
        elif service in self._began_at:
            self.ended.append(Hold(service, self._began_at.pop(service), now))
