"""The states of a document: one table, and its derivations."""

import re
from pathlib import Path

import pytest

from fairturn.model import (
    ENDED,
    FAILED,
    TRANSITIONS,
    Completed,
    Failed,
    Fence,
    Outcome,
    Released,
    Settings,
    State,
    Stopped,
)
from fairturn.stores.postgres import schema
from fairturn.stores.transitions import Attempt, end_of, end_of_lease
from fairturn.stores.values import CODES, COMPLETED, STATES

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


def test_every_state_has_a_code_and_its_transitions() -> None:
    assert set(TRANSITIONS) == set(STATES) == set(State) == set(CODES)


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
