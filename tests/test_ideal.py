"""The fluid ideals, compared with a slow and obvious one in fractions, and with results by hand."""

from fractions import Fraction

import pytest
from hypothesis import given

from fairturn.priority import Rule
from fairturn.simulator.ideal import Ideal, serve_ideally
from fairturn.simulator.plan import Cancel, Loss, Plan
from fairturn.simulator.replay import check_all
from fairturn.simulator.scenario import Scenario
from fairturn.simulator.trace import Trace
from tests.test_simulator import SECOND, scenarios, trace_of


class Naive:
    """The same ideal without virtual clocks, heaps and floats."""

    def __init__(self, trace: Trace, plan: Plan, levels: list[int]) -> None:
        self.trace, self.plan, self.levels = trace, plan, levels
        self.left: dict[int, Fraction] = {}
        self.weights = [1000] * len(trace.names)
        self.failed: dict[int, int] = {}
        self.due: list[tuple[Fraction, int]] = []
        self.finished: dict[int, Fraction] = {}
        self.cancelled: set[int] = set()
        self.workers = plan.workers
        self.cancels = sorted(plan.cancels)
        self.changes = plan.changes()
        self.submitted = 0

    def run(self) -> dict[int, Fraction]:
        now = Fraction(0)
        while len(self.finished) + len(self.cancelled) < len(self.trace):
            rates = self.rates()
            moments = [now + self.left[n] / rate for n, rate in rates.items()]
            moments += [at for at, _ in self.due]
            moments += [Fraction(c.at) for c in self.cancels[:1]]
            moments += [Fraction(at) for at, _ in self.changes[:1]]
            moments += [Fraction(at) for at in self.trace.at[self.submitted : self.submitted + 1]]
            then = min(moments)
            for n, rate in rates.items():
                self.left[n] -= rate * (then - now)
            now = then
            done = [n for n in rates if self.left[n] == 0]
            for n in done:
                self.finish(n, now)
            if not done:
                self.happen(now)
        return self.finished

    def finish(self, n: int, now: Fraction) -> None:
        del self.left[n]
        delays = self.plan.failures.get(n, ())
        failed = self.failed.get(n, 0)
        if failed < len(delays):
            self.failed[n] = failed + 1
            if any(c.document == n and c.at < now for c in self.plan.cancels):
                self.cancelled.add(n)
            else:
                self.due.append((round(now) + Fraction(delays[failed]), n))
        else:
            self.finished[n] = now

    def happen(self, now: Fraction) -> None:
        trace = self.trace
        while self.submitted < len(trace) and trace.at[self.submitted] == now:
            n = self.submitted
            self.weights[trace.customer[n]] = trace.weight.get(n, self.weights[trace.customer[n]])
            self.left[n] = Fraction(trace.cost[n])
            self.submitted += 1
        while self.cancels and self.cancels[0].at == now:
            n = self.cancels.pop(0).document
            begun = n in self.left and self.left[n] < trace.cost[n]
            if n not in self.finished and not begun:
                self.left.pop(n, None)
                self.cancelled.add(n)
        for at, n in [entry for entry in self.due if entry[0] == now]:
            self.due.remove((at, n))
            if n not in self.cancelled:
                self.left[n] = Fraction(trace.cost[n])
        while self.changes and self.changes[0][0] == now:
            self.workers += self.changes.pop(0)[1]

    def rates(self) -> dict[int, Fraction]:
        """Raise all shares together; a customer that cannot use more keeps its share."""
        free = Fraction(self.workers)
        running = [Fraction(0)] * len(self.trace.names)
        rates: dict[int, Fraction] = {}
        for level in sorted({self.levels[n] for n in self.left}):
            lines: dict[int, list[int]] = {}
            for n in sorted(self.left):
                if self.levels[n] == level:
                    lines.setdefault(self.trace.customer[n], []).append(n)
            most = {
                c: min(Fraction(len(line)), self.plan.limits.get(c, 99) - running[c])
                for c, line in lines.items()
            }
            share = dict.fromkeys(lines, Fraction(0))
            thirsty = [c for c in lines if most[c] > 0]
            while thirsty and free > 0:
                weight = sum(self.weights[c] for c in thirsty)
                step = min(
                    free / weight, *((most[c] - share[c]) / self.weights[c] for c in thirsty)
                )
                for c in thirsty:
                    share[c] += step * self.weights[c]
                free -= step * weight
                thirsty = [c for c in thirsty if share[c] < most[c]]
            for c, line in lines.items():
                running[c] += share[c]
                for n in line:
                    rate = min(Fraction(1), share[c])
                    share[c] -= rate
                    if rate > 0:
                        rates[n] = rate
        return rates


@pytest.mark.parametrize("in_levels", [False, True], ids=["blind", "in levels"])
@given(made=scenarios())
def test_the_ideal_finishes_documents_when_a_naive_computation_says(
    in_levels: bool, made: Scenario
) -> None:
    priorities = list(check_all(made.trace, Rule())[1])

    ideal = serve_ideally(made.trace, plan=made.plan, priorities=priorities if in_levels else None)

    naive = Naive(made.trace, made.plan, priorities if in_levels else [1] * len(made.trace))
    expected = naive.run()
    assert set(ideal.cancelled) == naive.cancelled
    for n, finished in expected.items():
        assert ideal.finished_at[n] == pytest.approx(float(finished), abs=3)


def finished_s(ideal: Ideal) -> list[float]:
    return [round(at / SECOND, 3) for at in ideal.finished_at]


def test_customers_share_a_worker_evenly_and_their_own_documents_come_in_order() -> None:
    trace = trace_of((0, "a", 2), (0, "a", 2), (0, "b", 3))

    # Half a worker each: a's first and b run until 4; b has 1 left, a's second 2.
    assert finished_s(serve_ideally(trace, plan=Plan(workers=1))) == [4, 7, 6]


def test_a_document_never_has_more_than_one_worker() -> None:
    trace = trace_of((0, "a", 2), (0, "b", 2), (0, "b", 2), (0, "b", 2))

    # Of three workers, a can use one; b has two for its first two, and then one for its third.
    assert finished_s(serve_ideally(trace, plan=Plan(workers=3))) == [2, 2, 2, 4]


def test_inside_levels_a_worse_level_gets_what_the_better_ones_leave() -> None:
    trace = trace_of(*[(0, "a", 2)] * 4, (0, "b", 2))
    priorities = check_all(trace, Rule())[1]

    in_levels = serve_ideally(trace, plan=Plan(workers=1), priorities=priorities)

    # a's first and b share until 4; then a's second and third; the fourth, in level 2, last.
    assert finished_s(in_levels) == [4, 6, 8, 10, 4]


def test_weights_divide_the_shares() -> None:
    trace = trace_of((0, "a", 3), (0, "b", 1), weights={"a": 3_000})

    assert finished_s(serve_ideally(trace, plan=Plan(workers=1))) == [4, 4]


def test_lost_workers_slow_the_ideal_down_and_lose_no_work() -> None:
    trace = trace_of((0, "a", 4), (0, "b", 4))
    plan = Plan(workers=2, losses=(Loss(2 * SECOND, 1, 4 * SECOND),))

    assert finished_s(serve_ideally(trace, plan=plan)) == [5, 5]


def test_what_was_not_begun_is_cancelled_and_takes_no_time() -> None:
    trace = trace_of((0, "a", 2), (0, "a", 2), (0, "b", 2))
    plan = Plan(workers=1, cancels=(Cancel(SECOND, 1), Cancel(SECOND, 2)))

    ideal = serve_ideally(trace, plan=plan)

    assert ideal.cancelled == {1: SECOND}
    assert [ideal.finished_at[n] / SECOND for n in (0, 2)] == [4, 4]


def test_progress_hears_of_every_ten_thousand() -> None:
    heard: list[int] = []
    trace = trace_of(*((n, "ab"[n % 2], 1) for n in range(20_001)))

    serve_ideally(trace, plan=Plan(workers=2), progress=heard.append)

    assert heard == [10_000, 20_000]
