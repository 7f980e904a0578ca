"""The states of a document: one table, and its derivations."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from fairturn.explain.reasons import Code
from fairturn.model import (
    ENDED,
    ENDED_BY_ATTEMPT,
    FAILED,
    KEPT_SETTINGS,
    SETTING_NAMES,
    TRANSITIONS,
    Completed,
    Failed,
    Fence,
    Outcome,
    Released,
    Settings,
    State,
    Stopped,
    Summary,
)
from fairturn.stores.postgres import schema
from fairturn.stores.transitions import Attempt, end_of, end_of_lease
from fairturn.stores.values import CODES, COMPLETED

FENCE = Fence("d", 1)
OUTCOMES: list[Outcome] = [
    Completed(FENCE),
    Failed(FENCE, "x"),
    Failed(FENCE, "x", 5),
    Released(FENCE),
    Stopped(FENCE),
]
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
    }


def test_every_ended_state_has_a_retention_setting_a_counter_and_an_explanation() -> None:
    assert set(KEPT_SETTINGS.values()) == {n for n in SETTING_NAMES if n.endswith("_kept_s")}
    assert {state.value for state in ENDED} <= {each.name for each in fields(Summary)}
    assert {state.value for state in ENDED} <= set(Code)


def test_an_attempt_has_ended_in_every_state_that_a_waiting_document_cannot_enter() -> None:
    assert ENDED_BY_ATTEMPT == (State.COMPLETED, State.DEAD)
    assert TRANSITIONS[State.WAITING] == {State.RUNNING, State.CANCELLED}


def test_an_ended_document_is_left_by_retry_alone() -> None:
    assert ENDED == (State.COMPLETED, State.DEAD, State.CANCELLED)
    assert [TRANSITIONS[state] for state in ENDED] == [set(), {State.WAITING}, set()]
    assert {CODES[state] for state in FAILED} == {c for c in CODES.values() if c > COMPLETED}


@pytest.mark.parametrize("attempts", [1, 5])
@pytest.mark.parametrize("cancelled", [False, True])
def test_an_attempt_ends_as_the_table_allows(attempts: int, cancelled: bool) -> None:
    attempt = Attempt(1, 1, 1, attempts, cancelled)

    endings = [end_of(attempt, outcome, Settings(), 0) for outcome in OUTCOMES]
    endings.append(end_of_lease(attempt, Settings()))

    assert {ending.state for ending in endings} <= TRANSITIONS[State.RUNNING]


def test_no_statement_names_a_state_by_its_number() -> None:
    functions = [script for _, script in schema.function_scripts()]
    sources = Path(schema.__file__).parent.parent.rglob("*.py")

    found = [
        match[0]
        for text in [*functions, *(path.read_text("utf-8") for path in sources)]
        for match in BARE_CODE.finditer(text)
    ]

    assert found == []
