"""Replaying a trace: when would each document have started and finished?

At one moment, documents finish (by their number in the trace), then documents are submitted (in
the order of the trace), then free workers claim; and again, until nothing changes.
"""

from array import array
from collections.abc import Callable
from heapq import heappop, heappush

from fairturn.flows import (
    PATIENCE_US,
    Arrived,
    Backlog,
    Changed,
    Costs,
    Ended,
    Event,
    Finished,
    Mode,
    Pick,
)
from fairturn.priority import Count, Rule
from fairturn.simulator.trace import Trace
from fairturn.turns import Turns

_REPORT_EVERY = 10_000


class Replayed:
    """What became of each document of a trace, as columns in the order of the file."""

    def __init__(self, documents: int) -> None:
        self.count = array("q", bytes(8 * documents))
        self.priority = array("b", bytes(documents))
        self.started_at = array("q", bytes(8 * documents))
        self.finished_at = array("q", bytes(8 * documents))


def replay(
    trace: Trace,
    *,
    rule: Rule,
    mode: Mode = Mode.FAIR,
    workers: int = 1,
    costs: Costs = Costs.EQUAL,
    patience_us: int = PATIENCE_US,
    progress: Callable[[int], None] = lambda done: None,
) -> Replayed:
    """Serve a trace with so many workers. `progress` hears how many documents are finished."""
    turns = Turns(backlog := Backlog(), mode=mode, costs=costs, patience_us=patience_us)
    return _Replay(trace, rule, turns, backlog, workers).run(progress)


class _Replay:
    def __init__(
        self, trace: Trace, rule: Rule, turns: Turns, backlog: Backlog, workers: int
    ) -> None:
        self.trace = trace
        self.rule = rule
        self.turns = turns
        self.backlog = backlog
        self.free = workers
        self.counts: list[Count | None] = [None] * len(trace.names)
        self.running: list[tuple[int, int]] = []  # (when it finishes, number), a heap
        self.picks: dict[int, Pick] = {}
        self.result = Replayed(len(trace))

    def run(self, progress: Callable[[int], None]) -> Replayed:
        arrivals = self.trace.at
        submitted = finished = 0
        while finished < len(arrivals):
            next_finish = self.running[0][0] if self.running else None
            if submitted < len(arrivals) and (
                next_finish is None or arrivals[submitted] < next_finish
            ):
                now = arrivals[submitted]
            else:
                assert next_finish is not None
                now = next_finish
            while self.running and self.running[0][0] == now:
                self._finish(heappop(self.running)[1], now)
                finished += 1
                if finished % _REPORT_EVERY == 0:
                    progress(finished)
            while submitted < len(arrivals) and arrivals[submitted] == now:
                self._submit(submitted, now)
                submitted += 1
            self._claim(now)
        return self.result

    def _submit(self, n: int, now: int) -> None:
        customer = self.trace.customer[n]
        weight = self.trace.weight.get(n)
        if weight is not None:
            self.turns.apply(Changed(customer, weight, None, paused=False), now)
        count = self.counts[customer] = self.rule.check(self.counts[customer], now)
        priority = self.rule.priority(count.value)
        self.result.count[n] = count.value
        self.result.priority[n] = priority
        level = 1 if self.turns.mode is Mode.EQUAL else priority
        known = self.trace.cost[n] if self.turns.costs is Costs.KNOWN else None
        self.backlog.add(customer, level, n, known)
        self.turns.apply(Arrived(customer, level, n, 1), now)

    def _claim(self, now: int) -> None:
        while self.free and (pick := self.turns.pick(now)) is not None:
            n = pick.order
            self.free -= 1
            self.picks[n] = pick
            self.result.started_at[n] = now
            heappush(self.running, (now + self.trace.cost[n], n))

    def _finish(self, n: int, now: int) -> None:
        pick = self.picks.pop(n)
        self.free += 1
        self.result.finished_at[n] = now
        event: Event = Ended(pick.customer, pick.level, 1)
        if self.turns.costs is Costs.LEARNED:
            real = self.trace.cost[n]
            event = Finished(pick.customer, pick.level, pick.cost, pick.weight, real)
        self.turns.apply(event, now)
