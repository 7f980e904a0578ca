"""Many documents in one call, on every store: late encoding makes no difference."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairturn import Queue, QueueFull, Submission
from fairturn.clock import SECOND_US, ManualClock
from fairturn.contents.local import Folder
from fairturn.model import INLINE_BYTES_MAX
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import assert_numbers_are_exact
from tests.servers.queues import Databases

NOON = 1_700_000_000 * SECOND_US
MANY = 1_000


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    clock, contents = ManualClock(NOON), Folder(tmp_path / "contents")
    if request.param == "postgres":
        with Databases() as made, Queue(made.new(), contents=contents, clock=clock) as queue:
            yield queue
        return
    database = ":memory:" if request.param == "memory" else str(tmp_path / "documents.db")
    with Queue(database, contents=contents, clock=clock) as queue:
        yield queue


def submissions(n: int = MANY) -> list[Submission]:
    return [Submission(customer=f"customer-{i % 7}", payload={"n": i}) for i in range(n)]


def assert_nothing_was_stored(queue: Queue) -> None:
    assert (queue.summary().waiting, queue.customers().customers) == (0, [])
    assert [r.count for r in queue.submit_many(submissions(70))[::7]] == [-i for i in range(10)]


def test_many_payloads_are_stored_as_one_by_one(queue: Queue) -> None:
    values = ["ü \\ \\N \t \n \x00 \ud800 \\.", -1, 2.5, True, None, "\\"]
    payloads = [{"n": i, f"key \\ {i}": values[i % len(values)]} for i in range(MANY)]

    receipts = queue.submit_many(
        Submission(customer=f"customer-{i % 7}", payload=p) for i, p in enumerate(payloads)
    )

    assert [(r.customer, r.count, r.submitted_at_us) for r in receipts] == [
        (f"customer-{i % 7}", -(i // 7), NOON) for i in range(MANY)
    ]
    assert [queue.payload(r.id) for r in receipts] == payloads
    alone = queue.submit("another", payload=payloads[0])
    assert queue.get(alone.id).size_bytes == queue.get(receipts[0].id).size_bytes
    assert queue.summary().waiting == MANY + 1


@pytest.mark.parametrize("mode", Mode)
def test_what_came_is_counted_and_claimed_in_every_mode(queue: Queue, mode: Mode) -> None:
    queue.configure(mode=mode)
    queue.submit_many(submissions())

    assert_numbers_are_exact(queue.store)

    claimed = queue.store.claim(MANY, worker="w", lease_us=SECOND_US).claims
    assert sorted(c.document.id for c in claimed) == sorted(d.id for d in queue.iterate())
    assert_numbers_are_exact(queue.store)


def test_a_payload_is_taken_as_it_is_when_it_is_handed_in(queue: Queue) -> None:
    def reusing() -> Iterator[Submission]:
        payload: dict[str, Any] = {}
        for i in range(MANY):
            payload["n"] = i
            yield Submission(customer="acme", payload=payload)
        payload.clear()

    receipts = queue.submit_many(reusing())

    assert [queue.payload(r.id) for r in receipts] == [{"n": i} for i in range(MANY)]


def test_so_is_one_with_values_inside_of_values(queue: Queue) -> None:
    def reusing() -> Iterator[Submission]:
        payload: dict[str, Any] = {"pages": []}
        for i in range(200):
            yield Submission(customer="acme", payload={"n": i})
            payload["pages"].append(i)
            yield Submission(customer="acme", payload=payload)

    receipts = queue.submit_many(reusing())

    assert [queue.payload(r.id) for r in receipts[::2]] == [{"n": i} for i in range(200)]
    assert [len(queue.payload(r.id)["pages"]) for r in receipts[1::2]] == list(range(1, 201))


@pytest.mark.parametrize("at", [0, 400, 900])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (Submission(customer="acme", payload={"n": float("nan")}), ValueError),
        (Submission(customer="acme", payload={(1, 2): 3}), TypeError),
        (Submission(customer="acme", payload={"n": object()}), TypeError),
        (Submission(customer="", payload={"n": 1}), ValueError),
        ({"n": 1}, TypeError),
        (None, TypeError),
    ],
)
def test_one_that_is_wrong_is_named_and_none_is_stored(
    queue: Queue, at: int, wrong: Any, error: type[Exception]
) -> None:
    given = submissions()
    given[at] = wrong

    with pytest.raises(error, match=f"^submission {at}: "):
        queue.submit_many(given)

    assert_nothing_was_stored(queue)


def test_a_producer_that_fails_midway_stores_nothing(queue: Queue) -> None:
    def failing() -> Iterator[Submission]:
        yield from submissions(900)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        queue.submit_many(failing())

    assert_nothing_was_stored(queue)


def test_the_first_of_two_that_are_wrong_is_named(queue: Queue) -> None:
    given = submissions()
    given[500] = Submission(customer="acme", payload={"n": float("inf")})
    given[700] = Submission(customer="", payload={"n": 1})

    with pytest.raises(ValueError, match="^submission 500: the payload"):
        queue.submit_many(given)

    assert_nothing_was_stored(queue)


def test_one_too_large_for_its_row_goes_where_large_ones_go(queue: Queue) -> None:
    given = submissions()
    given[900] = Submission(customer="acme", payload={"n": "x" * INLINE_BYTES_MAX})

    receipts = queue.submit_many(given)

    assert queue.payload(receipts[900].id) == given[900].payload
    assert queue.get(receipts[900].id).content_name is not None
    assert [r.count for r in receipts[:7]] == [0] * 7
    assert queue.summary().waiting == MANY


def test_too_many_are_refused_whole(queue: Queue) -> None:
    queue.configure(waiting_per_customer_max=MANY - 1)

    with pytest.raises(QueueFull, match="waiting_per_customer_max is 999") as full:
        queue.submit_many([Submission(customer="acme", payload={"n": i}) for i in range(MANY)])

    assert full.value.waiting == 0
    assert_nothing_was_stored(queue)


def test_too_many_in_all_are_refused_whole(queue: Queue) -> None:
    queue.configure(waiting_max=MANY - 1, waiting_per_customer_max=MANY - 1)

    with pytest.raises(QueueFull, match="waiting_max is 999"):
        queue.submit_many(submissions())

    assert_nothing_was_stored(queue)
