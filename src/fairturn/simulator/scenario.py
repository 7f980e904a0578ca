"""A trace with groups of customers, workers, failures and costs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace

from fairturn.clock import microseconds
from fairturn.model import weight_in_thousandths
from fairturn.scheduling.flows import Costs
from fairturn.simulator.plan import Cancel, Loss, Plan
from fairturn.simulator.trace import Trace

# With at most this number of customers in a file, each is a group.
GROUPS_BY_NAME_MAX = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The input of a simulation. Every customer belongs to one group; results are by group."""

    name: str
    trace: Trace
    groups: tuple[str, ...]
    group_of: tuple[int, ...]  # customer -> number of its group
    plan: Plan
    costs: Costs = Costs.EQUAL

    def members(self, group: int) -> list[int]:
        return [customer for customer, of in enumerate(self.group_of) if of == group]

    def documents_by_group(self) -> list[list[int]]:
        documents: list[list[int]] = [[] for _ in self.groups]
        for n, customer in enumerate(self.trace.customer):
            documents[self.group_of[customer]].append(n)
        return documents

    def changed(
        self,
        *,
        workers: int | None = None,
        costs: Costs | None = None,
        weights: Iterable[tuple[str, float]] = (),
        limits: Iterable[tuple[str | None, int]] = (),
    ) -> "Scenario":
        """Return a copy with other settings; a limit without a name applies to all customers."""
        limit_of = dict(self.plan.limits)
        for name, limit in limits:
            numbers = range(len(self.trace.names)) if name is None else [self._number(name)]
            limit_of.update(dict.fromkeys(numbers, limit))
        trace = copy(self.trace)
        trace.set_weights({self._number(name): weight_in_thousandths(w) for name, w in weights})
        return replace(
            self,
            trace=trace,
            plan=replace(
                self.plan,
                limits=limit_of,
                workers=self.plan.workers if workers is None else workers,
            ),
            costs=self.costs if costs is None else costs,
        )

    def _number(self, name: str) -> int:
        try:
            return self.trace.names.index(name)
        except ValueError:
            raise ValueError(f"{self.name} has no customer {name!r}") from None


class Draft:
    """A scenario under construction. Documents can be added in any order."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, str, int, tuple[int, ...]]] = []
        self._groups: dict[str, str] = {}  # customer -> group
        self._weights: dict[str, int] = {}
        self._cancels: list[tuple[int, str, int]] = []

    def customer(self, name: str, group: str, weight: float | None = None) -> None:
        """Add a customer. Customers are numbered in the order of these calls."""
        self._groups[name] = group
        if weight is not None:
            self._weights[name] = weight_in_thousandths(weight)

    def add(
        self, at_s: float, customer: str, cost_s: float, retry_after_s: Sequence[float] = ()
    ) -> None:
        """Add a document; `retry_after_s` has the delay after each failed attempt."""
        delays = tuple(microseconds(delay) for delay in retry_after_s)
        self._rows.append((microseconds(at_s), customer, microseconds(cost_s), delays))

    def cancel_all(self, at_s: float, customer: str) -> None:
        """Cancel all documents of the customer that were added so far."""
        self._cancels.append((microseconds(at_s), customer, len(self._rows)))

    def finish(
        self,
        name: str,
        *,
        workers: int,
        costs: Costs = Costs.EQUAL,
        losses: Iterable[Loss] = (),
    ) -> Scenario:
        """Return the scenario, with the documents in the order of submission."""
        names = list(self._groups)
        numbers = {customer: number for number, customer in enumerate(names)}
        trace = Trace()
        trace.names = names
        failures: dict[int, tuple[int, ...]] = {}
        by_time = sorted(range(len(self._rows)), key=lambda row: self._rows[row][0])
        place = {row: n for n, row in enumerate(by_time)}
        for n, row in enumerate(by_time):
            at, customer, cost, delays = self._rows[row]
            trace.at.append(at)
            trace.customer.append(numbers[customer])
            trace.cost.append(cost)
            if delays:
                failures[n] = delays
        trace.set_weights({numbers[name]: w for name, w in self._weights.items()})
        cancels = [
            Cancel(at, place[row])
            for at, customer, rows in self._cancels
            for row in range(rows)
            if self._rows[row][1] == customer
        ]
        groups = tuple(dict.fromkeys(self._groups.values()))
        return Scenario(
            name=name,
            trace=trace,
            groups=groups,
            group_of=tuple(groups.index(self._groups[customer]) for customer in names),
            plan=Plan(
                workers=workers, failures=failures, cancels=tuple(cancels), losses=tuple(losses)
            ),
            costs=costs,
        )


def scenario_of(trace: Trace, name: str, *, workers: int) -> Scenario:
    """Return a scenario of a trace. Up to `GROUPS_BY_NAME_MAX` customers are a group each; of more,
    the largest ones that submitted half of the documents are one group, the rest another."""
    groups, group_of = tuple(trace.names), list(range(len(trace.names)))
    if len(groups) > GROUPS_BY_NAME_MAX:
        groups, group_of = ("small", "large"), [0] * len(groups)
        sent = 0
        for customer, documents in Counter(trace.customer).most_common():
            group_of[customer] = 1
            sent += documents
            if 2 * sent >= len(trace):
                break
    plan = Plan(workers=workers)
    return Scenario(name=name, trace=trace, groups=groups, group_of=tuple(group_of), plan=plan)
