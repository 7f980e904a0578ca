"""The readings of the rule that exist only in the simulator, on traces computed by hand."""

from dataclasses import replace

import pytest
from hypothesis import given

from fairturn.priority import Rule
from fairturn.simulator.comparison import Discipline, order_of
from fairturn.simulator.measures import attempts_of
from fairturn.simulator.plan import Cancel, Plan
from fairturn.simulator.readings import Reading, ReevaluatedOrder, serve_reading
from fairturn.simulator.replay import Replayed
from fairturn.simulator.scenario import Scenario
from tests.test_simulator import ORDERS, SECOND, run, scenario, scenarios, trace_of

RULE = Rule(reset_interval_us=200 * SECOND)


def served(made: Scenario, reading: Reading, rule: Rule = RULE) -> Replayed:
    return serve_reading(made, Discipline.LEVELS, reading, rule)


def starts_s(replayed: Replayed) -> list[float]:
    return [at / SECOND for at in replayed.started_at]


# ── Outstanding ──────────────────────────────────────────────────────────────────────────────────


def test_outstanding_counts_what_waits_or_runs_when_a_document_is_submitted() -> None:
    # One worker, 10 s each. At 25 s two are done, one runs and two wait; at 100 s all are done.
    rows = [(0, "a", 10)] * 5 + [(25, "a", 10), (25, "b", 10), (100, "a", 10)]
    made = scenario(trace_of(*rows), Plan(workers=1))

    outstanding, idle = (served(made, r) for r in (Reading.OUTSTANDING, Reading.IDLE))

    assert list(outstanding.count) == [0, -1, -2, -3, -4, -3, 0, 0]
    assert list(outstanding.priority) == [1, 1, 1, 2, 2, 2, 1, 1]
    assert list(idle.count) == [0, -1, -2, -3, -4, -5, 0, -6]
    assert list(idle.priority) == [1, 1, 1, 2, 2, 3, 1, 3]


def test_outstanding_priorities_decide_the_order() -> None:
    # By 70 s the first six of a are done, so that its next one is in level 1, before b's fourth.
    rows = [(0, "a", 10)] * 6 + [(70, "b", 10)] * 5 + [(71, "a", 10)]
    made = scenario(trace_of(*rows), Plan(workers=1))

    outstanding, idle = (served(made, r) for r in (Reading.OUTSTANDING, Reading.IDLE))

    assert starts_s(outstanding)[6:] == [70, 80, 90, 110, 120, 100]
    assert starts_s(idle)[6:] == [70, 80, 90, 100, 110, 120]


def test_a_document_in_a_retry_delay_or_cancelled_is_not_outstanding() -> None:
    # The first fails at 10 s and is due at 60 s; the second is cancelled while it waits.
    rows = [(0, "a", 10), (0, "a", 10), (20, "a", 5), (59, "a", 5), (61, "a", 5)]
    plan = Plan(workers=1, failures={0: (50 * SECOND,)}, cancels=(Cancel(5 * SECOND, 1),))

    outstanding = served(scenario(trace_of(*rows), plan), Reading.OUTSTANDING)

    # At 61 s one runs and the first waits again, with the count that it found at 0 s.
    assert list(outstanding.count) == [0, -1, 0, 0, -2]


# ── Re-evaluated ─────────────────────────────────────────────────────────────────────────────────


def test_re_evaluated_lifts_waiting_documents_when_the_count_is_reset() -> None:
    # a's fourth document is in level 2, behind every new customer. More than 200 s after a's last
    # submission it is in level 1, and at 240 s it precedes n2 and n3, which arrived later.
    rows = [(0, "a", 60)] * 4 + [(100, "n1", 60), (150, "n2", 60), (190, "n3", 60)]
    made = scenario(trace_of(*rows), Plan(workers=1))

    lifted, idle = (served(made, r) for r in (Reading.RE_EVALUATED, Reading.IDLE))

    assert starts_s(idle) == [0, 60, 120, 360, 180, 240, 300]
    assert starts_s(lifted) == [0, 60, 120, 240, 180, 300, 360]
    assert list(lifted.priority) == [1, 1, 1, 2, 1, 1, 1]  # those at submission


@pytest.mark.parametrize(("claim_s", "first"), [(200, "n"), (200.000001, "a")])
def test_re_evaluated_needs_more_than_the_interval(claim_s: float, first: str) -> None:
    rows = [(0, "a", 0)] * 3 + [(0, "w", claim_s), (0, "a", 9), (1, "n", 9)]
    made = scenario(trace_of(*rows), Plan(workers=1))

    starts = starts_s(served(made, Reading.RE_EVALUATED))

    assert ("a" if starts[4] < starts[5] else "n") == first


def test_a_submission_postpones_the_reset_of_the_reading_re_evaluated() -> None:
    rows = [(0, "a", 60)] * 4 + [(50, "a", 60), (100, "n1", 60), (150, "n2", 60), (190, "n3", 60)]
    made = scenario(trace_of(*rows), Plan(workers=1))

    starts = starts_s(served(made, Reading.RE_EVALUATED))

    # At 240 s the count of a was last updated 190 s ago; at 300 s, 250 s ago.
    assert starts == [0, 60, 120, 300, 360, 180, 240, 420]


def test_re_evaluated_lifts_a_whole_dump_in_its_order() -> None:
    rows = [(0, "a", 10)] * 40 + [(250, "n", 10)]
    made = scenario(trace_of(*rows), Plan(workers=1))

    lifted, idle = (served(made, r) for r in (Reading.RE_EVALUATED, Reading.IDLE))

    assert starts_s(idle)[40] == 250
    assert starts_s(lifted) == [n * 10 for n in range(41)]


@pytest.mark.parametrize("mode", ORDERS)
@given(made=scenarios())
def test_without_a_reset_re_evaluated_is_the_order_that_it_wraps(
    mode: Discipline, made: Scenario
) -> None:
    never = replace(RULE, reset_interval_us=10**15)

    plain, wrapped = (
        run(made, order)
        for order in (order_of(mode, made), ReevaluatedOrder(order_of(mode, made), never))
    )

    assert list(attempts_of(made, plain)) == list(attempts_of(made, wrapped))


@pytest.mark.parametrize("mode", ORDERS)
@pytest.mark.parametrize("reading", Reading)
@given(made=scenarios())
def test_every_reading_serves_every_document_and_keeps_limits(
    mode: Discipline, reading: Reading, made: Scenario
) -> None:
    rule = Rule(reset_interval_us=20 * SECOND)

    replayed = serve_reading(made, mode, reading, rule)

    attempts = list(attempts_of(made, replayed))
    assert {a.document for a in attempts} | set(replayed.cancelled) == set(range(len(made.trace)))
    for now in {a.started_at for a in attempts}:
        running = [a for a in attempts if a.started_at <= now < a.ended_at]
        for customer, limit in made.plan.limits.items():
            assert sum(made.trace.customer[a.document] == customer for a in running) <= limit
