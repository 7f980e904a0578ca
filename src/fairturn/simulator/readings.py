"""Four readings of the priority rule, for comparison. The queue offers two of them.

`idle` and `periodic` are settings of the queue (`priority.Reset`). The other two exist only here,
as wrappers of another order that change priorities:

- *outstanding*: the count that a document finds is minus the number of its customer's documents
  that wait or run when it is submitted. Nothing is ever reset. A document in a retry delay neither
  waits nor runs. The priority is fixed at submission.
- *re-evaluated*: counts and priorities as in `idle`. In addition, once more than the reset interval
  has passed since a customer's last submission, the count is 0 and the customer's waiting
  documents get its priority, 1. Each of them leaves the flow of its level and arrives in that of
  level 1, in the order of submission. Documents that run at that time keep their priority.
"""

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from fairturn.priority import Reset, Rule
from fairturn.scheduling.flows import PATIENCE_US, Pick
from fairturn.simulator.comparison import Discipline, Result, order_of, result_of
from fairturn.simulator.orders import Order, Paper
from fairturn.simulator.replay import Replayed, serve
from fairturn.simulator.scenario import Scenario


class Reading(StrEnum):
    """A definition of the pending documents count."""

    IDLE = "idle"  # the default
    PERIODIC = "periodic"
    OUTSTANDING = "outstanding"
    RE_EVALUATED = "re-evaluated"


def compare_readings(
    scenario: Scenario, mode: Discipline, *, rule: Rule, patience_us: int = PATIENCE_US
) -> dict[Reading, Result]:
    """Serve the scenario in one mode, once for each reading of the rule."""
    return {
        reading: result_of(
            scenario, mode, serve_reading(scenario, mode, reading, rule, patience_us)
        )
        for reading in Reading
    }


def serve_reading(
    scenario: Scenario,
    mode: Discipline,
    reading: Reading,
    rule: Rule,
    patience_us: int = PATIENCE_US,
) -> Replayed:
    """Serve the scenario in a mode with one reading. Counts and priorities in the result are those
    at submission."""
    order = order_of(mode, scenario, patience_us)
    trace, plan = scenario.trace, scenario.plan
    rule = replace(rule, reset=Reset.PERIODIC if reading is Reading.PERIODIC else Reset.IDLE)
    if reading is Reading.OUTSTANDING:
        counting = OutstandingOrder(order, rule, len(trace))
        run = serve(trace, counting, rule=rule, plan=plan)
        run.count, run.priority = counting.counts, counting.priorities
        return run
    if reading is Reading.RE_EVALUATED:
        order = ReevaluatedOrder(order, rule)
    return serve(trace, order, rule=rule, plan=plan)


class OutstandingOrder:
    """Another order, with priorities from the documents that wait or run at each submission."""

    def __init__(self, order: Order, rule: Rule, documents: int) -> None:
        self._order = order
        self._rule = rule
        self._outstanding: Counter[int] = Counter()  # customer -> waiting and running
        self.counts = array("q", bytes(8 * documents))
        self.priorities = array("b", bytes(documents))  # 0 before the submission
        self.change = order.change
        self.pick = order.pick

    def arrive(self, paper: Paper, at: int) -> None:
        n, customer = paper.number, paper.customer
        if not self.priorities[n]:
            self.counts[n] = -self._outstanding[customer]
            self.priorities[n] = self._rule.priority(self.counts[n])
        self._outstanding[customer] += 1
        self._order.arrive(self._with_priority(paper), at)

    def leave(self, paper: Paper, at: int) -> None:
        self._outstanding[paper.customer] -= 1
        self._order.leave(self._with_priority(paper), at)

    def take_back(self, paper: Paper, at: int) -> None:
        self._order.take_back(self._with_priority(paper), at)

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        self._outstanding[pick.customer] -= 1
        self._order.end(pick, real_cost, at)

    def _with_priority(self, paper: Paper) -> Paper:
        return paper._replace(priority=self.priorities[paper.number])


class ReevaluatedOrder:
    """Another order, in which waiting documents follow a reset of their customer's count.

    The other order gets a document as `2 * number`, and as `2 * number + 1` after its priority has
    changed. Both numbers keep the order of submission, and no order has to handle a document that
    left and arrives again."""

    def __init__(self, order: Order, rule: Rule) -> None:
        self._order = order
        self._interval_us = rule.reset_interval_us
        self._best = rule.priority(0)
        self._papers: dict[int, Paper] = {}  # as passed to the other order
        self._waiting: dict[int, set[int]] = {}  # customer -> documents that a reset would lift
        self._updated_at: dict[int, int] = {}
        self._updates: deque[tuple[int, int]] = deque()  # (timestamp, customer), oldest first

    def change(self, customer: int, weight: int, limit: int | None, at: int) -> None:
        self._reset_until(at)
        self._order.change(customer, weight, limit, at)

    def arrive(self, paper: Paper, at: int) -> None:
        self._reset_until(at)
        known = self._papers.get(paper.number)
        if known is None:
            known = paper._replace(number=2 * paper.number)
            self._updated_at[paper.customer] = at
            self._updates.append((at, paper.customer))
        self._wait(paper.number, known)
        self._order.arrive(known, at)

    def leave(self, paper: Paper, at: int) -> None:
        self._reset_until(at)
        self._waiting[paper.customer].discard(paper.number)
        self._order.leave(self._papers[paper.number], at)

    def take_back(self, paper: Paper, at: int) -> None:
        self._reset_until(at)
        known = self._papers[paper.number]
        self._wait(paper.number, known)
        self._order.take_back(known, at)

    def end(self, pick: Pick, real_cost: int | None, at: int) -> None:
        self._reset_until(at)
        self._order.end(pick, real_cost, at)

    def pick(self, now: int, kinds: Sequence[int]) -> Pick | None:
        self._reset_until(now)
        pick = self._order.pick(now, kinds)
        if pick is None:
            return None
        number = pick.order // 2
        self._waiting[pick.customer].discard(number)
        return pick._replace(order=number)

    def _wait(self, number: int, known: Paper) -> None:
        self._papers[number] = known
        waiting = self._waiting.setdefault(known.customer, set())
        if known.priority != self._best:
            waiting.add(number)

    def _reset_until(self, now: int) -> None:
        """Reset the customers whose last submission is more than the interval ago."""
        while self._updates and now - self._updates[0][0] > self._interval_us:
            updated_at, customer = self._updates.popleft()
            if self._updated_at[customer] == updated_at:
                self._lift(customer, updated_at + self._interval_us + 1)

    def _lift(self, customer: int, at: int) -> None:
        for number in sorted(self._waiting[customer]):
            known = self._papers[number]
            lifted = known._replace(number=2 * number + 1, priority=self._best)
            self._papers[number] = lifted
            self._order.leave(known, at)
            self._order.arrive(lifted, at)
        self._waiting[customer].clear()
