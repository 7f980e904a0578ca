"""The simulator with failures, compared with a real store; and the orders to compare with."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn.clock import ManualClock
from fairturn.model import (
    Claim,
    Completed,
    CustomerSettings,
    Document,
    Failed,
    Fence,
    KindPolicy,
    KindSettings,
    NewDocument,
    OutageReport,
    Outcome,
    Settings,
    State,
)
from fairturn.priority import Rule
from fairturn.scheduling.flows import Costs, Mode
from fairturn.simulator import measures
from fairturn.simulator.baselines import Line, Ring, aged, first_come
from fairturn.simulator.comparison import Discipline, order_of
from fairturn.simulator.measures import attempts_of
from fairturn.simulator.orders import Order, RealOrder
from fairturn.simulator.plan import Cancel, Loss, Outage, Plan
from fairturn.simulator.replay import Replayed, serve
from fairturn.simulator.scenario import Scenario, scenario_of
from fairturn.simulator.trace import Trace
from fairturn.stores.memory import MemoryStore

SECOND = 1_000_000
LONG_US = 24 * 3_600 * SECOND
ORDERS = [mode for mode in Discipline if not mode.startswith("ideal")]
KINDS = ("export", "ocr", "text")
REAL = [Mode.FAIR, Mode.EQUAL, Mode.LEVELS]


def trace_of(
    *rows: tuple[float, str, float],
    weights: dict[str, int] | None = None,
    kinds: Sequence[str] = (),
) -> Trace:
    """Return documents from (seconds, customer, seconds of work), with the kinds if given."""
    trace = Trace()
    trace.kinds = sorted(set(kinds))
    trace.kind.extend(trace.kinds.index(kind) for kind in kinds)
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
    made = scenario_of(trace, "test", workers=max(1, plan.workers))
    return Scenario(
        name=made.name,
        trace=trace,
        groups=made.groups,
        group_of=made.group_of,
        plan=plan,
        costs=costs,
    )


@st.composite
def scenarios(draw: st.DrawFn, *, of_kinds: bool = False) -> Scenario:
    """A few customers, with cancels, failures, lost workers, limits and weights; and with kinds,
    their own workers, their limits, and outages."""
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
    plan = Plan(
        workers=draw(st.integers(2, 4)),
        limits=draw(st.dictionaries(customers, st.integers(1, 2), max_size=2)),
        failures={n: tuple(d * SECOND for d in delays) for n, delays in failures.items()},
        cancels=tuple(Cancel(trace.at[n] + s * SECOND, n) for n, s in cancels.items()),
        losses=tuple(Loss(at * SECOND, 1, (at + more) * SECOND) for at, more in losses),
        lease_us=10 * SECOND,
    )
    if of_kinds:
        kinds = draw(st.lists(st.sampled_from(KINDS), min_size=len(trace), max_size=len(trace)))
        trace.kinds = sorted(set(kinds))
        trace.kind.extend(trace.kinds.index(kind) for kind in kinds)
        plan = replace(plan, **draw(plans_of_kinds(len(trace.kinds), plan.losses)))
    return scenario(trace, plan, costs=draw(st.sampled_from(Costs)))


@st.composite
def plans_of_kinds(draw: st.DrawFn, kinds: int, losses: Sequence[Loss]) -> dict[str, Any]:
    """The fields of a plan for a trace with this number of kinds."""
    kind, workers = st.integers(0, kinds - 1), st.integers(1, 2)
    outages = st.builds(
        lambda kinds, at_s, lasts_s, fails_after_s, retry_after_s: Outage(
            tuple(sorted(kinds)),
            at_s * SECOND,
            (at_s + lasts_s) * SECOND,
            fails_after_s * SECOND,
            retry_after_s * SECOND,
        ),
        st.sets(kind, min_size=1, max_size=2),
        st.integers(0, 20),
        st.sampled_from([1, 5, 40, 600]),
        st.sampled_from([0, 1, 3]),
        st.sampled_from([1, 2, 7]),
    )
    return {
        "workers_for": tuple(draw(st.lists(st.tuples(kind, workers), max_size=3))),
        "kind_limits": draw(st.dictionaries(kind, workers, max_size=1)),
        "outages": tuple(draw(st.lists(outages, max_size=2))),
        # Whether another document waits when an attempt reports an outage depends on whether the
        # queue has folded a lease that expires at the same moment. This leaves it no choice.
        "losses": tuple(Loss(at + 3_000, n, back_at) for at, n, back_at in losses),
        "lease_us": 10_007_000,
        "attempts_max": draw(st.sampled_from([3, 5])),
    }


def run(made: Scenario, order: Order | None = None) -> Replayed:
    order = order or order_of(Discipline.FAIR, made)
    return serve(made.trace, order, rule=Rule(), plan=made.plan)


class Attempt(NamedTuple):
    ends_at: int
    fence: Fence
    group: int
    outage: Outage | None


def service_of(outage: Outage) -> str:
    return "-".join(map(str, outage.kinds))


class Driver:
    """The same scenario on a real store, through the contract only."""

    def __init__(self, made: Scenario, mode: Mode) -> None:
        self.trace, self.plan, self.made = made.trace, made.plan, made
        self.clock = ManualClock()
        settings = Settings(
            mode=mode,
            costs=made.costs,
            attempts_max=made.plan.attempts_max,
            kinds=KindPolicy.OPEN,
        )
        self.store = MemoryStore(settings=settings, clock=self.clock)
        self.ids: list[str] = []
        names = made.trace.kind_names
        self.groups: list[list[str] | None] = [[names[k]] for k, _ in self.plan.workers_for]
        self.groups.append(None)
        self.free = [*(n for _, n in self.plan.workers_for), self.plan.workers]
        self.running: dict[int, Attempt] = {}
        self.failed: Counter[int] = Counter()
        self.log: list[tuple[int, int]] = []  # (when, document) of each claim
        self.moments = {*self.trace.at, *(c.at for c in self.plan.cancels)}
        self.changes = self.plan.changes()
        self.moments |= {at for at, _ in self.changes}

    def run(self) -> list[tuple[int, int]]:
        for customer, limit in self.plan.limits.items():
            self.store.adjust(self.trace.names[customer], CustomerSettings(limit=limit))
        for kind, limit in self.plan.kind_limits.items():
            self.store.configure_kind(self.trace.kind_names[kind], KindSettings(limit=limit))
        needs = {
            name: [service_of(o) for o in self.plan.outages if kind in o.kinds]
            for kind, name in enumerate(self.trace.kind_names)
        }
        self.store.sign_on("w", 1, needs=needs)
        while self.moments:
            now = min(self.moments)
            self.moments.remove(now)
            self.clock.advance((now - self.clock.now()) / SECOND)
            self.step(now)
        return self.log

    def step(self, now: int) -> None:
        ending = sorted(n for n, attempt in self.running.items() if attempt.ends_at == now)
        self.store.finish([self.outcome(n) for n in ending])
        documents = [self.document(n) for n in ending]
        self.moments |= {d.due_at_us for d in documents if d.state is State.DELAYED and d.due_at_us}
        for n in range(len(self.trace)):
            if self.trace.at[n] == now and n == len(self.ids):
                self.submit(n)
        for at, n in sorted(self.plan.cancels):
            if at == now:
                self.store.cancel([self.ids[n]])
        while self.changes and self.changes[0][0] == now:
            self.change(self.changes.pop(0)[1], now)
        while self.claim(now):
            pass
        # While all workers are busy, the claim of another one folds the leases that expire.
        self.store.claim(1, worker="other", lease_us=LONG_US, kinds=["of-another"])
        for found in self.store.outages():
            times = {found.probe_at_us}
            if found.resumed_at_us is not None:
                times = {
                    found.resumed_at_us + step for step in range(0, 5 * SECOND + 1, SECOND // 2)
                }
            self.moments |= {at for at in times if at > now}

    def claim(self, now: int) -> bool:
        """Claim a document for the first group of workers that can take one."""
        for group, kinds in enumerate(self.groups):
            if not self.free[group]:
                continue
            lease_us = self.plan.lease_us
            claims = self.store.claim(1, worker="w", lease_us=lease_us, kinds=kinds).claims
            if claims:
                self.begin(claims[0], group, now)
                return True
        return False

    def begin(self, claim: Claim, group: int, now: int) -> None:
        n = self.ids.index(claim.document.id)
        self.store.renew([claim.fence], lease_us=LONG_US)
        self.free[group] -= 1
        self.log.append((now, n))
        outage = self.plan.outage_at(self.trace.kind_of(n), now)
        ends_at = now + (self.trace.cost[n] if outage is None else outage.fails_after_us)
        self.running[n] = Attempt(ends_at, claim.fence, group, outage)
        self.moments.add(ends_at)

    def document(self, n: int) -> Document:
        stored = self.store.read(self.ids[n])
        assert stored is not None
        return stored.document

    def submit(self, n: int) -> None:
        name = self.trace.names[self.trace.customer[n]]
        weight = self.trace.weight.get(n)
        if weight is not None:
            limit = self.plan.limits.get(self.trace.customer[n])
            self.store.adjust(name, CustomerSettings(weight=weight / 1000, limit=limit))
        kind = self.trace.kind_names[self.trace.kind_of(n)]
        new = NewDocument(customer=name, body="null", cost=self.trace.cost[n], kind=kind)
        self.ids.append(self.store.submit([new])[0].id)

    def outcome(self, n: int) -> Outcome:
        _, fence, group, outage = self.running.pop(n)
        self.free[group] += 1
        if outage is not None:
            service = service_of(outage)
            return OutageReport(
                fence, "down", retry_after_us=outage.retry_after_us, service=service
            )
        delays = self.plan.failures.get(n, ())
        if self.failed[n] == len(delays):
            return Completed(fence, real_cost=self.trace.cost[n])
        delay = delays[self.failed[n]]
        self.failed[n] += 1
        return Failed(fence, "no", retry_in_us=delay)

    def change(self, change: int, now: int) -> None:
        general = len(self.groups) - 1
        busy = sorted(n for n, attempt in self.running.items() if attempt.group == general)
        lost = busy[: max(0, -change)]
        self.free[general] += change + len(lost)
        for n in lost:
            self.store.renew([self.running.pop(n).fence], lease_us=self.plan.lease_us)
            self.moments.add(now + self.plan.lease_us)


@pytest.mark.parametrize("mode", REAL)
@given(made=scenarios())
def test_the_simulator_serves_what_goes_wrong_in_the_order_of_a_real_store(
    mode: Mode, made: Scenario
) -> None:
    replayed = run(made, RealOrder(mode=mode, costs=made.costs))

    claims = sorted((a.started_at, a.document) for a in attempts_of(made, replayed))
    assert claims == sorted(Driver(made, mode).run())


@pytest.mark.parametrize("mode", REAL)
@given(made=scenarios(of_kinds=True))
def test_the_simulator_serves_kinds_limits_and_outages_in_the_order_of_a_real_store(
    mode: Mode, made: Scenario
) -> None:
    order = RealOrder(mode=mode, costs=made.costs, kinds=made.trace.kinds)
    replayed = run(made, order)
    driver = Driver(made, mode)

    claims = sorted((a.started_at, a.document) for a in attempts_of(made, replayed))
    assert claims == sorted(driver.run())
    dead = {n for n in range(len(made.trace)) if driver.document(n).state is State.DEAD}
    assert set(replayed.dead) == dead


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
@given(made=scenarios(of_kinds=True))
def test_every_order_keeps_documents_to_the_workers_of_their_kind_and_kinds_to_their_limits(
    mode: Discipline, made: Scenario
) -> None:
    replayed = run(made, order_of(mode, made))

    attempts = list(attempts_of(made, replayed))
    groups, kind_of = made.worker_groups, made.trace.kind_of
    for n in range(len(made.trace)):
        ends = (n in replayed.cancelled) + (n in replayed.dead) + (replayed.finished_at[n] > 0)
        assert ends == 1 or made.trace.at[n] == made.trace.cost[n] == 0
    assert all(kind_of(a.document) in groups[a.group].kinds for a in attempts)
    for now in {a.started_at for a in attempts}:
        busy = [a for a in attempts if a.started_at <= now < a.ended_at]
        for number, group in enumerate(groups):
            assert sum(a.group == number for a in busy) <= group.workers
        for kind, limit in made.plan.kind_limits.items():
            assert sum(kind_of(a.document) == kind for a in busy) <= limit
        for customer, limit in made.plan.limits.items():
            assert sum(made.trace.customer[a.document] == customer for a in busy) <= limit


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


def test_workers_for_one_kind_are_never_lost() -> None:
    made = scenario(
        trace_of((0, "a", 10), (0, "a", 10), (0, "a", 10), kinds=["ocr", "text", "text"]),
        Plan(workers=2, workers_for=((0, 1),), losses=(Loss(4 * SECOND, 1, 9 * SECOND),)),
    )

    (lost,) = run(made).earlier

    assert lost.document == 1


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


# ── Outages ──────────────────────────────────────────────────────────────────────────────────────


def down(from_s: int, to_s: int, *, kinds: tuple[int, ...] = (0,)) -> Outage:
    return Outage(kinds, from_s * SECOND, to_s * SECOND, fails_after_us=SECOND)


def starts_s(made: Scenario, kind: int = 0) -> list[float]:
    """Return when the attempts of a kind start, in a run by the order of the queue."""
    attempts = attempts_of(made, run(made))
    of_kind = (a for a in attempts if made.trace.kind_of(a.document) == kind)
    return sorted(a.started_at / SECOND for a in of_kind)


def test_in_an_outage_one_document_at_a_time_probes_at_growing_intervals() -> None:
    made = scenario(trace_of(*[(0, "a", 10)] * 99), Plan(workers=4, outages=(down(5, 400),)))

    # At 10 four attempts find the service unavailable. Each probe reports after a second, and the
    # next one follows 7.5, 11.25, 16.875 and so on up to 40 seconds later.
    found = [at for at in starts_s(made) if 5 <= at < 400]
    assert found[:4] == [10, 10, 10, 10]
    gaps = [after - before for before, after in pairwise(found[3:])]
    assert gaps[:6] == [6, 8.5, 12.25, 17.875, 26.3125, 38.96875]
    assert set(gaps[6:]) == {41}


def test_an_attempt_finds_the_service_down_from_the_begin_of_an_outage_until_before_its_end() -> (
    None
):
    plan = Plan(workers=3, outages=(down(10, 30), down(50, 70)))

    replayed = run(scenario(trace_of(*((at, "a", 1) for at in (9, 30, 50))), plan))

    assert {attempt.document for attempt in replayed.earlier} == {2}


def test_after_an_outage_the_number_of_running_documents_doubles_every_half_second() -> None:
    made = scenario(trace_of(*[(0, "a", 10)] * 99), Plan(workers=20, outages=(down(5, 30),)))

    replayed = run(made)

    (hold,) = replayed.holds
    since = [at - hold.ended_at / SECOND for at in starts_s(made) if at * SECOND >= hold.ended_at]
    assert since[:20] == [0, 0.5, *[1.0] * 2, *[1.5] * 4, *[2.0] * 8, *[2.5] * 4]
    assert replayed.dead == {}


def test_an_outage_of_one_kind_leaves_the_others_alone() -> None:
    rows = [(n, "a", 1) for n in range(200)]
    trace = trace_of(*rows, kinds=["ocr", "text"] * 100)

    made = scenario(trace, Plan(workers=1, outages=(down(10, 150),)))

    text = {at for at in starts_s(made, kind=1) if 20 <= at < 150}
    assert len(text) == 65  # each starts within a second: a probe takes the worker for one
    assert all(min(abs(at - n) for n in range(21, 151, 2)) <= 1 for at in text)


def test_a_service_that_two_kinds_need_holds_both() -> None:
    trace = trace_of(*[(0, "a", 1)] * 40, kinds=["ocr", "scan"] * 20)

    made = scenario(trace, Plan(workers=2, outages=(down(2, 60, kinds=(0, 1)),)))

    requests = sorted(at for kind in (0, 1) for at in starts_s(made, kind) if 3 <= at < 60)
    assert all(after - before >= 5 for before, after in pairwise(requests))


def test_after_a_lost_probe_the_next_one_starts_at_the_end_of_its_lease() -> None:
    outage = Outage((0,), 5 * SECOND, 300 * SECOND, fails_after_us=20 * SECOND)
    plan = Plan(workers=2, outages=(outage,), losses=(Loss(32 * SECOND, 1, 33 * SECOND),))

    made = scenario(trace_of(*[(0, "a", 6)] * 9), plan)

    # The probe at 31 is lost. While the next one runs, the lease of the first ends and permits no
    # other one.
    assert plan.lease_us == 30 * SECOND
    assert [at for at in starts_s(made) if at > 6][:2] == [31, 61]
    assert all(at > 61 + 20 for at in starts_s(made) if at > 61)


def test_reports_count_after_20_probes_of_one_outage() -> None:
    made = scenario(trace_of((0, "a", 1)), Plan(outages=(down(0, 7_200),)))

    replayed = run(made)

    # The first report, 20 probes, and five attempts that count.
    assert len(replayed.earlier) == 1 + 20 + 5
    assert list(replayed.dead) == [0]
    assert measures.unfinished(replayed) == replayed.dead


# ── Attempts that count ──────────────────────────────────────────────────────────────────────────


def test_a_document_whose_workers_are_lost_too_often_is_dead() -> None:
    losses = tuple(Loss(at * SECOND, 1, (at + 1) * SECOND) for at in (1, 40, 80))
    trace = trace_of((0, "a", 20), (0, "b", 200))

    made = scenario(trace, Plan(workers=2, losses=losses, attempts_max=3))

    assert run(made).dead == {0: 110 * SECOND}


def test_a_document_that_is_cancelled_in_its_last_attempt_is_not_dead() -> None:
    plan = Plan(outages=(down(0, 7_200),), attempts_max=1, cancels=())
    (died_at,) = run(scenario(trace_of((0, "a", 1)), plan)).dead.values()

    cancel = Cancel(died_at - SECOND // 2, 0)
    cancelled = run(scenario(trace_of((0, "a", 1)), replace(plan, cancels=(cancel,))))

    assert cancelled.dead == {}
    assert cancelled.cancelled == {0: died_at}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Plan(workers=0), "workers is 0"),
        (lambda: Plan(limits={1: 0}), "a limit is 0"),
        (lambda: Plan(kind_limits={1: 0}), "a limit is 0"),
        (lambda: Plan(failures={3: (1, 1)}, attempts_max=2), "document 3 fails 2 times"),
        (lambda: Plan(outages=(down(9, 9),)), "an outage ends before it begins"),
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
def test_a_worker_of_all_kinds_takes_the_first_document_of_any(order: Order) -> None:
    rows = [(0, "a", 10), (0, "b", 10), (0, "c", 10), (0, "d", 10)]
    trace = trace_of(*rows, kinds=["text", "ocr", "text", "ocr"])

    replayed = run(scenario(trace, Plan(workers=1)), order)

    assert [at / SECOND for at in replayed.started_at] == [0, 10, 20, 30]


@pytest.mark.parametrize("order", [Line(first_come), Ring()], ids=["fifo", "round-robin"])
def test_a_worker_of_one_kind_passes_over_the_documents_of_others(order: Order) -> None:
    rows = [(0, "a", 10)] * 4 + [(0, "b", 10)] * 2
    trace = trace_of(*rows, kinds=["ocr"] * 4 + ["text"] * 2)

    replayed = run(scenario(trace, Plan(workers=1, workers_for=((1, 1),))), order)

    assert [at / SECOND for at in replayed.started_at] == [0, 10, 20, 30, 0, 10]


@pytest.mark.parametrize("order", [Line(first_come), Ring()], ids=["fifo", "round-robin"])
def test_a_customer_below_its_limit_again_is_served_in_every_kind(order: Order) -> None:
    rows = [(0, "a", 10), (0, "a", 10), (0, "a", 10), (0, "b", 100)]
    trace = trace_of(*rows, kinds=["text", "ocr", "text", "ocr"])
    plan = Plan(workers=0, workers_for=((1, 1), (0, 1)), limits={0: 1})

    replayed = run(scenario(trace, plan), order)

    assert [at / SECOND for at in replayed.started_at] == [0, 100, 10, 0]


@pytest.mark.parametrize("order", [Line(first_come), Ring()], ids=["fifo", "round-robin"])
def test_a_limit_holds_a_customer_and_nobody_else(order: Order) -> None:
    rows = [(0, "a", 10)] * 4 + [(0, "b", 10)] * 2

    made = scenario(trace_of(*rows), Plan(workers=3, limits={0: 1}))
    replayed = run(made, order)

    assert [at / SECOND for at in replayed.started_at] == [0, 10, 20, 30, 0, 0]
