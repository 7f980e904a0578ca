"""The order of service: the engine compared with the reference, its guarantees, and regressions."""

import gc
import sys
import weakref
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairturn.model import cost_in_millionths, level_of, weight_in_thousandths
from fairturn.priority import BOUNDS, LEVELS, Count, Reset, Rule
from fairturn.scheduling.flows import (
    COST_ONE,
    DEFAULT_KIND,
    PATIENCE_US,
    ArrivalEvent,
    Backlog,
    Band,
    CancelEvent,
    CompletionEvent,
    Costs,
    CustomerState,
    EndEvent,
    Event,
    EventBatch,
    Flow,
    HeadEntry,
    Mode,
    Pick,
    PurgeEvent,
    RequeueEvent,
    RunningEvent,
    SettingsEvent,
    TurnEntry,
    band_of,
    kind_of,
)
from fairturn.scheduling.turns import Turns
from tests.reference import KIND, Document, Reference

Row = TypeVar("Row")

SECOND = 1_000_000
FAIR_MODES = (Mode.FAIR, Mode.EQUAL)
EXAMPLES = settings().max_examples  # of the active profile


# ── Two small stores around the engine ───────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Setup:
    mode: Mode = Mode.FAIR
    costs: Costs = Costs.EQUAL
    patience_us: int = PATIENCE_US
    bounds: tuple[int, ...] = BOUNDS
    reset: Reset = Reset.IDLE
    reset_interval_us: int = 1_500 * SECOND
    attempts_max: int = 3

    def reference(self) -> Reference:
        return Reference(
            mode=self.mode.value,
            costs=self.costs.value,
            patience_us=self.patience_us,
            bounds=self.bounds,
            reset=self.reset.value,
            reset_interval_us=self.reset_interval_us,
            attempts_max=self.attempts_max,
        )


@dataclass
class Paper:
    """A document, as a store has it."""

    number: int
    customer: int
    level: int
    priority: int
    count: int
    cost: int | None
    due_at: int | None
    state: str
    order: int = 0
    attempts: int = 0
    lease_ends_at: int = 0
    pick: Pick | None = None


class FlowRow(NamedTuple):
    virtual_time: int
    tick: int
    waiting: int
    running: int
    head_order: int | None
    head_since: int | None  # only where the head is the customer's
    held: bool


class StandingRow(NamedTuple):
    weight: int
    limit: int | None
    paused: bool
    recent_costs: tuple[int, ...]


class Stored:
    """A `FlowSource` like that of a database: rows of plain values, with a count of reads."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode
        self.orders: dict[tuple[int, int], list[int]] = {}
        self.costs: dict[int, int] = {}
        self.customers: dict[int, StandingRow] = {}
        self.rows: dict[tuple[int, int], FlowRow] = {}
        self.reads: Counter[str] = Counter()

    def add(self, customer: int, level: int, order: int, cost: int | None = None) -> None:
        insort(self.orders.setdefault((customer, level), []), order)
        if cost is not None:
            self.costs[order] = cost

    def discard(self, customer: int, level: int, order: int) -> int | None:
        orders = self.orders[customer, level]
        orders.remove(order)
        return orders[0] if orders else None

    def customer_state(self, customer: int) -> CustomerState:
        self.reads["customer_state"] += 1
        state = CustomerState(customer)
        if customer in self.customers:
            state.weight, state.limit, state.paused, costs = self.customers[customer]
            state.head().recent_costs = costs
        head = state.head()
        for flow, since in self.flows(customer, None if customer in self.customers else 0):
            if customer not in self.customers:
                state.whole = False
            if since is not None:
                head.order, head.since = flow.head_order, since
            elif customer not in self.customers and head.order is not None:
                # The flow contains the head, and no limit or pause connects the flows.
                if flow.head_order is not None:
                    head.elsewhere = min(flow.head_order, head.elsewhere or flow.head_order)
                continue
            state.flows[flow.band] = flow
            state.running += flow.running
        return state

    def flows(self, customer: int, kind: int | None) -> list[tuple[Flow, int | None]]:
        rows = [
            (to_flow(customer, band, row), row.head_since)
            for (c, band), row in self.rows.items()
            if c == customer and kind in (None, kind_of(band))
        ]
        self.reads.update(f"flows of kind {kind_of(flow.band)}" for flow, _ in rows)
        return rows

    def flow(self, customer: int, band: int) -> Flow:
        return Flow(customer, band)

    def turns(self, kind: int) -> Iterator[TurnEntry]:
        by_order = self.mode is Mode.LEVELS
        rows = [
            (band, row.head_order or 0 if by_order else row.virtual_time, row.tick, customer)
            for (customer, band), row in self.rows.items()
            if row.waiting > 0 and not row.held and kind_of(band) == kind
        ]
        return self._counted("turns", sorted(rows))

    def heads(self, kind: int) -> Iterator[HeadEntry]:
        rows = [
            (row.head_since, row.head_order or 0, customer)
            for (customer, band), row in self.rows.items()
            if row.head_since is not None and not row.held and kind_of(band) == kind
        ]
        return self._counted("heads", sorted(rows))

    def _counted(self, what: str, rows: Iterable[Row]) -> Iterator[Row]:
        for row in rows:
            self.reads[what] += 1
            yield row

    def order_after(self, flow: Flow, order: int) -> int | None:
        self.reads["order_after"] += 1
        orders = self.orders[flow.customer, flow.band]
        after = bisect_right(orders, order)
        return orders[after] if after < len(orders) else None

    def cost(self, flow: Flow) -> int | None:
        self.reads["cost"] += 1
        assert flow.head_order is not None
        return self.costs.get(flow.head_order)

    def write(self, turns: Turns) -> None:
        """Store what the engine has touched, and nothing else."""
        for customer in turns.adjusted:
            state = turns.customers[customer]
            self.customers[customer] = StandingRow(
                state.weight, state.limit, state.paused, state.head().recent_costs
            )
        for flow in turns.touched:
            state = turns.customers[flow.customer]
            head = state.head(kind_of(flow.band))
            is_head = flow.head_order is not None and flow.head_order == head.order
            self.rows[flow.customer, flow.band] = FlowRow(
                flow.virtual_time,
                flow.tick,
                flow.waiting,
                flow.running,
                flow.head_order,
                head.since if is_head else None,
                state.held,
            )
        turns.adjusted.clear()
        turns.touched.clear()

    def forget(self, turns: Turns) -> None:
        for (customer, band), row in list(self.rows.items()):
            if turns.forgettable(to_flow(customer, band, row)):
                del self.rows[customer, band]


def to_flow(customer: int, band: int, row: FlowRow) -> Flow:
    return Flow(
        customer,
        band,
        virtual_time=row.virtual_time,
        tick=row.tick,
        waiting=row.waiting,
        running=row.running,
        head_order=row.head_order,
        active=row.waiting > 0 and not row.held,
    )


class Desk:
    """The documents, leases and unfolded events that every store has.

    The engine lives as long as the desk, with everything in memory."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.source: Backlog | Stored = Backlog()
        self.engine = Turns(
            self.source, mode=setup.mode, costs=setup.costs, patience_us=setup.patience_us
        )
        self.rule = Rule(
            bounds=setup.bounds, reset=setup.reset, reset_interval_us=setup.reset_interval_us
        )
        self.counts: dict[int, Count] = {}
        self.papers: dict[int, Paper] = {}
        self.by_order: dict[int, Paper] = {}
        self.events: list[EventBatch] = []

    def submit(
        self, customer: int, now: int, costs: Iterable[int | None], due_at: int | None = None
    ) -> list[Paper]:
        papers = []
        for cost in costs:
            count = self.counts[customer] = self.rule.check(self.counts.get(customer), now)
            priority = self.rule.priority(count.value)
            level = level_of(priority, self.setup.mode)
            number = len(self.papers) + 1
            paper = Paper(number, customer, level, priority, count.value, cost, due_at, "delayed")
            self.papers[number] = paper
            papers.append(paper)
            if due_at is None or due_at <= now:
                paper.state = "waiting"
                self._number(paper)
        self._record(now, *self._arrived([paper for paper in papers if paper.state == "waiting"]))
        return papers

    def set(self, customer: int, now: int, weight: int, limit: int | None, paused: bool) -> None:
        self._record(now, SettingsEvent(customer, weight, limit, paused))

    def cancel(self, paper: Paper, now: int) -> None:
        if paper.state == "waiting":
            lowest = self.source.discard(paper.customer, paper.level, paper.order)
            self._record(now, CancelEvent(paper.customer, paper.level, paper.order, lowest))
        paper.state = "ended"

    def finish(self, paper: Paper, now: int, real_cost: int) -> None:
        paper.state = "ended"
        ended: Event = EndEvent(paper.customer, paper.level, 1)
        if self.setup.costs is Costs.LEARNED:
            assert paper.pick is not None
            charged = (paper.pick.cost, paper.pick.weight)
            ended = CompletionEvent(paper.customer, paper.level, *charged, real_cost)
        self._record(now, ended)

    def fail(self, paper: Paper, now: int, delay_us: int | None) -> None:
        if delay_us is None or paper.attempts >= self.setup.attempts_max:
            paper.state = "ended"
        else:
            paper.state = "delayed"
            paper.due_at = now + delay_us
        self._record(now, EndEvent(paper.customer, paper.level, 1))

    def release(self, paper: Paper, now: int) -> None:
        assert paper.pick is not None
        paper.state = "waiting"
        paper.attempts -= 1
        self._record(now, self._returned(paper, paper.pick.charge))

    def claim(self, now: int, n: int, lease_us: int) -> list[Pick]:
        turns = self._turns()
        turns.fold(
            now,
            expired=list(self._expired(now)),
            events=self.events,
            due=list(self._due(now)),
        )
        self.events = []
        picks: list[Pick] = []
        while len(picks) < n and (pick := turns.pick(now)) is not None:
            picks.append(pick)
            paper = self.by_order[pick.order]
            paper.state = "running"
            paper.attempts += 1
            paper.lease_ends_at = now + lease_us
            paper.pick = pick
        self._keep(turns, picks)
        return picks

    def forget(self) -> None:
        self.engine.forget()

    def _turns(self) -> Turns:
        return self.engine

    def _keep(self, turns: Turns, picks: list[Pick]) -> None:
        pass

    def _record(self, at: int, *events: Event) -> None:
        self.events.append(EventBatch(at, events))

    def _expired(self, now: int) -> Iterator[Event]:
        running = [paper for paper in self.papers.values() if paper.state == "running"]
        for paper in sorted(running, key=lambda paper: (paper.lease_ends_at, paper.number)):
            if paper.lease_ends_at > now:
                break
            if paper.attempts >= self.setup.attempts_max:
                paper.state = "ended"
                yield EndEvent(paper.customer, paper.level, 1)
            else:
                paper.state = "waiting"
                yield self._returned(paper, 0)

    def _due(self, now: int) -> Iterator[tuple[int, ArrivalEvent]]:
        delayed = [paper for paper in self.papers.values() if paper.state == "delayed"]
        due = [(paper.due_at, paper.number) for paper in delayed if paper.due_at is not None]
        for due_at, number in sorted(due):
            if due_at > now:
                break
            paper = self.papers[number]
            paper.state = "waiting"
            if not paper.order:
                self._number(paper)
            self._shelve(paper)
            yield due_at, ArrivalEvent(paper.customer, paper.level, paper.order, 1)

    def _arrived(self, papers: list[Paper]) -> Iterator[Event]:
        """Return one event per flow: the documents of a flow in one submission arrive together."""
        for level in sorted({paper.level for paper in papers}):
            inside = [paper for paper in papers if paper.level == level]
            for paper in inside:
                self._shelve(paper)
            yield ArrivalEvent(inside[0].customer, level, inside[0].order, len(inside))

    def _returned(self, paper: Paper, refund: int) -> Event:
        self._shelve(paper)
        return RequeueEvent(paper.customer, paper.level, paper.order, refund)

    def _shelve(self, paper: Paper) -> None:
        self.source.add(paper.customer, paper.level, paper.order, paper.cost)

    def _number(self, paper: Paper) -> None:
        paper.order = len(self.by_order) + 1
        self.by_order[paper.order] = paper


class KeepingDesk(Desk):
    """A desk that stores rows, as a database does, and caches the engine from claim to claim."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.source: Stored = Stored(setup.mode)
        self._load(self.engine)

    def _load(self, last: Turns) -> None:
        """Replace the engine by one that has loaded nothing."""
        self.engine = Turns(
            self.source,
            mode=self.setup.mode,
            costs=self.setup.costs,
            patience_us=self.setup.patience_us,
            number=last.number,
            tick=last.tick,
            bands=last.bands,
            level_times=last.level_times,
            since_patience=last.since_patience,
        )

    def _turns(self) -> Turns:
        return self.engine

    def _keep(self, turns: Turns, picks: list[Pick]) -> None:
        for pick in picks:
            self.source.discard(pick.customer, pick.band, pick.order)
        self.source.write(turns)
        weights: Counter[int] = Counter()
        for (customer, band), row in self.source.rows.items():
            if row.waiting > 0 and not row.held:
                state = self.source.customers.get(customer)
                weights[band] += state.weight if state else 1_000
        assert {
            number: band.weight for number, band in turns.bands.items() if band.weight
        } == weights

    def forget(self) -> None:
        self.source.forget(self.engine)
        self._load(self.engine)


class ReloadingDesk(KeepingDesk):
    """A desk that starts a new engine for each claim, as if each came from another process."""

    def _keep(self, turns: Turns, picks: list[Pick]) -> None:
        super()._keep(turns, picks)
        self.forget()


DESKS: tuple[type[Desk], ...] = (Desk, KeepingDesk, ReloadingDesk)


# ── Any sequence of operations ───────────────────────────────────────────────────────────────────

SOME_COSTS = (None, 0, 1, 1_500_000, 10 * COST_ONE)
REAL_COSTS = (0, 1, 10_000, COST_ONE, 7_654_321)
WEIGHTS = (1_000, 10, 333, 1_000, 3_000, 100_000)
LIMITS = (None, None, 1, 2, 5)
STEPS_US = (0, 1, SECOND, 30 * SECOND, PATIENCE_US, PATIENCE_US + 1)
DELAYS_US = (0, 1, SECOND, 61 * SECOND)
LEASES_US = (10_000 * SECOND, 60 * SECOND, SECOND, 1)
KINDS = (
    *("wait", "wait", "submit", "submit", "submit", "claim", "claim", "claim"),
    *("finish", "finish", "finish", "fail", "cancel", "release", "set", "forget"),
)

Operation = tuple[Any, ...]


def decode(blob: bytes) -> list[Operation]:
    """Decode five bytes into one operation. Hypothesis generates and shrinks bytes much faster than
    lists of tuples; a zero is the simplest choice."""
    told: list[Operation] = []
    for start in range(0, len(blob) - 4, 5):
        kind, a, b, c, d = blob[start : start + 5]
        match KINDS[kind % len(KINDS)]:
            case "wait":
                told.append(("wait", STEPS_US[a % len(STEPS_US)]))
            case "submit":
                costs = [SOME_COSTS[(c + n * d) % len(SOME_COSTS)] for n in range(1 + b % 6)]
                due_in = DELAYS_US[d % len(DELAYS_US)] if d % 3 == 2 else None
                told.append(("submit", a % 5, costs, due_in))
            case "claim":
                told.append(("claim", 1 + a % 12, LEASES_US[b % len(LEASES_US)]))
            case "finish":
                told.append(("finish", a, REAL_COSTS[b % len(REAL_COSTS)]))
            case "fail":
                told.append(("fail", a, DELAYS_US[b % len(DELAYS_US)] if c % 4 else None))
            case "set":
                weight, limit = WEIGHTS[b % len(WEIGHTS)], LIMITS[c % len(LIMITS)]
                told.append(("set", a % 5, weight, limit, d % 3 == 2))
            case kind_of_one:
                told.append((kind_of_one, a))
    return [operation for operation in told if operation != ("wait", 0)]


@st.composite
def stories(draw: st.DrawFn) -> list[Operation]:
    return decode(draw(st.binary(min_size=150, max_size=450)))


TIGHT_BOUNDS = (0, -1, -2, -3, -4, -5, -6, -7)  # each document of a burst in another level


def setups(mode: Mode, costs: Costs) -> st.SearchStrategy[Setup]:
    return st.builds(
        Setup,
        mode=st.just(mode),
        costs=st.just(costs),
        patience_us=st.sampled_from([PATIENCE_US, 0, SECOND]),
        bounds=st.sampled_from([TIGHT_BOUNDS, BOUNDS]),
        reset=st.sampled_from(Reset),
        reset_interval_us=st.sampled_from([1_500 * SECOND, 20 * SECOND]),
        attempts_max=st.integers(1, 3),
    )


class Run:
    """Drives the reference and several desks through the same operations."""

    def __init__(self, setup: Setup, *desks: Desk) -> None:
        self.reference = setup.reference()
        self.desks = desks
        self.now = 1_000 * SECOND
        self.documents: dict[int, Document] = {}  # all that were ever submitted

    def do(self, operation: Operation) -> list[Document]:
        """Do one operation and return what it claimed."""
        match operation:
            case "wait", int(us):
                self.now += us
            case "submit", customer, list(costs), due_in:
                self._submit(customer, costs, due_in)
            case "claim", int(n), int(lease_us):
                return self._claim(n, lease_us)
            case "finish" | "fail" | "release", place, *details:
                document = self._one(place, "running")
                if document is not None:
                    self._both(operation[0], document, *details)
            case "cancel", place:
                document = self._one(place, "waiting", "delayed")
                if document is not None:
                    self._both("cancel", document)
            case "set", customer, *details:
                self.reference.set(customer, self.now, *details)
                for desk in self.desks:
                    desk.set(customer, self.now, *details)
            case "forget", _:
                for desk in self.desks:
                    desk.forget()
        return []

    def _submit(self, customer: int, costs: list[int | None], due_in: int | None) -> None:
        due_at = None if due_in is None else self.now + due_in
        documents = [
            self.reference.submit(customer, self.now, cost=cost, due_at=due_at) for cost in costs
        ]
        self.documents.update((document.number, document) for document in documents)
        expected = [(d.number, d.count, d.priority, d.level) for d in documents]
        for desk in self.desks:
            papers = desk.submit(customer, self.now, costs, due_at)
            assert [(p.number, p.count, p.priority, p.level) for p in papers] == expected

    def _claim(self, n: int, lease_us: int) -> list[Document]:
        claimed = self.reference.claim(self.now, n, lease_us)
        expected = [
            (d.customer.name, d.level, d.order, d.charged_cost, d.charged_weight, d.charge)
            for d in claimed
        ]
        for desk in self.desks:
            assert desk.claim(self.now, n, lease_us) == expected
            for level in range(1, LEVELS + 1):
                assert desk.engine.bands[level].clock == self.reference.clocks[level, KIND]
            assert desk.engine.number == self.reference.number
            if desk.setup.mode is not Mode.LEVELS:
                assert desk.engine.tick == self.reference.tick
        return claimed

    def _one(self, place: int, *states: str) -> Document | None:
        there = [d for d in self.reference.documents if d.state in states]
        return there[place % len(there)] if there else None

    def _both(self, verb: str, document: Document, *details: Any) -> None:
        for desk in self.desks:
            getattr(desk, verb)(desk.papers[document.number], self.now, *details)
        getattr(self.reference, verb)(document, self.now, *details)


@pytest.mark.parametrize("costs", Costs)
@pytest.mark.parametrize("mode", Mode)
@settings(max_examples=2 * EXAMPLES)
@given(data=st.data())
def test_5_the_engine_serves_any_operations_as_the_reference_however_it_is_driven(
    mode: Mode, costs: Costs, data: st.DataObject
) -> None:
    setup = data.draw(setups(mode, costs))
    run = Run(setup, *(desk(setup) for desk in DESKS))

    for operation in data.draw(stories()):
        run.do(operation)


# ── What is guaranteed ───────────────────────────────────────────────────────────────────────────


class Line:
    """The engine alone, with all documents in one level."""

    def __init__(self, *, mode: Mode = Mode.FAIR, costs: Costs = Costs.EQUAL) -> None:
        self.backlog = Backlog()
        self.turns = Turns(self.backlog, mode=mode, costs=costs)
        self.now = 0
        self.last_order = 0

    def submit(self, customer: int, n: int = 1, cost: int | None = None) -> None:
        for _ in range(n):
            self.last_order += 1
            self.backlog.add(customer, 1, self.last_order, cost)
            self.turns.apply(ArrivalEvent(customer, 1, self.last_order, 1), self.now)

    def set(
        self, customer: int, *, weight: int = 1_000, limit: int | None = None, paused: bool = False
    ) -> None:
        self.turns.apply(SettingsEvent(customer, weight, limit, paused), self.now)

    def pick(self) -> Pick:
        pick = self.turns.pick(self.now)
        assert pick is not None
        return pick

    def end(self, pick: Pick, real_cost: int | None = None) -> None:
        ended: Event = EndEvent(pick.customer, pick.band, 1)
        if real_cost is not None:
            ended = CompletionEvent(pick.customer, pick.band, pick.cost, pick.weight, real_cost)
        self.turns.apply(ended, self.now)

    def serve(self, n: int) -> list[int]:
        """Return the customers of the next documents, which are completed at once."""
        served = []
        for _ in range(n):
            pick = self.pick()
            self.end(pick)
            served.append(pick.customer)
        return served


# Charges are exact with these, so that the bound needs no tolerance.
EXACT_WEIGHTS = (1_000, 10, 100, 500, 2_000, 100_000)
EXACT_COSTS = (COST_ONE, 100_000, 3 * COST_ONE, 50 * COST_ONE)
exact_weights = st.sampled_from(EXACT_WEIGHTS)
exact_costs = st.sampled_from(EXACT_COSTS)


def disturb(line: Line, kind: int, a: int, b: int) -> None:
    """Let time pass, or submit for one of four other customers or change its settings."""
    other = 2 + a % 4
    match kind % 6:
        case 1 | 2:
            line.submit(other, 1 + b % 4, EXACT_COSTS[b % len(EXACT_COSTS)])
        case 3:
            line.set(other, weight=EXACT_WEIGHTS[b % len(EXACT_WEIGHTS)], paused=b > 200)
        case 4:
            line.now += 1
        case 5:
            line.now += PATIENCE_US + 1


def in_turns(cost: int, weight: int) -> int:
    """Return a cost divided by a weight, in the unit of virtual time."""
    return cost * 1_000 // weight


@pytest.mark.parametrize("mode", FAIR_MODES)
@settings(max_examples=4 * EXAMPLES)
@given(
    both_weights=st.tuples(exact_weights, exact_weights),
    costs=st.lists(exact_costs, min_size=1, max_size=7),
    story=st.binary(min_size=90, max_size=450),
)
def test_1_two_customers_who_always_wait_get_service_by_weight_to_within_one_document_each(
    mode: Mode, both_weights: tuple[int, int], costs: list[int], story: bytes
) -> None:
    line = Line(mode=mode, costs=Costs.KNOWN)
    for customer, weight in enumerate(both_weights):
        line.set(customer, weight=weight)
        line.submit(customer, 2, costs[0])
    bound = sum(in_turns(max(costs), weight) for weight in both_weights)
    service = [0, 0]
    served: set[int] = set()
    apart: list[int] = []

    for step in range(len(story) // 3):
        disturb(line, *story[3 * step : 3 * step + 3])
        pick = line.pick()
        line.end(pick)
        if pick.customer < 2:
            line.submit(pick.customer, 1, costs[step % len(costs)])
            if pick.cost is not None:  # an ordinary turn
                service[pick.customer] += in_turns(pick.cost, both_weights[pick.customer])
                served.add(pick.customer)
        if len(served) == 2:
            apart.append(service[0] - service[1])

    assert max(apart, default=0) - min(apart, default=0) <= bound


@settings(max_examples=4 * EXAMPLES)
@given(
    both_weights=st.tuples(exact_weights, exact_weights),
    real_costs_of_both=st.tuples(*[st.lists(exact_costs, min_size=1, max_size=5)] * 2),
    ends=st.binary(min_size=30, max_size=150),
    running_max=st.integers(1, 6),
)
def test_1_with_learned_costs_each_term_counts_the_documents_that_run(
    both_weights: tuple[int, int],
    real_costs_of_both: tuple[list[int], list[int]],
    ends: bytes,
    running_max: int,
) -> None:
    line = Line(costs=Costs.LEARNED)
    for customer, weight in enumerate(both_weights):
        line.set(customer, weight=weight)
        line.submit(customer, 2)
    cost_max = max(COST_ONE, *chain.from_iterable(real_costs_of_both))
    service = [0, 0]
    running: list[tuple[Pick, int]] = []
    most_running = [0, 0]
    served: set[int] = set()
    apart: list[int] = []

    for step, end in enumerate(ends):
        pick = line.pick()
        customer = pick.customer
        real_cost = real_costs_of_both[customer][step % len(real_costs_of_both[customer])]
        running.append((pick, real_cost))
        line.submit(customer)
        service[customer] += in_turns(real_cost, both_weights[customer])
        served.add(customer)
        most_running = [
            max(most, sum(pick.customer == customer for pick, _ in running))
            for customer, most in enumerate(most_running)
        ]
        if len(served) == 2:
            apart.append(service[0] - service[1])
        while len(running) > min(end % 8, running_max - 1):
            line.end(*running.pop(end % len(running)))

    bound = sum(
        (most + 1) * in_turns(cost_max, weight)
        for most, weight in zip(most_running, both_weights, strict=True)
    )
    rounding = 4 * len(apart)  # estimates, charges and corrections are whole numbers
    assert max(apart, default=0) - min(apart, default=0) <= bound + rounding


@pytest.mark.parametrize("mode", FAIR_MODES)
@given(data=st.data())
def test_2_a_document_that_waited_too_long_as_the_oldest_is_claimed_within_its_bound(
    mode: Mode, data: st.DataObject
) -> None:
    setup = data.draw(setups(mode, Costs.EQUAL))
    desk = Desk(setup)
    run = Run(setup, desk)
    deadlines: dict[int, int] = {}  # order -> the number of the claim by which it must be taken

    for operation in data.draw(stories()):
        for single in singly(operation):
            for claimed in run.do(single):
                deadlines.pop(claimed.order or 0, None)
            if single[0] == "claim":
                states = desk.engine.customers.values()
                held = {s.head().order for s in states if s.held}
                heads = [(h.since, h.order) for s in states if (h := s.head()).order]
                patient = {
                    order: 1 + sum(head < (since, order) for head in heads)
                    for since, order in heads
                    if order not in held and run.now - since > setup.patience_us
                }
                number = desk.engine.number
                deadlines = {
                    order: deadlines.get(order, number + 10 * place)
                    for order, place in patient.items()
                }
                assert [order for order, last in deadlines.items() if last <= number] == []


def singly(operation: Operation) -> Iterator[Operation]:
    """Replace a claim of many by claims of one."""
    if operation[0] == "claim":
        yield from [("claim", 1, operation[2])] * operation[1]
    else:
        yield operation


def held(desk: Desk, customer: int) -> bool:
    """Return whether a customer is paused or at its limit, counted from the documents."""
    state = desk.engine.customers.get(customer, CustomerState(customer))
    running = sum(p.customer == customer and p.state == "running" for p in desk.papers.values())
    return state.paused or (state.limit is not None and running >= state.limit)


@pytest.mark.parametrize("mode", Mode)
@given(data=st.data())
def test_3_a_claim_comes_back_short_only_if_every_waiting_document_is_held(
    mode: Mode, data: st.DataObject
) -> None:
    setup = data.draw(setups(mode, Costs.KNOWN))
    desk = Desk(setup)
    run = Run(setup, desk)

    for operation in data.draw(stories()):
        claimed = run.do(operation)
        if operation[0] == "claim" and len(claimed) < operation[1]:
            waiting = {p.customer for p in desk.papers.values() if p.state == "waiting"}
            assert [customer for customer in waiting if not held(desk, customer)] == []


@pytest.mark.parametrize("mode", Mode)
@given(data=st.data())
def test_4_no_claim_takes_a_customer_beyond_its_limit(mode: Mode, data: st.DataObject) -> None:
    setup = data.draw(setups(mode, Costs.EQUAL))
    desk = Desk(setup)
    run = Run(setup, desk)
    always = [("set", customer, 1_000, 1 + customer, False) for customer in range(5)]
    others = [operation for operation in data.draw(stories()) if operation[0] != "set"]

    for operation in always + others:
        run.do(operation)
        running = Counter(p.customer for p in desk.papers.values() if p.state == "running")
        assert [c for c, documents in running.items() if documents > 1 + c] == []


def test_4_a_customer_at_its_limit_costs_other_claims_nothing() -> None:
    def reads_of_a_claim(customers_at_their_limit: int) -> Counter[str]:
        desk = ReloadingDesk(Setup(mode=Mode.EQUAL, costs=Costs.KNOWN))
        for customer in range(100, 100 + customers_at_their_limit):
            desk.set(customer, 0, 1_000, 1, False)
            desk.submit(customer, 0, [None] * 3)
        desk.claim(0, customers_at_their_limit, 10**15)
        for customer in range(20):
            desk.submit(customer, PATIENCE_US, [None] * 3)
        desk.claim(PATIENCE_US, 1, 10**15)
        desk.engine.since_patience[DEFAULT_KIND] = 9  # the next claim is for the longest waiting
        desk.source.reads.clear()
        assert len(desk.claim(3 * PATIENCE_US, 10, 10**15)) == 10
        return desk.source.reads

    assert reads_of_a_claim(300) == reads_of_a_claim(0)


@given(data=st.data())
def test_6_priorities_and_counts_are_the_same_in_every_mode(data: st.DataObject) -> None:
    setup = data.draw(setups(Mode.LEVELS, Costs.EQUAL))
    runs = [
        Run(one, Desk(one), ReloadingDesk(one))
        for one in (replace(setup, mode=mode) for mode in Mode)
    ]

    for operation in data.draw(stories()):
        for run in runs:
            run.do(operation)

    given_out = [
        [(paper.count, paper.priority) for paper in desk.papers.values()]
        for run in runs
        for desk in run.desks
    ]
    assert all(one == given_out[0] for one in given_out)


@given(data=st.data())
def test_6_in_mode_levels_the_order_is_by_priority_then_order_of_submission(
    data: st.DataObject,
) -> None:
    desk = Desk(data.draw(setups(Mode.LEVELS, Costs.EQUAL)))
    run = Run(desk.setup, desk)
    others = [operation for operation in data.draw(stories()) if operation[0] != "set"]

    for operation in others:
        claimed = [(document.priority, document.order or 0) for document in run.do(operation)]
        if operation[0] == "claim":
            waiting = [(p.priority, p.order) for p in desk.papers.values() if p.state == "waiting"]
            assert (claimed + sorted(waiting))[: len(claimed)] == sorted(claimed + waiting)[
                : len(claimed)
            ]


def claim_reads(customers_waiting: int, documents_each: int) -> Counter[str]:
    """Return what a claim of ten reads, with one turn for the longest waiting."""
    desk = ReloadingDesk(Setup(mode=Mode.EQUAL, costs=Costs.KNOWN))
    for customer in range(customers_waiting):
        desk.submit(customer, 0, [None] * documents_each)
    desk.claim(0, 5, 10**15)
    desk.source.reads.clear()
    desk.claim(PATIENCE_US + 1, 10, 10**15)
    return desk.source.reads


def test_7_a_claim_reads_as_much_among_many_customers_as_among_few() -> None:
    few, many = claim_reads(30, 3), claim_reads(3_000, 3)

    assert many == few
    assert many.total() <= 60


def test_7_a_claim_reads_as_much_of_a_long_backlog_as_of_a_short_one() -> None:
    assert claim_reads(30, 300) == claim_reads(30, 3)


def calls_of_100_claims(mode: Mode, customers_waiting: int, documents_each: int) -> int:
    """Return how many functions they call, those of the heaps included."""
    line = Line(mode=mode, costs=Costs.KNOWN)
    for customer in range(customers_waiting):
        line.submit(customer, documents_each)
    line.serve(50)
    line.now += PATIENCE_US + 1
    calls = 0

    def count(frame: FrameType, what: str, argument: object) -> None:
        nonlocal calls
        calls += what in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        line.serve(100)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("mode", Mode)
def test_7_a_claim_in_memory_makes_as_many_calls_among_many_as_among_few(mode: Mode) -> None:
    few = calls_of_100_claims(mode, 50, 10)

    assert calls_of_100_claims(mode, 5_000, 10) <= 1.2 * few
    assert calls_of_100_claims(mode, 50, 1_000) <= 1.2 * few


# ── Mistakes that other systems made ─────────────────────────────────────────────────────────────


class Office:
    """A desk for cases with one level and long leases."""

    def __init__(self, kind: type[Desk]) -> None:
        self.kind = kind
        self.desk = kind(Setup(mode=Mode.EQUAL))
        self.now = 0

    def opened_with(self, **changes: Any) -> "Office":
        self.desk = self.kind(replace(self.desk.setup, **changes))
        return self

    def submit(self, customer: int, n: int = 1, cost: int | None = None) -> list[Paper]:
        return self.desk.submit(customer, self.now, [cost] * n)

    def set(
        self, customer: int, *, weight: int = 1_000, limit: int | None = None, paused: bool = False
    ) -> None:
        self.desk.set(customer, self.now, weight, limit, paused)

    def claim(self, n: int = 1) -> list[Paper]:
        return [self.desk.by_order[p.order] for p in self.desk.claim(self.now, n, 10**15)]

    def serve(self, n: int) -> list[int]:
        """Return the customers of the next documents, claimed one by one and completed at once."""
        served = []
        for _ in range(n):
            (paper,) = self.claim()
            self.finish(paper)
            served.append(paper.customer)
        return served

    def finish(self, paper: Paper, real_cost: int = COST_ONE) -> None:
        self.desk.finish(paper, self.now, real_cost)

    @property
    def clock(self) -> int:
        return self.desk.engine.bands[1].clock

    def virtual_time(self, customer: int) -> int:
        loaded = self.desk.engine.customers.get(customer)
        return (loaded or self.desk.source.customer_state(customer)).flows[1].virtual_time


@pytest.fixture(params=DESKS)
def office(request: pytest.FixtureRequest) -> Office:
    return Office(request.param)


def test_a_drained_flow_above_its_clock_is_remembered(office: Office) -> None:
    office.submit(1)
    office.submit(2, 3)
    assert office.serve(1) == [1]  # 1 has had a whole document, the clock moved by half of one
    office.claim(0)  # folds the outcome: nothing of 1 waits or runs
    office.desk.forget()

    office.submit(1, 2)

    assert office.serve(4) == [2, 2, 1, 2]  # starting at the clock, 1 would be second


def test_a_drained_flow_at_its_clock_is_forgotten(office: Office) -> None:
    office.submit(1)
    assert office.serve(1) == [1]  # alone: the clock moved as far as the flow

    office.claim(0)
    office.desk.forget()

    source = office.desk.source
    assert not (source.rows if isinstance(source, Stored) else office.desk.engine.customers)


def test_forgetting_a_customer_does_not_disturb_the_turns_for_the_longest_waiting(
    office: Office,
) -> None:
    office.submit(1)
    office.serve(1)
    office.claim(0)
    office.desk.forget()

    office.submit(2, 20)

    assert office.serve(20) == [2] * 20


def test_with_learned_costs_forgetting_changes_nothing_although_the_clock_goes_back(
    office: Office,
) -> None:
    # The flow of 1 is idle and at its clock. Then the documents of 2 turn out to cost little, the
    # clock goes back below that flow, and the service of 1 beyond the clock counts again.
    office.opened_with(costs=Costs.LEARNED)
    expensive = office.submit(2, 9)[:2]
    office.submit(1)
    (of_1,) = (paper for paper in office.claim(2) if paper.customer == 1)
    office.finish(of_1)
    office.claim()
    office.desk.forget()

    for paper in expensive:
        office.finish(paper, real_cost=100_000)
    office.submit(1, 3)

    assert [paper.customer for paper in office.claim(5)] == [2] * 5  # from 0.2 to 0.7; 1 is at 1


def test_a_customer_at_its_limit_neither_blocks_nor_freezes_the_order(office: Office) -> None:
    office.set(1, limit=1)
    office.submit(1, 100)
    office.submit(2, 30)
    office.submit(3, 30)

    (limited,) = office.claim()
    around_it = office.serve(20)
    office.finish(limited)
    afterwards = office.serve(6)

    assert limited.customer == 1
    assert (around_it.count(2), around_it.count(3)) == (10, 10)
    assert sorted(afterwards) == [1, 1, 2, 2, 3, 3]


def test_a_claim_of_many_advances_the_clock_one_by_one(office: Office) -> None:
    single = Office(office.kind)
    for one in (office, single):
        for customer in range(7):
            one.submit(customer, 3 + customer)

    at_once = [paper.number for paper in office.claim(20)]
    one_by_one = [single.claim()[0].number for _ in range(20)]

    assert at_once == one_by_one
    assert office.clock == single.clock > 2 * COST_ONE


def test_cancelling_99_percent_of_a_backlog_leaves_nothing_behind(office: Office) -> None:
    papers = office.submit(1, 2_000)
    first = office.serve(10)
    for paper in papers[12:1_990]:
        office.desk.cancel(paper, office.now)
    for customer in range(2, 7):
        office.submit(customer)

    served = office.serve(17)

    assert first == [1] * 10
    assert set(served[:6]) == {1, 2, 3, 4, 5, 6}  # all customers at once, also 1
    assert served[6:] == [1] * 11
    assert office.claim() == []


def test_cancelling_the_document_that_is_next_makes_the_following_one_next(office: Office) -> None:
    first, second, third = office.submit(1, 3)
    office.claim(0)

    office.desk.cancel(first, office.now)
    office.desk.cancel(third, office.now)

    assert office.claim(3) == [second]


def test_a_cancel_does_not_hide_a_document_whose_lease_expired_before_the_claim(
    office: Office,
) -> None:
    first, second = office.submit(1, 2)
    office.desk.claim(0, 1, 10**15)
    office.desk.claim(0, 1, SECOND)
    office.desk.release(first, office.now)
    (third,) = office.submit(1)
    (of_another,) = office.submit(2)
    office.desk.cancel(first, office.now)

    office.now += 2 * SECOND  # the lease of the second has expired

    assert sorted(paper.number for paper in office.claim(9)) == [
        second.number,
        third.number,
        of_another.number,
    ]


@pytest.mark.parametrize("cancelled_too", [False, True])
def test_a_cancel_does_not_hide_what_arrived_while_it_looked(cancelled_too: bool) -> None:
    backlog = Backlog()
    turns = Turns(backlog)
    told = [EventBatch(0, (ArrivalEvent(1, 1, order, 1),)) for order in (5, 6, 7)]
    for order in (5, 6, 7):
        backlog.add(1, 1, order)
    if cancelled_too:  # by a process that has seen all of it
        backlog.discard(1, 1, 6)
        told.append(EventBatch(0, (CancelEvent(1, 1, 6, 5),)))
    backlog.discard(1, 1, 5)
    told.append(EventBatch(0, (CancelEvent(1, 1, 5, None),)))

    turns.fold(0, events=told)

    picks = [turns.pick(0), turns.pick(0), turns.pick(0)]
    orders = [pick.order for pick in picks if pick is not None]
    assert orders == ([7] if cancelled_too else [6, 7])


def test_a_weight_changed_on_a_backlog_counts_from_the_next_document(office: Office) -> None:
    office.submit(1, 100)
    office.submit(2, 100)

    before = office.serve(20)
    office.set(1, weight=3_000)
    after = office.serve(40)

    assert (before.count(1), before.count(2)) == (10, 10)
    assert (after.count(1), after.count(2)) == (30, 10)


def test_a_weight_changed_while_a_document_runs_is_not_what_its_release_gives_back(
    office: Office,
) -> None:
    office.submit(1, 2)
    office.submit(2, 2)
    (paper,) = office.claim()
    office.set(1, weight=100_000)
    office.desk.release(paper, office.now)
    office.claim(0)

    assert office.virtual_time(1) == 0


def test_a_restart_keeps_the_clocks() -> None:
    office = Office(ReloadingDesk)
    office.submit(1, 200)
    office.serve(50)

    office.submit(2, 200)  # the engine of the next claim has not seen this

    served = office.serve(20)
    assert (served.count(1), served.count(2)) == (10, 10)


def test_one_customers_backlog_with_many_claimers_never_looks_empty(office: Office) -> None:
    office.submit(1, 300)
    claimed = 0

    for n in (1, 3, 10, 1, 50, 7, 100, 28, 99):
        office.now += SECOND
        claimed += len(office.claim(n))
    last = office.claim(5)

    assert claimed == 299
    assert [paper.number for paper in last] == [300]


def test_with_real_costs_below_the_estimate_newcomers_do_not_starve(office: Office) -> None:
    office.opened_with(costs=Costs.LEARNED)
    office.submit(1, 2_000)
    for paper in office.claim(50):  # each is charged 1
        office.finish(paper, real_cost=10_000)

    office.submit(2, 5)

    served = []
    for _ in range(10):
        (paper,) = office.claim()
        office.finish(paper, real_cost=10_000)
        served.append(paper.customer)
    assert served.count(2) == 5


def test_with_real_costs_above_the_estimate_the_expensive_customer_pays(office: Office) -> None:
    office.opened_with(costs=Costs.LEARNED)
    for customer in (1, 2):
        office.submit(customer, 500)
    spent = Counter[int]()

    for _ in range(220):
        (paper,) = office.claim()
        real_cost = 10 * COST_ONE if paper.customer == 1 else COST_ONE
        spent[paper.customer] += real_cost
        office.finish(paper, real_cost)

    assert abs(spent[1] - spent[2]) <= 11 * COST_ONE


def test_a_cost_is_learned_from_the_last_20_finished_documents(office: Office) -> None:
    office.opened_with(costs=Costs.LEARNED)
    office.submit(1, 50)
    estimates = []

    for real_cost in [7 * COST_ONE] * 20 + [COST_ONE] * 21:
        (paper,) = office.claim()
        assert paper.pick is not None
        estimates.append(paper.pick.cost)
        office.finish(paper, real_cost)

    assert estimates[:2] == [COST_ONE, 7 * COST_ONE]
    assert estimates[20:22] == [7 * COST_ONE, 6_700_000]
    assert estimates[39:] == [1_300_000, COST_ONE]


@pytest.mark.parametrize("hold", [{"paused": True}, {"limit": 1}], ids=["pause", "limit"])
def test_nobody_gains_credit_from_a_pause_or_a_limit(office: Office, hold: dict[str, Any]) -> None:
    for customer in (1, 2, 3):
        office.submit(customer, 100)
    (running,) = office.claim()
    office.set(1, **hold)
    while_held = office.serve(50)

    office.set(1)
    office.finish(running)
    afterwards = office.serve(30)

    assert running.customer == 1
    assert while_held.count(1) == 0
    assert afterwards.count(1) == 10


def test_a_submitter_frozen_before_its_commit_delays_nobody_and_loses_nothing(
    office: Office,
) -> None:
    office.submit(1)
    frozen, office.desk.events = office.desk.events, []  # numbered, but not committed yet
    office.submit(1, 2)
    office.submit(2, 2)

    meanwhile = office.claim(2)
    office.desk.events = frozen + office.desk.events
    afterwards = office.claim(3)

    assert sorted(paper.order for paper in meanwhile) == [2, 4]
    assert [paper.order for paper in afterwards if paper.customer == 1] == [1, 3]
    assert [paper.order for paper in afterwards if paper.customer == 2] == [5]


@pytest.mark.parametrize("mode", FAIR_MODES)
@given(story=stories())
def test_clocks_at_2_to_the_60_serve_as_clocks_at_0(mode: Mode, story: list[Operation]) -> None:
    setup = Setup(mode=mode, costs=Costs.KNOWN)
    desks = [Desk(setup), *(desk(setup) for desk in DESKS)]
    numbers: list[list[int]] = [[] for _ in desks]
    for desk in desks[1:]:
        for level in range(1, LEVELS + 1):
            desk.engine.bands[level].clock = 2**60

    for desk, claimed in zip(desks, numbers, strict=True):
        now = 0
        for operation in story:
            match operation:
                case "wait", us:
                    now += us
                case "submit", customer, costs, _:
                    desk.submit(customer, now, costs)
                case "set", customer, weight, limit, paused:
                    desk.set(customer, now, weight, limit, paused)
                case "claim", n, lease_us:
                    claimed.extend(pick.order for pick in desk.claim(now, n, lease_us))

    assert all(claimed == numbers[0] for claimed in numbers)


# ── The smaller promises ─────────────────────────────────────────────────────────────────────────


def test_a_turn_for_the_longest_waiting_charges_nothing_and_moves_no_clock(office: Office) -> None:
    office.submit(1, 20)
    office.submit(2, 20)
    office.serve(9)
    office.now += PATIENCE_US + 1
    clock = office.clock

    (paper,) = office.claim()

    assert paper.pick == Pick(1, 1, 6, cost=None, weight=None, charge=0)
    assert office.clock == clock


def test_the_longest_waiting_of_a_customer_is_found_in_whichever_level_it_came(
    office: Office,
) -> None:
    office.opened_with(mode=Mode.FAIR, bounds=tuple(range(0, -8, -1)))
    first, second = (*office.submit(1), *office.submit(1))
    office.now += office.desk.setup.reset_interval_us + 1
    third = office.submit(1)[0]
    assert [paper.level for paper in (first, second, third)] == [1, 2, 1]
    assert office.claim() == [first]
    office.now += PATIENCE_US + 1
    office.desk.engine.since_patience[DEFAULT_KIND] = 9

    assert office.claim(2) == [second, third]


@pytest.mark.parametrize("waited_us, charged", [(PATIENCE_US, True), (PATIENCE_US + 1, False)])
def test_exactly_the_patience_is_not_more_than_the_patience(waited_us: int, charged: bool) -> None:
    line = Line()
    line.submit(1, 20)
    line.submit(2, 20)
    line.serve(9)

    line.now += waited_us

    assert (line.pick().cost is not None) == charged


def test_only_claims_that_get_a_document_are_numbered(office: Office) -> None:
    office.submit(1, 3)

    for _ in range(5):
        office.claim(2)

    assert office.desk.engine.number == 3


def test_a_release_gives_the_charge_back_and_leaves_the_clock(office: Office) -> None:
    office.submit(1, 2)
    office.submit(2, 2)
    (paper,) = office.claim()
    clock = office.clock

    office.desk.release(paper, office.now)
    (again,) = office.claim()

    assert again is paper
    assert paper.attempts == 1
    assert clock == COST_ONE // 2
    assert office.virtual_time(1) == COST_ONE


def test_a_document_that_costs_nothing_still_takes_its_turn(office: Office) -> None:
    office.opened_with(costs=Costs.KNOWN)
    office.submit(1, 3, cost=0)
    office.submit(2, 3, cost=0)

    assert office.serve(6) == [1, 2, 1, 2, 1, 2]


def test_several_documents_that_end_together_free_their_places_together() -> None:
    line = Line()
    line.set(1, limit=2)
    line.submit(1, 4)
    line.pick()
    line.pick()
    held_at_its_limit = line.turns.pick(0)

    line.turns.apply(EndEvent(1, 1, 2), 0)

    assert held_at_its_limit is None
    assert [line.pick().order, line.pick().order, line.turns.pick(0)] == [3, 4, None]


def test_documents_that_run_already_count_for_the_limit_of_flows_that_are_built_anew() -> None:
    line = Line()
    line.set(1, limit=2)
    line.turns.apply(RunningEvent(1, 1, 1), 0)
    line.submit(1, 3)

    assert [line.pick().order, line.turns.pick(0)] == [1, None]


def test_a_customer_whose_documents_are_all_gone_gives_its_share_of_the_level_up() -> None:
    line = Line()
    line.submit(1, 5)
    line.submit(2, 5)
    line.pick()

    line.turns.apply(PurgeEvent(1), 0)

    assert line.turns.bands[1].weight == 1_000
    assert line.serve(5) == [2] * 5
    assert line.turns.pick(0) is None


def size_of(turns: Turns) -> int:
    """Return the size of the largest container of an engine."""
    return max(len(value) for value in vars(turns).values() if hasattr(value, "__len__"))


def test_an_engine_does_not_grow_with_the_documents_that_were_served() -> None:
    line = Line()
    line.submit(1)
    line.submit(2, 3)

    for _ in range(5_000):
        line.submit(1)
        line.submit(2)
        line.serve(2)

    assert size_of(line.turns) < 2_500


def test_an_engine_does_not_grow_with_pauses_and_a_clock_that_goes_back() -> None:
    line = Line()
    line.submit(1)
    line.submit(2, 5_001)

    for order in range(2, 5_002):
        line.now -= 1
        following = line.backlog.discard(2, 1, order)
        line.turns.apply(CancelEvent(2, 1, order, following), line.now)
        line.set(2, paused=True)
        line.set(2)

    assert size_of(line.turns) < 2_500


def test_an_engine_that_forgets_does_not_grow_with_the_customers_that_were_served() -> None:
    line = Line()

    for customer in range(5_000):
        line.submit(customer)
        line.serve(1)
        line.turns.forget()

    assert size_of(line.turns) < 2_500


@pytest.mark.parametrize("cost", [-1, -0.000001, float("nan"), float("inf"), 1_000_000_001])
def test_a_cost_that_cannot_be_charged_is_refused(cost: float) -> None:
    with pytest.raises(ValueError, match="cost is"):
        cost_in_millionths(cost)


@pytest.mark.parametrize("weight", [0, -1, 0.009, 100.1, float("nan"), float("inf")])
def test_a_weight_that_cannot_divide_turns_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight is"):
        weight_in_thousandths(weight)


def test_costs_are_millionths_and_weights_are_thousandths() -> None:
    assert [cost_in_millionths(0), cost_in_millionths(1.5)] == [0, 1_500_000]
    assert [weight_in_thousandths(0.01), weight_in_thousandths(100)] == [10, 100_000]


# ── Kinds of work ────────────────────────────────────────────────────────────────────────────────


def test_a_patience_claim_restarts_the_count_of_every_kind_that_was_served() -> None:
    backlog = Backlog()
    turns = Turns(backlog, since_patience={0: 9, 1: 9, 2: 9})
    for order, kind in enumerate((0, 1, 2), 1):
        band = band_of(1, kind)
        backlog.add(7, band, order)
        turns.apply(ArrivalEvent(7, band, order, 1), 0)

    pick = turns.pick(PATIENCE_US + 1, kinds=(0, 1))

    assert pick == Pick(7, band_of(1, 0), 1, cost=None, weight=None, charge=0)
    assert turns.since_patience == {0: 0, 1: 0, 2: 9}


def test_a_worker_sees_only_documents_of_the_kinds_that_it_serves() -> None:
    backlog = Backlog()
    turns = Turns(backlog)
    backlog.add(1, band_of(1, 5), 1)
    turns.apply(ArrivalEvent(1, band_of(1, 5), 1, 1), 0)

    assert turns.pick(0, kinds=(0, 4)) is None
    assert turns.pick(0, kinds=(4, 5)) is not None


def test_of_two_kinds_that_have_had_no_turn_the_first_by_name_is_next() -> None:
    backlog = Backlog()
    turns = Turns(backlog, kind_names={0: "text", 1: "ocr"})
    for order, kind in enumerate((0, 1), 1):
        backlog.add(1, band_of(1, kind), order)
        turns.apply(ArrivalEvent(1, band_of(1, kind), order, 1), 0)

    picks = [turns.pick(0, kinds=(0, 1)) for _ in range(2)]

    assert [pick and pick.order for pick in picks] == [2, 1]


def test_a_patience_claim_goes_to_the_longest_waiting_of_all_kinds_that_are_served() -> None:
    backlog = Backlog()
    turns = Turns(backlog, since_patience={0: 9})
    for order, kind, since in ((1, 0, 20), (2, 1, 10), (3, 2, 0)):
        backlog.add(order, band_of(1, kind), order)
        turns.apply(ArrivalEvent(order, band_of(1, kind), order, 1), since)

    pick = turns.pick(PATIENCE_US + 21, kinds=(0, 1))

    assert pick is not None
    assert pick.order == 2


class StoredByKind(Stored):
    """Customers without a limit are loaded without flows."""

    def customer_state(self, customer: int) -> CustomerState:
        if customer in self.customers:
            return super().customer_state(customer)
        return CustomerState(customer, whole=False)


def stored_in_kinds(kinds: int, customers: int, limit: int | None = None) -> tuple[Stored, Turns]:
    """Return customers with documents in three levels of each kind, the oldest in the last, and an
    engine that has loaded none of them."""
    source = StoredByKind(Mode.FAIR)
    turns = Turns(source)
    order = 0
    for customer in range(customers):
        if limit is not None:
            turns.apply(SettingsEvent(customer, 1_000, limit, False), 0)
        for level in (3, 2, 1):
            for kind in range(kinds):
                order += 1
                band = band_of(level, kind)
                source.add(customer, band, order)
                turns.apply(ArrivalEvent(customer, band, order, 1), 0)
    source.write(turns)
    source.reads.clear()
    return source, Turns(source, bands=turns.bands, tick=turns.tick)


def test_a_claim_reads_only_flows_of_the_kinds_that_it_serves() -> None:
    source, turns = stored_in_kinds(kinds=4, customers=5)
    turns.since_patience[2] = 9

    assert turns.pick(PATIENCE_US + 1, kinds=(2,)) is not None
    picks = [turns.pick(PATIENCE_US + 1, kinds=(2,)) for _ in range(15)]

    assert [pick and kind_of(pick.band) for pick in picks] == [2] * 14 + [None]
    assert {read for read in source.reads if "kind" in read} == {"flows of kind 2"}


def test_of_a_customer_with_a_limit_a_claim_reads_the_flows_of_every_kind() -> None:
    _, turns = stored_in_kinds(kinds=3, customers=1, limit=2)

    picks = [turns.pick(0, kinds=(1,)) for _ in range(3)]

    assert [pick and pick.band for pick in picks] == [band_of(1, 1), band_of(2, 1), None]
    assert not any(flow.active for flow in turns.customers[0].flows.values())


def test_flows_of_a_kind_that_are_loaded_later_take_part_in_its_turns() -> None:
    _, turns = stored_in_kinds(kinds=2, customers=2)

    first = [turns.pick(0, kinds=(0,)) for _ in range(3)]
    both = [turns.pick(0, kinds=(0, 1)) for _ in range(9)]

    assert [pick and pick.band for pick in first] == [1, 1, 2]
    assert Counter(pick and pick.band for pick in both) == {
        **dict.fromkeys((11, 12, 13), 2), 2: 1, 3: 2
    }  # fmt: skip


def test_a_band_is_read_when_it_is_first_used() -> None:
    read: list[int] = []

    def read_band(number: int) -> Band:
        read.append(number)
        return Band(clock=100 * number)

    backlog = Backlog()
    turns = Turns(backlog, bands={1: Band(clock=7)}, read_band=read_band)
    for order, band in enumerate((1, 12, 12), 1):
        backlog.add(order, band, order)
        turns.apply(ArrivalEvent(order, band, order, 1), 0)

    assert read == [12]
    assert [flow.virtual_time for s in turns.customers.values() for flow in s.flows.values()] == [
        7,
        1_200,
        1_200,
    ]


def test_costs_are_learned_by_kind() -> None:
    backlog = Backlog()
    turns = Turns(backlog, costs=Costs.LEARNED)
    for order, kind in enumerate((0, 1, 1), 1):
        backlog.add(1, band_of(1, kind), order)
        turns.apply(ArrivalEvent(1, band_of(1, kind), order, 1), 0)
    first = turns.pick(0, kinds=(1,))
    assert first is not None
    turns.apply(CompletionEvent(1, first.band, first.cost, first.weight, 5 * COST_ONE), 0)

    picks = [turns.pick(0, kinds=(kind,)) for kind in (0, 1)]

    assert [pick and pick.cost for pick in picks] == [COST_ONE, 5 * COST_ONE]


def test_a_dropped_engine_is_freed_without_a_garbage_collection() -> None:
    backlog = Backlog()
    backlog.add(1, 1, 1)
    turns = Turns(backlog)
    turns.apply(ArrivalEvent(1, 1, 1, 1), 0)
    assert turns.pick(0) is not None
    dropped = weakref.ref(turns)
    gc.disable()
    try:
        del turns
        assert dropped() is None
    finally:
        gc.enable()
