"""The simulator with failures, compared with a real store; and the orders to compare with."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn.clock import ManualClock
from fairturn.model import (
    Completed,
    CustomerSettings,
    Failed,
    Fence,
    NewDocument,
    Outcome,
    Settings,
)
from fairturn.priority import Rule
from fairturn.scheduling.flows import Costs, Mode
from fairturn.simulator.baselines import Line, Ring, aged, first_come
from fairturn.simulator.comparison import Discipline, order_of
from fairturn.simulator.measures import attempts_of
from fairturn.simulator.orders import Order, RealOrder
from fairturn.simulator.plan import Cancel, Loss, Plan
from fairturn.simulator.replay import Replayed, serve
from fairturn.simulator.scenario import Scenario, scenario_of
from fairturn.simulator.trace import Trace
from fairturn.stores.memory import MemoryStore

SECOND = 1_000_000
LONG_US = 24 * 3_600 * SECOND
ORDERS = [mode for mode in Discipline if not mode.startswith("ideal")]
REAL = [Mode.FAIR, Mode.EQUAL, Mode.LEVELS]


def trace_of(*rows: tuple[float, str, float], weights: dict[str, int] | None = None) -> Trace:
    """Return documents from (seconds, customer, seconds of work)."""
    trace = Trace()
    wanted = dict(weights or {})
    for n, (at_s, customer, cost_s) in enumerate(rows):
        if customer not in trace.names:
            trace.names.append(customer)
        trace.at.append(round(at_s * SECOND))
        trace.customer.append(trace.names.index(customer))
        trace.cost.append(round(cost_s * SECOND))
        if customer in wanted:
            trace.weight[n] = wanted.pop(customer)
    return trace


def scenario(trace: Trace, plan: Plan, costs: Costs = Costs.EQUAL) -> Scenario:
    made = scenario_of(trace, "test", workers=plan.workers)
    return Scenario(
        name=made.name,
        trace=trace,
        groups=made.groups,
        group_of=made.group_of,
        plan=plan,
        costs=costs,
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """A few customers, with cancels, failures, lost workers, limits and weights."""
    seconds = st.sampled_from([0, 0, 0, 1, 2, 5, 30, 130])
    steps = draw(
        st.lists(
            st.tuples(seconds, st.sampled_from("abcd"), st.sampled_from([0, 1, 2, 3, 7])),
            min_size=1,
            max_size=30,
        )
    )
    now, rows = 0, []
    for step, customer, cost in steps:
        now += step
        rows.append((now, customer, cost))
    trace = trace_of(*rows)
    documents = st.integers(0, len(trace) - 1)
    trace.weight = draw(st.dictionaries(documents, st.sampled_from([250, 3_000]), max_size=5))
    cancels = draw(st.dictionaries(documents, st.integers(0, 60), max_size=15))
    failures = draw(
        st.dictionaries(documents, st.lists(st.integers(1, 20), min_size=1, max_size=2), max_size=9)
    )
    losses = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), max_size=1))
    customers = st.integers(0, len(trace.names) - 1)
    return scenario(
        trace,
        Plan(
            workers=draw(st.integers(2, 4)),
            limits=draw(st.dictionaries(customers, st.integers(1, 2), max_size=2)),
            failures={n: tuple(d * SECOND for d in delays) for n, delays in failures.items()},
            cancels=tuple(Cancel(trace.at[n] + s * SECOND, n) for n, s in cancels.items()),
            losses=tuple(Loss(at * SECOND, 1, (at + more) * SECOND) for at, more in losses),
            lease_us=10 * SECOND,
        ),
        costs=draw(st.sampled_from(Costs)),
    )


def run(made: Scenario, order: Order | None = None) -> Replayed:
    order = order or order_of(Discipline.FAIR, made)
    return serve(made.trace, order, rule=Rule(), plan=made.plan)


class Driver:
    """The same scenario on a real store, through the contract only."""

    def __init__(self, made: Scenario, mode: Mode) -> None:
        self.trace, self.plan, self.made = made.trace, made.plan, made
        self.clock = ManualClock()
        settings = Settings(mode=mode, costs=made.costs, attempts_max=99)
        self.store = MemoryStore(settings=settings, clock=self.clock)
        self.ids: list[str] = []
        self.free = self.plan.workers
        self.running: dict[int, tuple[int, Fence]] = {}  # document -> when it ends, its fence
        self.failed: Counter[int] = Counter()
        self.log: list[tuple[int, int]] = []  # (when, document) of each claim
        self.moments = {*self.trace.at, *(c.at for c in self.plan.cancels)}
        self.changes = self.plan.changes()
        self.moments |= {at for at, _ in self.changes}

    def run(self) -> list[tuple[int, int]]:
        for customer, limit in self.plan.limits.items():
            self.store.adjust(self.trace.names[customer], CustomerSettings(limit=limit))
        while self.moments:
            now = min(self.moments)
            self.moments.remove(now)
            self.clock.advance((now - self.clock.now()) / SECOND)
            self.step(now)
        return self.log

    def step(self, now: int) -> None:
        ending = sorted(n for n, (ends_at, _) in self.running.items() if ends_at == now)
        self.store.finish([self.outcome(n) for n in ending])
        for n in range(len(self.trace)):
            if self.trace.at[n] == now and n == len(self.ids):
                self.submit(n)
        for at, n in sorted(self.plan.cancels):
            if at == now:
                self.store.cancel([self.ids[n]])
        while self.changes and self.changes[0][0] == now:
            self.change(self.changes.pop(0)[1], now)
        claims = self.store.claim(self.free, worker="w", lease_us=LONG_US).claims
        self.free -= len(claims)
        for claim in claims:
            n = self.ids.index(claim.document.id)
            self.log.append((now, n))
            self.running[n] = (now + self.trace.cost[n], claim.fence)
            self.moments.add(now + self.trace.cost[n])

    def submit(self, n: int) -> None:
        name = self.trace.names[self.trace.customer[n]]
        weight = self.trace.weight.get(n)
        if weight is not None:
            limit = self.plan.limits.get(self.trace.customer[n])
            self.store.adjust(name, CustomerSettings(weight=weight / 1000, limit=limit))
        new = NewDocument(customer=name, body="null", cost=self.trace.cost[n])
        self.ids.append(self.store.submit([new])[0].id)

    def outcome(self, n: int) -> Outcome:
        self.free += 1
        _, fence = self.running.pop(n)
        delays = self.plan.failures.get(n, ())
        if self.failed[n] == len(delays):
            return Completed(fence, real_cost=self.trace.cost[n])
        delay = delays[self.failed[n]]
        self.failed[n] += 1
        self.moments.add(self.clock.now() + delay)
        return Failed(fence, "no", retry_in_us=delay)

    def change(self, change: int, now: int) -> None:
        lost = sorted(self.running)[: max(0, -change)]
        self.free += change + len(lost)
        for n in lost:
            self.store.renew([self.running.pop(n)[1]], lease_us=self.plan.lease_us)
            self.moments.add(now + self.plan.lease_us)


@pytest.mark.parametrize("mode", REAL)
@given(made=scenarios())
def test_the_simulator_serves_what_goes_wrong_in_the_order_of_a_real_store(
    mode: Mode, made: Scenario
) -> None:
    replayed = run(made, RealOrder(mode=mode, costs=made.costs))

    claims = sorted((a.started_at, a.document) for a in attempts_of(made, replayed))
    assert claims == sorted(Driver(made, mode).run())


@pytest.mark.parametrize("mode", ORDERS)
@given(made=scenarios())
def test_every_order_serves_all_keeps_limits_and_never_has_too_many_at_once(
    mode: Discipline, made: Scenario
) -> None:
    replayed = run(made, order_of(mode, made))

    attempts = list(attempts_of(made, replayed))
    for n in range(len(made.trace)):
        of_document = [a for a in attempts if a.document == n]
        assert (n in replayed.cancelled) or of_document
        lost = sum(a.ended_at - a.started_at < made.trace.cost[n] for a in of_document)
        failures = made.plan.failures.get(n, ())
        assert n in replayed.cancelled or len(of_document) - lost <= len(failures) + 1
    moments = sorted({a.started_at for a in attempts})
    workers = made.plan.workers
    changes = made.plan.changes()
    for now in moments:
        busy = [a for a in attempts if a.started_at <= now < a.ended_at]
        assert len(busy) <= workers + sum(change for at, change in changes if at <= now)
        for customer, limit in made.plan.limits.items():
            of_customer = [a for a in busy if made.trace.customer[a.document] == customer]
            assert len(of_customer) <= limit


@pytest.mark.parametrize("mode", ORDERS)
def test_the_same_scenario_gives_the_same_run(mode: Discipline) -> None:
    made = scenario(trace_of(*((n % 7, "abc"[n % 3], n % 5) for n in [0] * 50)), Plan(workers=2))

    first, second = (run(made, order_of(mode, made)) for _ in range(2))

    assert first.started_at == second.started_at


# ── What goes wrong ──────────────────────────────────────────────────────────────────────────────


def test_a_failed_attempt_is_tried_again_after_its_delay() -> None:
    made = scenario(
        trace_of((0, "a", 2), (1, "b", 2)),
        Plan(workers=1, failures={0: (5 * SECOND, 10 * SECOND)}),
    )

    replayed = run(made)

    begun = [a.started_at / SECOND for a in attempts_of(made, replayed) if a.document == 0]
    assert begun == [0, 7, 19]
    assert [at / SECOND for at in replayed.finished_at] == [21, 4]


def test_a_document_of_a_lost_worker_waits_again_when_its_lease_has_expired() -> None:
    made = scenario(
        trace_of((0, "a", 10), (0, "b", 10)),
        Plan(workers=2, losses=(Loss(4 * SECOND, 1, 100 * SECOND),), lease_us=30 * SECOND),
    )

    replayed = run(made)

    assert [at / SECOND for at in replayed.started_at] == [34, 0]
    assert [at / SECOND for at in replayed.finished_at] == [44, 10]
    (lost,) = replayed.earlier
    assert (lost.document, lost.started_at, lost.ended_at) == (0, 0, 4 * SECOND)


def test_workers_that_come_back_claim_at_once() -> None:
    made = scenario(
        trace_of(*[(0, "a", 10)] * 6),
        Plan(workers=3, losses=(Loss(0, 2, 15 * SECOND),), lease_us=SECOND),
    )

    replayed = run(made)

    assert sorted(at / SECOND for at in replayed.started_at) == [0, 10, 15, 15, 20, 25]


def test_a_cancel_ends_what_waits_and_leaves_what_runs() -> None:
    made = scenario(
        trace_of(*[(0, "a", 10)] * 4),
        Plan(workers=1, cancels=tuple(Cancel(5 * SECOND, n) for n in (0, 1, 3))),
    )

    replayed = run(made)

    assert replayed.cancelled == {1: 5 * SECOND, 3: 5 * SECOND}
    assert [replayed.started_at[n] / SECOND for n in (0, 2)] == [0, 10]


@pytest.mark.parametrize(
    ("plan", "ended_s"),
    [
        (Plan(failures={0: (10 * SECOND,)}, cancels=(Cancel(SECOND, 0),)), 2),
        (
            Plan(
                workers=2,
                losses=(Loss(SECOND, 1, 50 * SECOND),),
                cancels=(Cancel(5 * SECOND, 0),),
                lease_us=30 * SECOND,
            ),
            31,
        ),
    ],
    ids=["it fails", "its worker is lost"],
)
def test_what_is_cancelled_while_it_runs_is_not_tried_again(plan: Plan, ended_s: int) -> None:
    made = scenario(trace_of((0, "a", 2)), plan)

    replayed = run(made)

    assert replayed.cancelled == {0: ended_s * SECOND}
    assert len(list(attempts_of(made, replayed))) == 1


def test_a_document_that_waits_for_its_retry_can_be_cancelled() -> None:
    made = scenario(
        trace_of((0, "a", 1)),
        Plan(failures={0: (10 * SECOND,)}, cancels=(Cancel(5 * SECOND, 0),)),
    )

    assert run(made).cancelled == {0: 5 * SECOND}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Plan(workers=0), "workers is 0"),
        (lambda: Plan(limits={1: 0}), "a limit is 0"),
        (lambda: Plan(workers=2, losses=(Loss(1, 1, 9), Loss(2, 1, 8))), "all 2 workers are lost"),
        (
            lambda: run(scenario(trace_of((5, "a", 1)), Plan(cancels=(Cancel(4, 0),)))),
            "document 0 is cancelled at 4, before its submission",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


# ── The orders to compare with ───────────────────────────────────────────────────────────────────


def served(order: Order, *rows: tuple[float, str, float], plan: Plan | None = None) -> str:
    """Return the customers in the order in which their documents start."""
    made = scenario(trace_of(*rows), plan or Plan())
    replayed = run(made, order)
    by_start = sorted(range(len(rows)), key=lambda n: replayed.started_at[n])
    return "".join(rows[n][1] for n in by_start)


def test_first_come_first_served_looks_at_nothing_else() -> None:
    rows = [(0, "a", 1)] * 5 + [(0, "b", 1), (0, "c", 1)]

    assert served(Line(first_come), *rows) == "aaaaabc"


def test_round_robin_gives_each_customer_one_document_in_turn() -> None:
    rows = [(0, "a", 1)] * 4 + [(0, "b", 1)] * 2 + [(1, "c", 1)] * 2

    assert served(Ring(), *rows) == "abacbaca"


def test_ageing_serves_levels_first_until_somebody_has_waited_long_enough() -> None:
    # The 4th and 5th of a are in level 2. For two minutes new customers in level 1 overtake them.
    rows = [(0, "a", 10)] * 5 + [(at, f"n{at}", 10) for at in range(5, 200, 10)]

    order = served(Line(aged), *[(at, who, cost) for at, who, cost in rows])

    assert order.startswith("aaan5")
    assert order.index("n125") > [i for i, c in enumerate(order) if c == "a"][-1]
    assert order.index("n95") < [i for i, c in enumerate(order) if c == "a"][-1]


@pytest.mark.parametrize("order", [Line(first_come), Ring()], ids=["fifo", "round-robin"])
def test_a_limit_holds_a_customer_and_nobody_else(order: Order) -> None:
    rows = [(0, "a", 10)] * 4 + [(0, "b", 10)] * 2

    made = scenario(trace_of(*rows), Plan(workers=3, limits={0: 1}))
    replayed = run(made, order)

    assert [at / SECOND for at in replayed.started_at] == [0, 10, 20, 30, 0, 0]
