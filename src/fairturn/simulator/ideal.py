"""Generalised processor sharing: all customers are served at the same time, in exact shares.

Workers are divided among the customers with documents, in proportion to their weights, in arbitrary
fractions. A document uses one worker at most, so that a customer never has more workers than
documents; the rest of its share goes to the others. A customer's documents are served in order.
Without levels there is one level; inside levels, a level gets the workers that better ones leave.

The computation goes from event to event and is exact except for the rounding of floats. In a level
with more customers than workers, the shares per weight are equal at every instant: one virtual
clock represents all of them, and an event costs O(log customers).

When a worker is lost, no work is lost; it continues more slowly. A document that has begun when it
is cancelled runs to its end, as in every order.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from fairturn.scheduling.flows import WEIGHT_ONE
from fairturn.simulator.plan import Plan, Step
from fairturn.simulator.trace import Trace

_NEVER = float("inf")
_DONE_US = 1e-3  # tolerance for the rounding of floats
_REPORT_EVERY = 10_000


class Ideal:
    """The finish time of each document, and the documents cancelled before they began."""

    def __init__(self, documents: int) -> None:
        self.finished_at = array("q", bytes(8 * documents))
        self.cancelled: dict[int, int] = {}


def serve_ideally(
    trace: Trace,
    *,
    plan: Plan,
    priorities: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Ideal:
    """Serve a trace by the ideal, inside the levels of these priorities or without levels."""
    return _Fluid(trace, plan, priorities).run(progress)


class _Flow:
    """A customer in one level. In a crowded level the head is done when the level's clock reaches
    `entry[0]`; otherwise `_Fluid.left` has the remaining work of each document."""

    __slots__ = ("customer", "documents", "entry", "weight")

    def __init__(self, customer: int, weight: int) -> None:
        self.customer = customer
        self.weight = weight
        self.documents: list[int] = []  # sorted: the lowest is served first
        self.entry: tuple[float, int] = (_NEVER, customer)


class _Level:
    """Flows with documents. `clock` is the service that each of them received, per weight."""

    def __init__(self) -> None:
        self.flows: dict[int, _Flow] = {}
        self.weight = 0
        self.clock = 0.0
        self.crowded = False
        self.ends: list[tuple[float, int]] = []  # a heap of the flows' entries, some stale

    def first_end(self) -> float:
        """Return the clock at which the next document is done."""
        while self.ends:
            entry = self.ends[0]
            flow = self.flows.get(entry[1])
            if flow is not None and flow.entry is entry:
                return entry[0]
            heappop(self.ends)
        return _NEVER


class _Fluid:
    """The simulation. It has more than 15 attributes because it is the state of all workers, levels
    and pending events."""

    def __init__(self, trace: Trace, plan: Plan, priorities: Sequence[int] | None) -> None:
        self.trace = trace
        self.plan = plan
        self.priorities = priorities
        self.result = Ideal(len(trace))
        self.levels = [_Level() for _ in range(10 if priorities else 2)]
        self.weights = [WEIGHT_ONE] * len(trace.names)
        self.heaviest = max([WEIGHT_ONE, *trace.weight.values()])
        self.left: dict[int, float] = {}  # remaining work of each document in the system
        self.failed: dict[int, int] = {}
        self.cancelled_at = plan.cancelled_at()
        self.workers = plan.workers
        self.now = 0.0
        self.ended = 0
        self.finished = bytearray(len(trace))
        self.served: list[tuple[int, float]] = []  # (document, rate), outside crowded levels
        self.crowd: _Level | None = None  # the crowded level that is being served
        self.crowd_speed = 0.0
        self.agenda = plan.agenda()

    def run(self, progress: Callable[[int], None]) -> Ideal:
        arrivals, agenda = self.trace.at, self.agenda
        submitted, reported, documents = 0, 0, len(arrivals)
        while self.ended < documents:
            happens: float = arrivals[submitted] if submitted < documents else _NEVER
            if agenda and agenda[0][0] < happens:
                happens = agenda[0][0]
            done = self._advance(happens)
            for n in done:
                self._finish(n)
            if not done:
                assert happens < _NEVER, "documents wait, but no event is pending"
                self.now = happens
                while submitted < documents and arrivals[submitted] == happens:
                    self._arrive(submitted)
                    submitted += 1
                while agenda and agenda[0][0] == happens:
                    _, step, n = heappop(agenda)
                    self._take_step(step, n)
            self._divide()
            if self.ended - reported >= _REPORT_EVERY:
                reported = self.ended
                progress(reported)
        return self.result

    # ── Service ──────────────────────────────────────────────────────────────────────────────────

    def _advance(self, happens: float) -> list[int]:
        """Advance until a document finishes or time `happens`; return the finished documents."""
        left, crowd = self.left, self.crowd
        by_us = happens - self.now
        for n, rate in self.served:
            by_us = min(by_us, left[n] / rate)
        end = _NEVER if crowd is None else crowd.first_end()
        if crowd is not None and (end - crowd.clock) / self.crowd_speed <= by_us:
            by_us = (end - crowd.clock) / self.crowd_speed
        else:
            end = _NEVER
        by_us = max(0.0, by_us)
        self.now += by_us
        done = []
        for n, rate in self.served:
            left[n] -= rate * by_us
            if left[n] <= _DONE_US:
                done.append(n)
        if crowd is not None:
            crowd.clock = end if end < _NEVER else crowd.clock + self.crowd_speed * by_us
            while crowd.first_end() - crowd.clock <= _DONE_US * self.crowd_speed:
                flow = crowd.flows[crowd.ends[0][1]]
                done.append(flow.documents[0])
                flow.entry = (_NEVER, flow.customer)
        return sorted(done)

    def _divide(self) -> None:
        """Divide the workers among the levels, the best first."""
        self.served.clear()
        self.crowd = None
        workers = float(self.workers)
        running: dict[int, float] = {}  # of customers with a limit, in the levels so far
        for level in self.levels:
            if not level.flows:
                continue
            if workers <= 0:
                break
            speed = workers / level.weight
            if speed * self.heaviest <= 1 and not self.plan.limits:
                # No share exceeds one worker, so that every flow can use its share.
                if not level.crowded:
                    level.crowded = True
                    for flow in level.flows.values():
                        self._enter(level, flow)
                self.crowd, self.crowd_speed = level, speed
                workers = 0.0
            else:
                if level.crowded:
                    for flow in level.flows.values():
                        self._note(level, flow)
                    level.crowded = False
                    level.ends.clear()
                workers -= self._fill(level, workers, running)

    def _fill(self, level: _Level, workers: float, running: dict[int, float]) -> float:
        """Divide workers among flows that may not be able to use their shares."""
        demands = []
        for flow in level.flows.values():
            most = float(len(flow.documents))
            limit = self.plan.limits.get(flow.customer)
            if limit is not None:
                most = min(most, limit - running.get(flow.customer, 0.0))
            if most > 0:
                demands.append((most / flow.weight, flow.customer, most, flow))
        demands.sort()  # the smallest demand per weight first, so that the rest can be shared
        weight = sum(flow.weight for *_, flow in demands)
        used = 0.0
        for _, customer, most, flow in demands:
            rate = min(most, (workers - used) * flow.weight / weight)
            weight -= flow.weight
            used += rate
            if customer in self.plan.limits:
                running[customer] = running.get(customer, 0.0) + rate
            self._serve(flow, rate)
        return used

    def _serve(self, flow: _Flow, rate: float) -> None:
        """Give each of the first documents a whole worker, and the next one the remainder."""
        if len(flow.documents) == 1 or rate <= 1:
            if rate > 0:
                self.served.append((flow.documents[0], min(1.0, rate)))
            return
        for n in flow.documents[: int(rate) + 1]:
            if rate > 1e-12:
                self.served.append((n, min(1.0, rate)))
            rate -= 1

    def _enter(self, level: _Level, flow: _Flow) -> None:
        """Represent the remaining work of the flow's head by the clock."""
        left = self.left[flow.documents[0]]
        flow.entry = (level.clock + left / flow.weight, flow.customer)
        heappush(level.ends, flow.entry)

    def _note(self, level: _Level, flow: _Flow) -> None:
        """Convert the clock back to the remaining work of the flow's head."""
        if flow.documents and flow.entry[0] < _NEVER:
            left = (flow.entry[0] - level.clock) * flow.weight
            self.left[flow.documents[0]] = max(0.0, left)

    # ── Arrivals and ends ────────────────────────────────────────────────────────────────────────

    def _level_of(self, n: int) -> _Level:
        return self.levels[self.priorities[n] if self.priorities else 1]

    def _arrive(self, n: int) -> None:
        customer = self.trace.customer[n]
        weight = self.trace.weight.get(n)
        if weight is not None:
            self._change(customer, weight)
        self._wait(n)

    def _wait(self, n: int) -> None:
        customer = self.trace.customer[n]
        level = self._level_of(n)
        self.left[n] = float(self.trace.cost[n])
        flow = level.flows.get(customer)
        if flow is None:
            flow = level.flows[customer] = _Flow(customer, self.weights[customer])
            level.weight += flow.weight
        elif level.crowded:
            self._note(level, flow)
        insort(flow.documents, n)
        if level.crowded:
            self._enter(level, flow)

    def _change(self, customer: int, weight: int) -> None:
        self.weights[customer] = weight
        for level in self.levels:
            flow = level.flows.get(customer)
            if flow is not None:
                if level.crowded:
                    self._note(level, flow)
                level.weight += weight - flow.weight
                flow.weight = weight
                if level.crowded:
                    self._enter(level, flow)

    def _leave(self, n: int) -> None:
        level = self._level_of(n)
        flow = level.flows[self.trace.customer[n]]
        if level.crowded and flow.documents[0] != n:
            self._note(level, flow)
        del self.left[n]
        del flow.documents[bisect_left(flow.documents, n)]
        if not flow.documents:
            level.weight -= flow.weight
            del level.flows[flow.customer]
            if not level.flows:
                level.crowded = False
                level.ends.clear()
                level.clock = 0.0
        elif level.crowded:
            self._enter(level, flow)

    def _finish(self, n: int) -> None:
        delays = self.plan.failures.get(n, ())
        failed = self.failed.get(n, 0)
        self._leave(n)
        if failed < len(delays):
            self.failed[n] = failed + 1
            heappush(self.agenda, (round(self.now) + delays[failed], Step.DUE, n))
            if self.cancelled_at.get(n, _NEVER) < self.now:
                self._take_step(Step.CANCEL, n)
        else:
            self.result.finished_at[n] = round(self.now)
            self.finished[n] = True
            self.ended += 1

    def _take_step(self, step: Step, n: int) -> None:
        if step is Step.WORKERS:
            self.workers += n
        elif step is Step.DUE:
            if n not in self.result.cancelled:
                self._wait(n)
        elif not (self.finished[n] or n in self.result.cancelled or self._begun(n)):
            if n in self.left:
                self._leave(n)
            self.result.cancelled[n] = round(self.now)
            self.ended += 1

    def _begun(self, n: int) -> bool:
        if n not in self.left:
            return False
        level = self._level_of(n)
        flow = level.flows[self.trace.customer[n]]
        if level.crowded and flow.documents[0] == n:
            self._note(level, flow)
        return self.left[n] < self.trace.cost[n]
