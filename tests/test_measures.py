"""Each measure of a simulated run: by hand, and properties for any numbers."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn.scheduling.outages import RESUME_US
from fairturn.simulator import capacity, measures
from fairturn.simulator.baselines import Line, first_come
from fairturn.simulator.capacity import OutageResult
from fairturn.simulator.comparison import Discipline, compare, modes_of, order_of
from fairturn.simulator.measures import Evenness
from fairturn.simulator.plan import Cancel, Loss, Outage, Plan
from fairturn.simulator.replay import Replayed
from fairturn.simulator.scenario import Scenario
from tests.test_simulator import SECOND, run, scenario, scenarios, trace_of

MODES = [mode for mode in Discipline if not mode.startswith("ideal")]
moments = st.lists(st.integers(0, 50), max_size=20).map(sorted)
spells = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=10).map(
    lambda pairs: [(begin, begin + length) for begin, length in pairs]
)


def waits_of_all(made: Scenario, replayed: Replayed) -> list[int]:
    return measures.waits_of(range(len(made.trace)), made, replayed)


# ── Waits ────────────────────────────────────────────────────────────────────────────────────────


def test_a_wait_is_the_time_from_submission_to_start_where_nothing_fails() -> None:
    made = scenario(trace_of((0, "a", 10), (1, "b", 10), (2, "a", 10)), Plan(workers=1))

    assert waits_of_all(made, run(made)) == [0, 9 * SECOND, 18 * SECOND]


def test_failed_attempts_and_their_delays_are_no_waits_but_a_lost_worker_is() -> None:
    failing = scenario(trace_of((0, "a", 2)), Plan(failures={0: (5 * SECOND,)}))
    losing = scenario(
        trace_of((0, "a", 10)), Plan(workers=2, losses=(Loss(4 * SECOND, 1, 90 * SECOND),))
    )

    assert waits_of_all(failing, run(failing)) == [0]
    assert waits_of_all(losing, run(losing)) == [34 * SECOND]


def test_a_summary_of_waits_has_percentiles_that_somebody_really_waited() -> None:
    summary = measures.summary_of([n * SECOND for n in range(1, 101)], cancelled=3)

    assert summary.documents == 100
    assert summary.cancelled == 3
    assert summary.mean_us == 50_500_000
    seconds = [us / SECOND for us in (summary.p50_us, summary.p95_us, summary.p99_us)]
    assert seconds == [50, 95, 99]
    assert summary.max_us == 100 * SECOND


def test_a_summary_of_nothing_is_zero() -> None:
    assert measures.summary_of([], cancelled=7, dead=2) == (0, 7, 2, 0, 0, 0, 0, 0)


# ── Lags ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_lag_is_counted_in_documents_at_the_worst_moment() -> None:
    assert measures.lag([1, 2, 3, 10], [2, 8, 9, 10]) == 2
    assert measures.lag([5, 6], [1, 2]) == 0
    assert measures.lag([], [1]) == 0


@given(ideal=moments, real=moments)
def test_a_lag_is_what_counting_at_every_moment_finds(ideal: list[int], real: list[int]) -> None:
    behind = [
        sum(at <= now for at in ideal) - sum(at <= now for at in real) for now in range(-1, 72)
    ]

    assert measures.lag(ideal, real) == max(behind)


# ── Gaps ─────────────────────────────────────────────────────────────────────────────────────────


@given(spells)
def test_joined_spells_cover_the_same_moments_and_do_not_touch(
    pairs: list[tuple[int, int]],
) -> None:
    union = measures.joined(pairs)

    covered = {n for begin, end in pairs for n in range(begin, end)}
    assert {n for begin, end in union for n in range(begin, end)} == covered
    assert all(end < begin for (_, end), (begin, _) in pairwise(union))


def test_the_longest_gap_counts_only_while_the_customer_waits() -> None:
    # It waits from 10 to 30 and from 100 to 130, and is served at 15, 30, 101 and 130.
    assert measures.longest_gap([(10, 30), (100, 130)], [15, 30, 101, 130]) == 29


@given(pairs=spells, claims=moments)
def test_the_longest_gap_is_what_looking_at_every_moment_finds(
    pairs: list[tuple[int, int]], claims: list[int]
) -> None:
    union = [(begin, end) for begin, end in measures.joined(pairs) if end > begin]
    longest = 0
    for begin, end in union:
        since = begin
        for now in range(begin + 1, end + 1):
            longest = max(longest, now - since)
            since = now if now in claims else since

    assert measures.longest_gap(union, claims) == longest


def test_a_customer_behind_a_dump_has_a_gap_as_long_as_its_wait() -> None:
    made = scenario(trace_of(*[(0, "dump", 10)] * 9, (5, "quiet", 1)), Plan(workers=1))
    replayed = run(made, Line(first_come))

    spells_ = measures.waiting_spells(made, replayed)
    claims = measures.claims_of(made, replayed)

    assert measures.longest_gap(spells_[1, 0], claims[1, 0]) == 85 * SECOND
    assert measures.longest_gap(spells_[0, 0], claims[0, 0]) == 10 * SECOND
    assert measures.longest_gaps(made, replayed) == [10 * SECOND, 85 * SECOND]


# ── Jain's index ─────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(any))
def test_jains_index_lies_between_one_over_n_and_one(shares: list[float]) -> None:
    index = measures.jain(shares)

    assert 1 / len(shares) - 1e-9 <= index <= 1 + 1e-9


def test_jains_index_is_one_for_equals_and_one_over_n_if_one_has_it_all() -> None:
    assert measures.jain([3, 3, 3]) == 1
    assert measures.jain([5, 0, 0, 0]) == 0.25


def test_evenness_looks_at_those_who_wait_throughout_a_window_by_their_weight() -> None:
    rows = [(0, "a", 1)] * 90 + [(0, "b", 1)] * 30 + [(0, "c", 1)]
    made = scenario(trace_of(*rows, weights={"a": 3_000}), Plan(workers=1))
    even = run(made, order_of(Discipline.EQUAL, made))
    uneven = run(made, Line(first_come))

    def of(replayed: Replayed) -> Evenness:
        return measures.evenness(made, replayed, window_us=20 * SECOND)

    assert of(even).windows == 5
    assert of(even).least > 0.99
    # In the first four windows only a is served, of three waiting customers; then b beside c.
    assert of(uneven).windows == 5
    assert of(uneven).least == pytest.approx(1 / 3)


def test_a_window_in_which_none_of_those_who_wait_is_served_says_nothing() -> None:
    rows = [(0, "long", 100), (1, "a", 1), (1, "b", 1)]
    made = scenario(trace_of(*rows), Plan(workers=1))
    replayed = run(made)

    even = measures.evenness(made, replayed, SECOND)

    assert even.windows == 0


def test_where_no_two_customers_wait_there_is_nothing_to_compare() -> None:
    made = scenario(trace_of(*[(0, "a", 1)] * 90), Plan(workers=1))
    replayed = run(made)

    even = measures.evenness(made, replayed, SECOND)

    assert even == (0, 1.0, 1.0)


# ── Idle workers ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", MODES)
@given(made=scenarios(of_kinds=True))
def test_no_worker_is_idle_while_documents_wait_that_it_serves(
    mode: Discipline, made: Scenario
) -> None:
    free = scenario(made.trace, replace(made.plan, limits={}, kind_limits={}, outages=()))

    assert capacity.idle_while_waiting(free, run(free, order_of(mode, free))) == 0


def test_a_worker_is_idle_only_beside_documents_that_it_serves() -> None:
    trace = trace_of(*[(0, "a", 10)] * 3, kinds=["ocr", "ocr", "text"])
    plan = Plan(workers=0, workers_for=((0, 1), (1, 3)))
    made = scenario(trace, plan)

    # The other two workers for text have nothing to do while an ocr document waits.
    assert capacity.idle_while_waiting(made, run(made, order_of(Discipline.FAIR, made))) == 0

    limited = scenario(trace, replace(plan, workers=1, kind_limits={0: 1}))
    replayed = run(limited, order_of(Discipline.FAIR, limited))
    assert capacity.idle_while_waiting(limited, replayed) == 10 * SECOND


def test_one_waiting_document_leaves_one_worker_idle_in_whatever_group() -> None:
    trace = trace_of((0, "a", 10), (0, "a", 10), kinds=["ocr", "ocr"])
    made = scenario(trace, Plan(workers=2, workers_for=((0, 2),), kind_limits={0: 1}))

    replayed = run(made, order_of(Discipline.FAIR, made))

    assert capacity.idle_while_waiting(made, replayed) == 10 * SECOND


@pytest.mark.parametrize("mode", MODES)
@given(made=scenarios())
def test_no_worker_is_idle_while_documents_wait_that_no_limit_holds(
    mode: Discipline, made: Scenario
) -> None:
    unlimited = scenario(
        made.trace,
        Plan(
            workers=made.plan.workers,
            failures=made.plan.failures,
            cancels=made.plan.cancels,
            losses=made.plan.losses,
            lease_us=made.plan.lease_us,
        ),
        made.costs,
    )

    replayed = run(unlimited, order_of(mode, unlimited))

    assert capacity.idle_while_waiting(unlimited, replayed) == 0


def test_a_limit_leaves_workers_idle_while_documents_wait() -> None:
    made = scenario(trace_of(*[(0, "a", 10)] * 3), Plan(workers=2, limits={0: 1}))

    # For 20 seconds one of the two workers was idle while a document waited.
    assert capacity.idle_while_waiting(made, run(made)) == 20 * SECOND


def test_of_many_idle_workers_no_more_count_than_documents_wait() -> None:
    made = scenario(trace_of(*[(0, "a", 10)] * 3), Plan(workers=9, limits={0: 1}))

    assert capacity.idle_while_waiting(made, run(made)) == (2 + 1) * 10 * SECOND


# ── Busy workers ─────────────────────────────────────────────────────────────────────────────────


def test_the_busy_share_of_workers_is_of_the_time_in_which_they_were_present() -> None:
    trace = trace_of((0, "a", 10), (0, "a", 10), (30, "b", 10), kinds=["ocr", "text", "text"])
    loss = Loss(20 * SECOND, 1, 30 * SECOND)
    made = scenario(trace, Plan(workers=2, workers_for=((0, 2),), losses=(loss,)))

    found = capacity.loads(made, run(made, order_of(Discipline.FAIR, made)))

    # Of 2 x 40 s, 10; and of 2 x 40 s without the 10 s of a lost worker, 20.
    assert [(load.group.kinds, load.group.workers) for load in found] == [((0,), 2), ((0, 1), 2)]
    assert [load.busy for load in found] == [10 / 80, 20 / 70]


def test_workers_of_a_trace_without_documents_are_not_busy() -> None:
    made = scenario(trace_of(), Plan(workers=3))

    assert [load.busy for load in capacity.loads(made, run(made))] == [0.0]


# ── Outages ──────────────────────────────────────────────────────────────────────────────────────


def passed(made: Scenario) -> OutageResult:
    (result,) = capacity.outage_results(made, run(made, order_of(Discipline.FAIR, made)))
    return result


def test_the_full_rate_is_back_when_all_workers_are_busy_again() -> None:
    outage = Outage((0,), 5 * SECOND, 20 * SECOND, fails_after_us=SECOND)
    made = scenario(trace_of(*[(0, "a", 2)] * 200), Plan(workers=4, outages=(outage,)))

    # At 6, four attempts report at 7. The probe at 12 fails, that at 20.5 succeeds at 22.5. Then
    # one document runs, two after half a second, and four after a second.
    assert passed(made) == OutageResult(requests=4 + 1, recovery_us=round(3.5 * SECOND))


def test_the_resumption_of_many_workers_ends_after_five_seconds() -> None:
    outage = Outage((0,), 5 * SECOND, 20 * SECOND, fails_after_us=SECOND)
    made = scenario(trace_of(*[(0, "a", 2)] * 9_000), Plan(workers=900, outages=(outage,)))

    assert passed(made).recovery_us == 2.5 * SECOND + RESUME_US


def test_a_limit_of_the_kind_does_not_delay_the_full_rate() -> None:
    outage = Outage((0,), 5 * SECOND, 20 * SECOND, fails_after_us=SECOND)
    plan = Plan(workers=4, outages=(outage,), kind_limits={0: 2})
    made = scenario(trace_of(*[(0, "a", 2)] * 200), plan)

    assert passed(made).recovery_us == 3 * SECOND


def test_workers_that_a_limit_keeps_idle_do_not_delay_the_full_rate() -> None:
    outage = Outage((0,), 5 * SECOND, 20 * SECOND, fails_after_us=SECOND)
    plan = Plan(workers=4, outages=(outage,), limits={0: 1})
    made = scenario(trace_of(*[(0, "a", 2)] * 200), plan)

    assert passed(made).recovery_us <= 8 * SECOND + RESUME_US


def test_the_holds_of_another_service_do_not_delay_the_full_rate() -> None:
    outages = (Outage((0,), 5 * SECOND, 20 * SECOND), Outage((1,), 5 * SECOND, 300 * SECOND))
    trace = trace_of(*[(0, "a", 2)] * 200, kinds=["ocr", "text"] * 100)
    made = scenario(trace, Plan(workers=4, outages=outages))

    ocr, text = capacity.outage_results(made, run(made, order_of(Discipline.FAIR, made)))

    assert ocr.recovery_us < 15 * SECOND
    assert text.recovery_us > 0


def test_an_outage_that_no_attempt_finds_has_no_requests_and_no_recovery() -> None:
    outage = Outage((0,), 5 * SECOND, 20 * SECOND)
    made = scenario(trace_of((0, "a", 1), (30, "a", 1)), Plan(outages=(outage,)))

    assert passed(made) == OutageResult(requests=0, recovery_us=0)


def test_documents_of_other_kinds_do_not_count_as_the_full_rate_of_a_held_one() -> None:
    outage = Outage((0,), 5 * SECOND, 20 * SECOND, fails_after_us=SECOND)
    trace = trace_of(*[(0, "a", 2)] * 200, kinds=["ocr", "text"] * 100)
    made = scenario(trace, Plan(workers=4, outages=(outage,)))
    replayed = run(made, order_of(Discipline.FAIR, made))

    (hold,) = replayed.holds
    assert hold.ended_at > outage.back_at
    assert passed(made).recovery_us >= hold.ended_at - outage.back_at


# ── Side by side ─────────────────────────────────────────────────────────────────────────────────


def test_a_comparison_has_a_result_for_each_mode_and_group_and_lags_behind_the_ideals() -> None:
    rows = [(0, "dump", 10)] * 9 + [(5, "quiet", 1)]
    made = scenario(trace_of(*rows), Plan(workers=1, cancels=(Cancel(6 * SECOND, 8),)))
    heard: list[tuple[Discipline, int]] = []

    comparison = compare(
        made,
        [Discipline.FIFO, Discipline.IDEAL, Discipline.FIFO],
        progress=lambda mode, done: heard.append((mode, done)),
    )

    assert [result.mode for result in comparison.results] == ["fifo", "ideal"]
    fifo, ideal = comparison.results
    assert [group.name for group in fifo.groups] == ["dump", "quiet"]
    assert fifo.groups[0].waits.cancelled == 1
    assert fifo.groups[1].waits.max_us == 75 * SECOND
    assert fifo.groups[1].lags == {Discipline.IDEAL: 1}
    assert fifo.all.documents == 9
    assert fifo.idle_us == 0
    assert (ideal.groups[0].gap_us, ideal.evenness, ideal.idle_us) == (None, None, None)
    assert comparison.of(Discipline.IDEAL) is ideal
    assert heard == [(Discipline.FIFO, 10), (Discipline.IDEAL, 10)]


def test_waits_are_compared_by_kind_and_group() -> None:
    rows = [(0, "a", 10), (0, "a", 10), (5, "b", 1)]
    trace = trace_of(*rows, kinds=["ocr", "text", "text"])

    (fair,) = compare(scenario(trace, Plan(workers=1)), [Discipline.FAIR]).results

    ocr, text = fair.kinds
    assert (ocr.name, text.name) == ("ocr", "text")
    assert [waits.documents for waits in (ocr.waits, *ocr.groups)] == [1, 1, 0]
    assert [waits.max_us / SECOND for waits in (text.waits, *text.groups)] == [15, 10, 15]


def test_a_customer_waits_in_each_kind_for_itself() -> None:
    rows = [(0, "b", 100), (0, "a", 1), *[(0, "a", 10)] * 9]
    trace = trace_of(*rows, kinds=["text", "text", *["ocr"] * 9])
    made = scenario(trace, Plan(workers=0, workers_for=((0, 1), (1, 1))))

    gaps = measures.longest_gaps(made, run(made, order_of(Discipline.FAIR, made)))

    # A claim of ocr every ten seconds does not shorten the wait for text.
    assert dict(zip(trace.names, gaps, strict=True)) == {"b": 0, "a": 100 * SECOND}


def test_customers_that_wait_in_different_kinds_are_not_compared() -> None:
    rows = [*[(0, "a", 1)] * 90, *[(0, "b", 10)] * 9]
    trace = trace_of(*rows, kinds=[*["ocr"] * 90, *["text"] * 9])
    made = scenario(trace, Plan(workers=0, workers_for=((0, 1), (1, 1))))
    replayed = run(made, order_of(Discipline.FAIR, made))

    assert measures.evenness(made, replayed, window_us=20 * SECOND).windows == 0


@pytest.mark.parametrize(
    "plan",
    [
        Plan(workers_for=((0, 1),)),
        Plan(kind_limits={0: 1}),
        Plan(outages=(Outage((0,), 0, SECOND),)),
    ],
    ids=["workers of a kind", "a limit", "an outage"],
)
def test_there_is_no_ideal_where_not_every_worker_can_take_every_document(plan: Plan) -> None:
    made = scenario(trace_of((0, "a", 1)), plan)

    assert modes_of(made) == [mode for mode in Discipline if not mode.startswith("ideal")]
    with pytest.raises(ValueError, match="mode ideal is an ideal for one kind"):
        compare(made, [Discipline.FAIR, Discipline.IDEAL])


def test_there_is_no_ideal_of_several_kinds() -> None:
    one = scenario(trace_of((0, "a", 1), kinds=["ocr"]), Plan())
    two = scenario(trace_of((0, "a", 1), (0, "a", 1), kinds=["ocr", "text"]), Plan())

    assert modes_of(one) == list(Discipline)
    assert Discipline.IDEAL not in modes_of(two)


def test_the_ideal_is_behind_nobody() -> None:
    made = scenario(trace_of(*[(0, "a", 3)] * 20, *[(0, "b", 3)] * 20), Plan(workers=1))

    result = compare(made, [Discipline.EQUAL, Discipline.IDEAL]).of(Discipline.EQUAL)

    assert all(0 <= group.lags[Discipline.IDEAL] <= 1 for group in result.groups)
