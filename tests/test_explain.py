"""Explanations: the reasons for each document, with their parameters, by audience."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairturn import Completed, Failed, NotFound, Queue, Submission
from fairturn.clock import SECOND_US, ManualClock
from fairturn.explain.analysis import Audience, Explanation, explain
from fairturn.explain.reasons import Code
from fairturn.explain.snapshot import CountRange, DocumentSnapshot
from fairturn.model import Claim
from fairturn.scheduling.flows import Mode

START = 1_700_000_000 * SECOND_US
LEASE_US = 3_600 * SECOND_US


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture(params=["memory", "sqlite"])
def queue(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> Iterator[Queue]:
    name = ":memory:" if request.param == "memory" else tmp_path / "documents.db"
    with Queue(name, clock=clock, synchronous="NORMAL") as opened:
        yield opened


def submit(queue: Queue, customers: str) -> list[str]:
    receipts = queue.submit_many(Submission(customer=name) for name in customers)
    return [receipt.id for receipt in receipts]


def claim(queue: Queue, n: int = 1, worker: str = "w") -> list[Claim]:
    return queue.store.claim(n, worker=worker, lease_us=LEASE_US).claims


def codes(explanation: Explanation) -> list[Code]:
    return [reason.code for reason in explanation.reasons]


def parameters(explanation: Explanation, code: Code) -> dict[str, Any]:
    (found,) = [dict(r.parameters) for r in explanation.reasons if r.code is code]
    return found


def snapshot(queue: Queue, id: str) -> DocumentSnapshot:
    found = queue.store.snapshot(id)
    assert found is not None
    return found


# ── The priority ─────────────────────────────────────────────────────────────────────────────────


def test_a_priority_is_explained_by_which_document_since_the_last_reset_it_was(
    queue: Queue, clock: ManualClock
) -> None:
    first, *_, fifth = submit(queue, "aaaaa")

    assert parameters(queue.explain(first), Code.PRIORITY_FIRST) == {"priority": 1}
    assert parameters(queue.explain(fifth), Code.PRIORITY_COUNTED) == {
        "priority": 2,
        "count": -4,
        "document": 5,
    }
    clock.advance(1_501)
    (after_a_pause,) = submit(queue, "a")
    assert Code.PRIORITY_FIRST in codes(queue.explain(after_a_pause))


def test_the_count_of_the_customer_is_told_with_its_reset(queue: Queue, clock: ManualClock) -> None:
    first, _ = submit(queue, "aa")
    clock.advance(100)

    assert parameters(queue.explain(first), Code.COUNT_RESETS) == {
        "count": -1,
        "resets_at": START + 1_500 * SECOND_US,
        "resets_in_us": 1_400 * SECOND_US,
        "reset": "idle",
    }
    clock.advance(1_400)
    assert Code.COUNT_RESETS in codes(queue.explain(first))  # 1500 s are not more than the interval
    clock.advance(0.000_001)
    assert Code.COUNT_IS_RESET in codes(queue.explain(first))


def test_a_document_made_by_another_has_its_priority_from_it(queue: Queue) -> None:
    *_, parent = submit(queue, "aaaa")
    child = queue.submit("a", parent=parent).id

    assert parameters(queue.explain(child), Code.PRIORITY_OF_PARENT) == {
        "priority": 2,
        "count": -3,
        "parent": parent,
    }


def test_a_document_made_by_one_that_is_gone_is_not_counted_among_those_that_were_checked(
    queue: Queue,
) -> None:
    *_, parent = submit(queue, "aaaa")
    child = queue.submit("a", parent=parent).id
    found = replace(snapshot(queue, child), parent_count=None)

    assert codes(explain(found))[0] is Code.PRIORITY_OF_PARENT


@pytest.mark.parametrize(
    ("mode", "code"), [(Mode.LEVELS, Code.MODE_LEVELS), (Mode.EQUAL, Code.MODE_EQUAL)]
)
def test_another_order_than_the_usual_one_is_named(queue: Queue, mode: Mode, code: Code) -> None:
    (id,) = submit(queue, "a")
    assert code not in codes(queue.explain(id))

    queue.configure(mode=mode)

    assert code in codes(queue.explain(id))


# ── What is before it, and what is in its way ────────────────────────────────────────────────────


def test_what_is_before_a_document_is_told_part_by_part(queue: Queue) -> None:
    *_, target = submit(queue, "bbbccaaaa")

    told = queue.explain(target)

    assert told.position is not None
    assert told.position.bounds == CountRange(8, 8)
    assert parameters(told, Code.POSITION) == {"documents": 8}
    assert parameters(told, Code.BEFORE_BETTER_LEVELS) == {"documents": 5}
    assert parameters(told, Code.BEFORE_OWN) == {"documents": 3}
    assert Code.BEFORE_OTHER_CUSTOMERS not in codes(told)


def test_turns_of_others_are_told_to_an_operator_by_name_and_to_a_customer_as_a_number(
    queue: Queue,
) -> None:
    *_, target = submit(queue, "bbcaa")

    told = queue.explain(target)
    shown = queue.explain(target, "customer")

    assert parameters(told, Code.BEFORE_OTHER_CUSTOMERS) == {
        "documents": 3,
        "customers": 2,
        "largest": (("b", 2), ("c", 1)),
    }
    assert parameters(shown, Code.BEFORE_OTHER_CUSTOMERS) == {
        "documents": 3,
        "customers": 2,
        "largest": (),
    }
    assert shown.position is not None
    assert shown.position.turns == {}


def test_nothing_that_a_customer_is_told_names_another_customer_or_a_worker(
    queue: Queue, clock: ManualClock
) -> None:
    ids = [
        receipt.id
        for receipt in queue.submit_many(
            Submission(customer=name) for name in ["secret", "own", "secret", "own", "secret"]
        )
    ]
    clock.advance(1)
    claims = claim(queue, 2, worker="hidden") + claim(queue, 1, worker="hidden")
    clock.advance(130)
    queue.store.finish([Completed(claims[1].fence)])

    for id in ids:
        told = repr(queue.explain(id, Audience.CUSTOMER))
        assert "secret" not in told
        assert "hidden" not in told
    assert any("hidden" in repr(queue.explain(id)) for id in ids)


def test_the_next_document_is_told_so(queue: Queue) -> None:
    first, _ = submit(queue, "ab")

    assert Code.NEXT in codes(queue.explain(first))


def test_a_paused_customer_is_a_reason_and_leaves_no_position(queue: Queue) -> None:
    (id,) = submit(queue, "a")
    queue.set_customer("a", paused=True)

    told = queue.explain(id)

    assert Code.CUSTOMER_PAUSED in codes(told)
    assert told.position is None
    assert told.forecast is None


def test_a_limit_that_is_reached_is_an_answer(queue: Queue) -> None:
    *_, last = submit(queue, "aaaaaa")
    queue.set_customer("a", limit=4)
    claim(queue, 6)

    told = queue.explain(last)

    assert parameters(told, Code.LIMIT_REACHED) == {"limit": 4}
    assert told.forecast is None


def test_a_document_that_has_lost_its_lease_does_not_count_for_the_limit(
    queue: Queue, clock: ManualClock
) -> None:
    first, second = submit(queue, "aa")
    queue.set_customer("a", limit=1)
    claim(queue)
    assert Code.LIMIT_REACHED in codes(queue.explain(second))

    clock.advance(3_601)

    assert Code.LIMIT_REACHED not in codes(queue.explain(first))  # its own lease has expired
    assert codes(queue.explain(second)).count(Code.LIMIT_AHEAD) == 1


def test_a_limit_that_will_be_reached_before_it_is_told_too(queue: Queue) -> None:
    first, second, third = submit(queue, "aaa")
    queue.set_customer("a", limit=2)

    assert Code.LIMIT_AHEAD not in codes(queue.explain(second))
    told = queue.explain(third)
    assert parameters(told, Code.LIMIT_AHEAD) == {"limit": 2}
    assert Code.LIMIT_AHEAD not in codes(queue.explain(first))


def test_the_bounds_are_told_with_why_they_are_not_one_number(queue: Queue) -> None:
    *_, target = submit(queue, "bbbaa")
    queue.set_customer("b", limit=1)

    told = queue.explain(target)

    assert parameters(told, Code.POSITION_BETWEEN)["least"] == 2
    assert Code.BETWEEN_LIMITS in codes(told)


def test_a_weight_is_told_where_it_matters(queue: Queue) -> None:
    (id,) = submit(queue, "a")
    queue.set_customer("a", weight=2.5)

    assert parameters(queue.explain(id), Code.WEIGHT) == {"weight": 2.5}
    queue.configure(mode="levels")
    assert Code.WEIGHT not in codes(queue.explain(id))


def test_a_document_that_waits_too_long_is_told_who_waits_longer(
    queue: Queue, clock: ManualClock
) -> None:
    (older,) = submit(queue, "a")
    claim(queue, 1)
    submit(queue, "b")
    clock.advance(1)
    (target,) = submit(queue, "c")
    clock.advance(120)
    assert Code.PATIENCE_OVER not in codes(queue.explain(target))

    clock.advance(0.5)

    assert parameters(queue.explain(target), Code.PATIENCE_OVER) == {
        "since_at": START + SECOND_US,
        "since_us": 120_500_000,
        "customers": 1,
    }
    assert Code.PATIENCE_OVER not in codes(queue.explain(older))


def test_a_document_that_is_not_due_or_between_two_attempts_says_when(
    queue: Queue, clock: ManualClock
) -> None:
    due = queue.submit("a", due_at=START + 60 * SECOND_US).id
    (failing,) = submit(queue, "b")
    (claimed,) = claim(queue)
    queue.store.finish([Failed(claimed.fence, "x", 30 * SECOND_US)])

    assert parameters(queue.explain(due), Code.NOT_DUE)["due_in_us"] == 60 * SECOND_US
    again = parameters(queue.explain(failing), Code.RETRIED_LATER)
    assert (again["due_in_us"], again["attempts"]) == (30 * SECOND_US, 1)
    clock.advance(61)
    assert queue.explain(due).position is not None


# ── When it will start ───────────────────────────────────────────────────────────────────────────


def test_no_worker_is_an_answer(queue: Queue, clock: ManualClock) -> None:
    (id,) = submit(queue, "a")
    told = queue.explain(id)
    assert parameters(told, Code.NO_WORKER) == {"seen_at": None, "seen_us": None}
    assert told.forecast is None

    queue.store.sign_on("w", 4)
    assert Code.NO_WORKER not in codes(queue.explain(id))
    clock.advance(60)

    assert parameters(queue.explain(id), Code.NO_WORKER)["seen_us"] == 60 * SECOND_US


def test_when_it_starts_is_told_from_what_ended_lately(queue: Queue, clock: ManualClock) -> None:
    ids = submit(queue, "a" * 60)
    *_, last = ids
    first = claim(queue, 2)
    assert Code.START_UNKNOWN in codes(queue.explain(last))
    for _ in range(5):
        clock.advance(10)
        queue.store.finish([Completed(claimed.fence) for claimed in first])
        first = claim(queue, 2)

    told = queue.explain(last)

    assert told.forecast is not None
    between = parameters(told, Code.STARTS_BETWEEN)
    assert between["confidence"] == 0.9
    assert between["earliest_us"] < 240 * SECOND_US < between["latest_us"]
    assert parameters(told, Code.WORKERS) == {"workers": 1, "running": 2}


# ── What happened ────────────────────────────────────────────────────────────────────────────────


def test_a_running_document_says_since_when_and_who_was_served_while_it_waited(
    queue: Queue, clock: ManualClock
) -> None:
    submit(queue, "b")
    (target,) = submit(queue, "a")
    clock.advance(5)
    claim(queue)
    clock.advance(5)
    claim(queue)
    clock.advance(7)

    told = queue.explain(target)

    assert parameters(told, Code.RUNNING) == {
        "claimed_at": START + 10 * SECOND_US,
        "running_us": 7 * SECOND_US,
        "worker": "w",
    }
    assert parameters(told, Code.WAITED)["waited_us"] == 10 * SECOND_US
    assert parameters(told, Code.SERVED_MEANWHILE)["largest"] == (("b", 1),)
    assert told.position is None
    queue.cancel(target)
    assert Code.STOPPING in codes(queue.explain(target))


def test_ended_documents_say_how_they_ended(queue: Queue, clock: ManualClock) -> None:
    done, dead, gone = submit(queue, "abc")
    queue.cancel(gone)
    first, second = claim(queue, 2)
    clock.advance(4)
    queue.store.finish([Completed(first.fence), Failed(second.fence, "unreadable")])

    clock.advance(2)
    ended = {
        "claimed_at": START,
        "ended_at": START + 4 * SECOND_US,
        "ended_us": 2 * SECOND_US,
        "worker": "w",
    }
    assert parameters(queue.explain(done), Code.COMPLETED) == ended | {"took_us": 4 * SECOND_US}
    assert parameters(queue.explain(dead), Code.DEAD) == ended | {"error": "unreadable"}
    assert Code.CANCELLED in codes(queue.explain(gone))


def test_a_document_whose_worker_is_gone_will_be_claimed_again(
    queue: Queue, clock: ManualClock
) -> None:
    (id,) = submit(queue, "a")
    claim(queue)
    assert Code.LEASE_EXPIRED not in codes(queue.explain(id))

    clock.advance(3_601)

    told = queue.explain(id)
    assert Code.LEASE_EXPIRED in codes(told)
    assert told.position is not None
    assert not {Code.RUNNING, Code.WAITED} & set(codes(told))
    assert parameters(told, Code.ATTEMPTS)["attempts"] == 1


def test_a_document_whose_worker_is_gone_for_the_last_time_is_told_so(
    queue: Queue, clock: ManualClock
) -> None:
    queue.configure(attempts_max=1)
    (id,) = submit(queue, "a")
    claim(queue)
    clock.advance(3_601)

    told = queue.explain(id)

    assert Code.LEASE_EXPIRED_LAST in codes(told)
    assert not {Code.RUNNING, Code.LEASE_EXPIRED} & set(codes(told))


def test_a_document_with_a_due_time_waited_from_then_on(queue: Queue, clock: ManualClock) -> None:
    id = queue.submit("a", due_at=START + 60 * SECOND_US).id
    submit(queue, "b")
    clock.advance(59)
    claim(queue)  # of b, before the document is due
    clock.advance(4)
    claim(queue)

    told = queue.explain(id)

    assert parameters(told, Code.WAITED)["waited_us"] == 3 * SECOND_US
    assert Code.SERVED_MEANWHILE not in codes(told)


def test_the_error_of_the_last_attempt_is_told_as_long_as_there_is_another_one(
    queue: Queue, clock: ManualClock
) -> None:
    (id,) = submit(queue, "a")
    (claimed,) = claim(queue)
    queue.store.finish([Failed(claimed.fence, "unreadable", SECOND_US)])

    assert parameters(queue.explain(id), Code.LAST_ERROR) == {"error": "unreadable"}
    clock.advance(2)
    assert parameters(queue.explain(id), Code.LAST_ERROR) == {"error": "unreadable"}
    (claimed,) = claim(queue)
    queue.store.finish([Completed(claimed.fence)])
    assert Code.LAST_ERROR not in codes(queue.explain(id))


def test_what_was_claimed_again_later_may_have_been_served_meanwhile_too(
    queue: Queue, clock: ManualClock
) -> None:
    submit(queue, "bc")
    (target,) = submit(queue, "a")
    clock.advance(1)
    first, _ = claim(queue, 2)
    clock.advance(1)
    claim(queue)
    assert parameters(queue.explain(target), Code.SERVED_MEANWHILE)["documents"] == 2
    queue.store.finish([Failed(first.fence, "x", SECOND_US)])
    clock.advance(2)

    claim(queue)

    assert parameters(queue.explain(target), Code.SERVED_AT_LEAST)["documents"] == 1


def test_the_number_of_attempts_is_told_when_there_was_more_than_one(
    queue: Queue, clock: ManualClock
) -> None:
    (id,) = submit(queue, "a")
    (claimed,) = claim(queue)
    assert Code.ATTEMPTS not in codes(queue.explain(id))
    queue.store.finish([Failed(claimed.fence, "x", 0)])
    clock.advance(1)
    claim(queue)

    assert parameters(queue.explain(id), Code.ATTEMPTS) == {"attempts": 2, "attempts_max": 5}


# ── The value itself ─────────────────────────────────────────────────────────────────────────────


def test_a_document_that_is_not_there_is_not_explained(queue: Queue) -> None:
    with pytest.raises(NotFound, match="there is no document"):
        queue.explain("0" * 15)


def test_an_audience_that_is_none_is_refused(queue: Queue) -> None:
    (id,) = submit(queue, "a")

    with pytest.raises(ValueError, match="nobody"):
        queue.explain(id, "nobody")


def test_a_code_is_found_by_its_text_and_names_its_parameters() -> None:
    assert Code("not_due") is Code.NOT_DUE
    assert Code.NOT_DUE.value == f"{Code.NOT_DUE}" == "not_due"
    assert Code.NOT_DUE.parameters == ("due_at", "due_in_us")


def test_every_code_stands_in_the_page_with_its_parameters() -> None:
    page = (Path(__file__).parent.parent / "docs" / "explain.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page.partition("## The codes")[2], re.MULTILINE)

    in_the_page = {code: tuple(re.findall(r"`(\w+)`", names)) for code, names in rows}
    assert in_the_page == {code: code.parameters for code in Code}


def test_an_explanation_follows_from_the_situation_alone(queue: Queue, clock: ManualClock) -> None:
    *_, id = submit(queue, "abcabc")
    found = snapshot(queue, id)
    clock.advance(1_000)
    claim(queue, 3)

    assert explain(found) == explain(found)
    assert explain(replace(found, at=found.at + 1)) != explain(found)
