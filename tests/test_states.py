"""The states of a document: one table, and its derivations."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fairturn.explain.reasons import Code
from fairturn.model import (
    ATTEMPTS_STORED_MAX,
    ENDED,
    ENDED_BY_ATTEMPT,
    FAILED,
    KEPT_SETTINGS,
    SETTING_NAMES,
    SNOOZES_MAX,
    TRANSITIONS,
    Advanced,
    AttemptOutcome,
    AttemptRecord,
    Completed,
    Failed,
    Fence,
    OutageReport,
    Outcome,
    Released,
    Settings,
    Snoozed,
    State,
    Stopped,
    Summary,
)
from fairturn.scheduling.flows import ArrivalEvent, EndEvent, band_of
from fairturn.scheduling.outages import PROBES_FREE, Report, ReportResult, after_report
from fairturn.stores.postgres import schema
from fairturn.stores.transitions import (
    Attempt,
    Ending,
    end_of,
    end_of_lease,
    finished_steps,
    without_oldest,
)
from fairturn.stores.values import CODES, COMPLETED

FENCE = Fence("d", 1)
OUTCOMES: list[Outcome] = [
    Completed(FENCE),
    Failed(FENCE, "x"),
    Failed(FENCE, "x", 5),
    Released(FENCE),
    Stopped(FENCE),
    Advanced(FENCE, "ocr"),
    Snoozed(FENCE, 5),
    OutageReport(FENCE, "down"),
]
REPORTED = after_report(None, Report(1, 1, "down", 5, others_wait=True), last_fence=1, now=0)
# A comparison of a state with a number, in SQL.
BARE_CODE = re.compile(r"\bstate\s*(=|<>|<|>|<=|>=|IN \()\s*\d")


def test_every_state_has_transitions_and_keeps_its_code() -> None:
    assert set(TRANSITIONS) == set(State)
    assert CODES == {
        State.DELAYED: 0,
        State.WAITING: 1,
        State.RUNNING: 2,
        State.COMPLETED: 3,
        State.DEAD: 4,
        State.CANCELLED: 5,
        State.EXPIRED: 6,
    }


def test_every_ended_state_has_a_retention_setting_a_counter_and_an_explanation() -> None:
    assert set(KEPT_SETTINGS.values()) == {n for n in SETTING_NAMES if n.endswith("_kept_s")}
    assert {state.value for state in ENDED} <= {each.name for each in fields(Summary)}
    assert {state.value for state in ENDED} <= set(Code)


def test_an_attempt_has_ended_in_every_state_that_a_waiting_document_cannot_enter() -> None:
    assert ENDED_BY_ATTEMPT == (State.COMPLETED, State.DEAD)
    assert TRANSITIONS[State.WAITING] == {State.RUNNING, State.CANCELLED, State.EXPIRED}


def test_an_ended_document_is_left_by_retry_alone() -> None:
    assert ENDED == (State.COMPLETED, State.DEAD, State.CANCELLED, State.EXPIRED)
    assert [TRANSITIONS[state] for state in ENDED] == [
        set(),
        {State.WAITING},
        set(),
        {State.WAITING, State.DELAYED},
    ]
    assert {CODES[state] for state in FAILED} == {c for c in CODES.values() if c > COMPLETED}


@pytest.mark.parametrize("attempts", [1, 5])
@pytest.mark.parametrize("cancelled", [False, True])
def test_an_attempt_ends_as_the_table_allows(attempts: int, cancelled: bool) -> None:
    attempt = Attempt(1, 1, 1, attempts, cancelled)

    endings = [ending_of(attempt, outcome) for outcome in OUTCOMES]
    endings.append(end_of_lease(attempt, Settings()))

    assert {ending.state for ending in endings} <= TRANSITIONS[State.RUNNING]


def ending_of(
    attempt: Attempt, outcome: Outcome, report: ReportResult = REPORTED, kind: int = 3
) -> Ending:
    return end_of(attempt, outcome, Settings(), 0, kind_number=lambda name: kind, report=report)


def test_a_step_ends_one_flow_and_begins_to_wait_in_another_of_the_same_level() -> None:
    attempt = Attempt(7, band_of(4, 2), 11, 1, cancelled=False)

    ending = ending_of(attempt, Advanced(FENCE, "ocr"))

    assert ending.event == EndEvent(7, band_of(4, 2), 1)
    assert ending.arrival == ArrivalEvent(7, band_of(4, 3), 11, 1)


@pytest.mark.parametrize(
    ("outcome", "counts", "stored_as"),
    [
        (Completed(FENCE), True, None),
        (Failed(FENCE, "x", 5), True, AttemptOutcome.FAILED),
        (Advanced(FENCE, "ocr"), True, AttemptOutcome.ADVANCED),
        (Snoozed(FENCE, 5), False, None),
        (OutageReport(FENCE, "down"), False, None),
        (Released(FENCE), False, None),
        (Stopped(FENCE), True, None),
    ],
)
def test_attempts_count_and_are_stored_by_their_outcome(
    outcome: Outcome, counts: bool, stored_as: AttemptOutcome | None
) -> None:
    ending = ending_of(Attempt(1, 1, 1, 1, cancelled=False), outcome)

    assert (ending.counts, ending.stored_as) == (counts, stored_as)


def test_a_report_after_many_probes_or_snoozes_fails_the_attempt() -> None:
    plain = Attempt(1, 1, 1, 1, cancelled=False)
    report = OutageReport(FENCE, "down")

    endings = [
        ending_of(plain._replace(snoozes=PROBES_FREE), report, REPORTED._replace(counts=True)),
        ending_of(plain._replace(snoozes=SNOOZES_MAX), report),
        ending_of(plain._replace(snoozes=SNOOZES_MAX, attempts=5), report),
    ]

    assert [(e.state, e.counts, e.stored_as, e.error) for e in endings] == [
        (State.DELAYED, True, "failed", "down"),
        (State.DELAYED, True, "failed", "down"),
        (State.DEAD, True, "failed", "down"),
    ]
    early = ending_of(
        plain._replace(snoozes=PROBES_FREE - 1), report, REPORTED._replace(counts=True)
    )
    assert (early.state, early.counts, early.stored_as) == (State.DELAYED, False, None)


def test_the_oldest_records_that_are_no_steps_are_left_out() -> None:
    step = AttemptRecord(0, "a", 1, "w", 0, 1, AttemptOutcome.ADVANCED)
    failures = [
        step._replace(outcome=AttemptOutcome.FAILED, attempt=n) for n in range(ATTEMPTS_STORED_MAX)
    ]

    assert without_oldest([step, *failures]) == [step, *failures[1:]]
    assert without_oldest([failures[0], step]) == [failures[0], step]
    assert [f.kind for f in finished_steps([failures[0], step])] == ["a"]


def test_no_statement_names_a_state_by_its_number() -> None:
    functions = [script for _, script in schema.function_scripts()]
    sources = Path(schema.__file__).parent.parent.rglob("*.py")

    found = [
        match[0]
        for text in [*functions, *(path.read_text("utf-8") for path in sources)]
        for match in BARE_CODE.finditer(text)
    ]

    assert found == []
