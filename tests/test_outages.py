"""Outages: holds, probes and resumption of a service, as pure functions."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn.clock import SECOND_US
from fairturn.scheduling.outages import (
    PROBE_US_MAX,
    PROBE_US_MIN,
    PROBES_FREE,
    REPORTS_WITHIN_US,
    RESUME_US,
    RETRY_AFTER_US_MAX,
    Report,
    ReportResult,
    ServiceState,
    after_probe,
    after_report,
    after_success,
    is_over,
    may_probe,
    probed,
    resumed,
    running_max,
)

START = 1_700_000_000 * SECOND_US
RETRY_S = 4


def report(
    state: ServiceState | None,
    *,
    document: int,
    fence: int = 1,
    at_s: float = 0,
    retry_after_s: float = RETRY_S,
    others_wait: bool = True,
    last_fence: int = 10,
) -> ReportResult:
    reported = Report(document, fence, "down", round(retry_after_s * SECOND_US), others_wait)
    return after_report(state, reported, last_fence=last_fence, now=at(at_s))


def at(seconds: float) -> int:
    return START + round(seconds * SECOND_US)


def held(**fields: Any) -> ServiceState:
    """Return the state after two documents reported at `START`, with fence 10 as the last."""
    first = report(None, document=1).state
    return report(first, document=2).state._replace(**fields)


# ── The beginning ────────────────────────────────────────────────────────────────────────────────


def test_one_report_holds_nothing_and_delays_its_document_by_the_interval() -> None:
    state, delay_us, counts = report(None, document=1)

    assert not state.held
    assert (delay_us, counts) == (RETRY_S * SECOND_US, False)
    assert (state.began_at, state.error) == (START, "down")


def test_a_report_of_a_second_document_begins_the_hold() -> None:
    first = report(None, document=1).state

    state = report(first, document=2, at_s=30).state

    assert (state.held, state.began_at) == (True, START)
    assert (state.probe_at, state.probes) == (at(30 + RETRY_S), 0)


def test_a_second_report_of_one_document_holds_nothing() -> None:
    first = report(None, document=1).state

    assert not report(first, document=1, at_s=30).state.held


def test_a_report_begins_the_hold_if_no_other_document_waits() -> None:
    assert report(None, document=1, others_wait=False).state.held


def test_reports_that_are_too_far_apart_do_not_hold_together() -> None:
    first = report(None, document=1).state
    within, later = (REPORTS_WITHIN_US + us for us in (0, 1))

    assert report(first, document=2, at_s=within / SECOND_US).state.held
    second = report(first, document=2, at_s=later / SECOND_US).state
    assert (second.held, second.began_at) == (False, START + later)


def test_the_last_report_of_a_document_counts_for_the_next() -> None:
    first = report(None, document=1).state
    again = report(first, document=1, at_s=50).state

    assert report(again, document=2, at_s=100).state.held


def test_a_success_forgets_a_single_report() -> None:
    state = report(None, document=1, last_fence=10).state

    assert after_success(state, 1, last_fence=10, now=at(1)) is None


# ── Probes ───────────────────────────────────────────────────────────────────────────────────────


def test_a_probe_is_due_after_the_interval() -> None:
    state = held()

    assert [may_probe(state, at(s)) for s in (0, RETRY_S - 0.001, RETRY_S)] == [False, False, True]


def test_while_a_probe_runs_another_is_due_only_after_one_lease() -> None:
    state = probed(held(), now=at(RETRY_S), lease_us=30 * SECOND_US)

    assert not may_probe(state, at(RETRY_S + 29))
    assert may_probe(state, at(RETRY_S + 30))


def test_the_interval_grows_by_half_to_eight_times_the_first() -> None:
    state, intervals = held(), []
    for n in range(8):
        state = report(state, document=n, fence=11, at_s=100 * n).state
        intervals.append(state.interval_us / SECOND_US)
        assert state.probe_at == at(100 * n) + state.interval_us

    assert intervals == [6, 9, 13.5, 20.25, 30.375, 32, 32, 32]
    assert state.probes == 8


def test_the_interval_grows_to_a_minute_at_most() -> None:
    state = report(None, document=1, retry_after_s=20, others_wait=False).state
    for n in range(9):
        state = report(state, document=n, fence=11, retry_after_s=20).state

    assert state.interval_us == PROBE_US_MAX


def test_a_service_that_asks_for_more_than_a_minute_gets_it() -> None:
    state = report(held(), document=3, fence=11, retry_after_s=600).state
    assert state.interval_us == 600 * SECOND_US

    first = report(None, document=1, retry_after_s=90, others_wait=False).state
    assert report(first, document=2, fence=11, retry_after_s=90).state.interval_us == 90 * SECOND_US


@pytest.mark.parametrize(
    ("asked_us", "expected"),
    [(-1, PROBE_US_MIN), (0, PROBE_US_MIN), (10**15, RETRY_AFTER_US_MAX)],
)
def test_a_requested_interval_is_clamped(asked_us: int, expected: int) -> None:
    state = report(None, document=1, retry_after_s=asked_us / SECOND_US, others_wait=False).state

    assert state.interval_us == expected


def test_a_report_of_an_attempt_from_before_the_hold_is_no_probe() -> None:
    before = held()

    state, _, counts = report(before, document=3, fence=10, at_s=1)

    assert (state.interval_us, state.probe_at, state.probes, counts) == (
        before.interval_us,
        before.probe_at,
        0,
        False,
    )


@pytest.mark.parametrize("others_wait", [False, True])
def test_the_document_of_a_probe_leaves_the_next_one_to_another(others_wait: bool) -> None:
    state, delay_us, _ = report(held(), document=3, fence=11, at_s=9, others_wait=others_wait)

    due_at = at(9) + delay_us
    assert due_at == state.probe_at + (state.interval_us if others_wait else 0)


def test_another_end_of_a_probe_permits_the_next_after_the_same_interval() -> None:
    state = probed(held(), now=at(5), lease_us=60 * SECOND_US)

    ended = after_probe(state, 11, now=at(6))

    assert (ended.interval_us, ended.probe_at) == (RETRY_S * SECOND_US, at(6 + RETRY_S))
    assert after_probe(state, 10, now=at(6)) == state  # claimed before the hold


def test_reports_use_attempts_after_twenty_probes() -> None:
    state, counted = held(), []
    for n in range(PROBES_FREE + 2):
        state, _, counts = report(state, document=n, fence=11)
        counted.append(counts)

    assert counted == [False] * PROBES_FREE + [True, True]


# ── The end ──────────────────────────────────────────────────────────────────────────────────────


def test_a_success_of_an_attempt_claimed_since_the_hold_began_ends_it() -> None:
    state = after_success(held(), 11, last_fence=12, now=at(60))

    assert state is not None
    assert (state.held, state.resumed_at, state.fence, state.probes) == (False, at(60), 12, 0)


def test_a_success_of_an_attempt_claimed_before_the_hold_does_not_end_it() -> None:
    assert after_success(held(), 10, last_fence=12, now=at(60)) == held()


def test_work_resumes_step_by_step() -> None:
    state = resumed(held(), last_fence=10, now=START)

    assert [running_max(state, at(s)) for s in (0, 0.499, 0.5, 1, 1.5, 4.999, 5, 3_600)] == [
        1,
        1,
        2,
        4,
        8,
        512,
        None,
        None,
    ]


def test_a_late_report_from_before_the_end_of_the_hold_is_ignored() -> None:
    state = resumed(held(), last_fence=20, now=at(60))

    assert report(state, document=3, fence=20, at_s=61) == (state, RETRY_S * SECOND_US, False)


def test_one_new_report_while_work_resumes_does_not_hold_and_two_do() -> None:
    state = resumed(held(), last_fence=20, now=at(60))

    first = report(state, document=3, fence=21, at_s=61).state
    assert (first.held, first.began_at) == (False, at(61))
    assert running_max(first, at(61)) == 4
    second = report(first, document=4, fence=21, at_s=62, last_fence=22).state
    assert (second.held, second.fence, second.resumed_at) == (True, 22, None)


def test_a_success_while_work_resumes_forgets_a_report() -> None:
    state = resumed(held(), last_fence=20, now=at(60))
    first = report(state, document=3, fence=21, at_s=61).state

    after = after_success(first, 21, last_fence=22, now=at(62))

    assert after is not None
    assert not report(after, document=4, fence=22, at_s=63).state.held


def test_a_state_without_effect_is_over() -> None:
    once = report(None, document=1).state
    back = resumed(held(), last_fence=20, now=START)

    assert [is_over(once, START + us) for us in (0, REPORTS_WITHIN_US, REPORTS_WITHIN_US + 1)] == [
        False,
        False,
        True,
    ]
    assert [is_over(back, START + us) for us in (0, RESUME_US - 1, RESUME_US)] == [
        False,
        False,
        True,
    ]
    assert not is_over(held(), at(10**6))


# ── The clock ────────────────────────────────────────────────────────────────────────────────────


def test_a_clock_that_is_set_back_permits_a_probe_and_ends_the_resumption() -> None:
    state = held()

    assert may_probe(state, at(-1))
    assert running_max(resumed(state, last_fence=1, now=START), at(-1)) is None
    assert is_over(resumed(state, last_fence=1, now=START), at(-1))


def test_a_clock_that_is_set_back_does_not_delay_documents_longer() -> None:
    state = probed(held(), now=at(10), lease_us=3_600 * SECOND_US)

    _, delay_us, _ = report(state, document=3, fence=10, at_s=-86_400)

    assert delay_us <= 2 * state.interval_us


# ── Any history ──────────────────────────────────────────────────────────────────────────────────


class Step(NamedTuple):
    """A call after some time; `fence` counts back from the last claim."""

    what: str
    after_us: int
    document: int
    fence: int
    retry_after_us: int
    others_wait: bool


steps = st.lists(
    st.builds(
        Step,
        what=st.sampled_from(["report", "report", "success", "end", "claim", "resume"]),
        after_us=(st.integers(-10, 90) | st.just(-86_400)).map(lambda s: s * SECOND_US),
        document=st.integers(1, 3),
        fence=st.integers(0, 3),
        retry_after_us=st.integers(-1, 100).map(lambda s: s * SECOND_US),
        others_wait=st.booleans(),
    ),
    max_size=60,
)


@given(steps)
def test_in_every_history_a_held_service_is_probed_soon_and_documents_wait_for_a_bounded_time(
    history: list[Step],
) -> None:
    state: ServiceState | None = None
    now, claims, probes = START, 3, 0
    for step in history:
        now += step.after_us
        fence = claims - step.fence
        was_held = state is not None and state.held
        if step.what == "report":
            retry_after_us = step.retry_after_us
            reported = Report(step.document, fence, "down", retry_after_us, step.others_wait)
            state, delay_us, counts = after_report(state, reported, last_fence=claims, now=now)
            probes = state.probes
            assert 0 <= delay_us <= 2 * RETRY_AFTER_US_MAX
            assert not counts or (was_held and probes >= PROBES_FREE)
            assert state.interval_us >= state.first_interval_us >= PROBE_US_MIN
            if not was_held and state.held:
                assert state.fence == claims
        elif state is None:
            continue
        elif step.what == "success":
            after = after_success(state, fence, last_fence=claims, now=now)
            ends = state.held and (after is None or not after.held)
            assert ends == (state.held and fence > state.fence)
            state = after
        elif step.what == "end":
            state = after_probe(state, fence, now=now)
        elif step.what == "claim" and (not state.held or may_probe(state, now)):
            claims += 1
            if state.held:
                state = probed(state, now=now, lease_us=30 * SECOND_US)
                assert not may_probe(state, now)
        elif step.what == "resume" and state.held:
            state = resumed(state, last_fence=claims, now=now)
        if state is None:
            continue
        assert not (state.held and state.resumed_at is not None)
        if state.held:  # nothing but the time is needed for another probe
            assert may_probe(state, state.probe_at)
            assert may_probe(state, now) or state.probe_at - now <= RETRY_AFTER_US_MAX
            assert running_max(state, now) is None
            assert not is_over(state, now)
        elif (most := running_max(state, now)) is not None:
            assert most >= 1
