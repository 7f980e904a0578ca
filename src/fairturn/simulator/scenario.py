"""A trace with groups of customers, workers, faults and costs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import NamedTuple

from fairturn.clock import microseconds
from fairturn.model import DEFAULT_KIND_NAME, weight_in_thousandths
from fairturn.scheduling.flows import Costs
from fairturn.simulator.plan import (
    Cancel,
    Loss,
    Outage,
    Plan,
    WorkerGroup,
    check_served,
)
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

    @property
    def worker_groups(self) -> list[WorkerGroup]:
        """The groups of workers, in the order in which they are asked."""
        return self.plan.groups(len(self.trace.kind_names))

    @property
    def has_ideal(self) -> bool:
        """Whether any worker can take any document at any time."""
        one_kind = len(self.trace.kind_names) == 1
        return one_kind and not self.plan.workers_for and self.plan.is_unheld

    def members(self, group: int) -> list[int]:
        return [customer for customer, of in enumerate(self.group_of) if of == group]

    def documents_by_group(self) -> list[list[int]]:
        documents: list[list[int]] = [[] for _ in self.groups]
        for n, customer in enumerate(self.trace.customer):
            documents[self.group_of[customer]].append(n)
        return documents

    def documents_by_kind_and_group(self) -> list[list[list[int]]]:
        kinds: list[list[list[int]]] = [[[] for _ in self.groups] for _ in self.trace.kind_names]
        for n, customer in enumerate(self.trace.customer):
            kinds[self.trace.kind_of(n)][self.group_of[customer]].append(n)
        return kinds

    def changed(
        self,
        *,
        workers: int | None = None,
        workers_for: Sequence[tuple[str, int]] = (),
        costs: Costs | None = None,
        weights: Iterable[tuple[str, float]] = (),
        limits: Iterable[tuple[str | None, int]] = (),
        kind_limits: Iterable[tuple[str, int]] = (),
        outages: Iterable[Outage] = (),
    ) -> "Scenario":
        """Return a copy with other settings. A limit without a name applies to all customers;
        `workers_for` replaces all groups of workers that serve one kind. Raises `ValueError` for
        names that the scenario does not have, and for a kind that no worker serves."""
        limit_of = dict(self.plan.limits)
        for name, limit in limits:
            numbers = range(len(self.trace.names)) if name is None else [self._number(name)]
            limit_of.update(dict.fromkeys(numbers, limit))
        trace = copy(self.trace)
        trace.set_weights({self._number(name): weight_in_thousandths(w) for name, w in weights})
        groups = tuple((trace.kind_number(kind), n) for kind, n in workers_for)
        plan = replace(
            self.plan,
            workers=self.plan.workers if workers is None else workers,
            workers_for=groups or self.plan.workers_for,
            limits=limit_of,
            kind_limits={
                **self.plan.kind_limits,
                **{trace.kind_number(kind): limit for kind, limit in kind_limits},
            },
            outages=(*self.plan.outages, *outages),
        )
        check_served(trace, plan)
        return replace(self, trace=trace, plan=plan, costs=self.costs if costs is None else costs)

    def _number(self, name: str) -> int:
        try:
            return self.trace.names.index(name)
        except ValueError:
            raise ValueError(f"{self.name} has no customer {name!r}") from None


class _Row(NamedTuple):
    at: int
    customer: str
    cost: int
    delays: tuple[int, ...]
    kind: int


class Draft:
    """A scenario under construction. Documents can be added in any order."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self._groups: dict[str, str] = {}  # customer -> group
        self._weights: dict[str, int] = {}
        self._cancels: list[tuple[int, str, int]] = []
        self._kinds: dict[str, int] = {}
        self._workers_for: list[tuple[int, int]] = []
        self._outages: list[Outage] = []

    def customer(self, name: str, group: str, weight: float | None = None) -> None:
        """Add a customer. Customers are numbered in the order of these calls."""
        self._groups[name] = group
        if weight is not None:
            self._weights[name] = weight_in_thousandths(weight)

    def workers_for(self, kind: str, workers: int) -> None:
        """Add workers that serve one kind."""
        self._workers_for.append((self._kind(kind), workers))

    def outage(self, kind: str, from_s: float, to_s: float, *, fails_after_s: float) -> None:
        """Make the service that a kind needs unavailable."""
        self._outages.append(
            Outage(
                kinds=(self._kind(kind),),
                at=microseconds(from_s),
                back_at=microseconds(to_s),
                fails_after_us=microseconds(fails_after_s),
            )
        )

    def add(
        self,
        at_s: float,
        customer: str,
        cost_s: float,
        retry_after_s: Sequence[float] = (),
        kind: str = DEFAULT_KIND_NAME,
    ) -> None:
        """Add a document; `retry_after_s` has the delay after each failed attempt."""
        delays = tuple(microseconds(delay) for delay in retry_after_s)
        cost, number = microseconds(cost_s), self._kind(kind)
        self._rows.append(_Row(microseconds(at_s), customer, cost, delays, number))

    def _kind(self, name: str) -> int:
        return self._kinds.setdefault(name, len(self._kinds))

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
        trace.kinds = [] if self._kinds.keys() == {DEFAULT_KIND_NAME} else list(self._kinds)
        failures: dict[int, tuple[int, ...]] = {}
        by_time = sorted(range(len(self._rows)), key=lambda row: self._rows[row].at)
        place = {number: n for n, number in enumerate(by_time)}
        for n, number in enumerate(by_time):
            row = self._rows[number]
            trace.at.append(row.at)
            trace.customer.append(numbers[row.customer])
            trace.cost.append(row.cost)
            if trace.kinds:
                trace.kind.append(row.kind)
            if row.delays:
                failures[n] = row.delays
        trace.set_weights({numbers[name]: w for name, w in self._weights.items()})
        cancels = [
            Cancel(at, place[row])
            for at, customer, rows in self._cancels
            for row in range(rows)
            if self._rows[row].customer == customer
        ]
        groups = tuple(dict.fromkeys(self._groups.values()))
        return Scenario(
            name=name,
            trace=trace,
            groups=groups,
            group_of=tuple(groups.index(self._groups[customer]) for customer in names),
            plan=Plan(
                workers=workers,
                workers_for=tuple(self._workers_for),
                failures=failures,
                cancels=tuple(cancels),
                losses=tuple(losses),
                outages=tuple(self._outages),
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
