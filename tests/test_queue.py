"""The API on every store: submitting, querying, waiting and operating."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairturn import Queue, Submission
from fairturn.clock import ManualClock, from_datetime, to_datetime
from fairturn.errors import (
    ContentDamaged,
    FairturnError,
    KeyReused,
    NotFound,
    QueueFull,
    Refused,
    StoreError,
    StoreFull,
    StoreUnavailable,
    WrongState,
)
from fairturn.model import (
    PAGE_MAX,
    SUBMIT_DOCUMENTS_MAX,
    Claim,
    Completed,
    Failed,
    Filter,
    NewDocument,
    Receipt,
    State,
    Stored,
)
from fairturn.priority import Reset
from fairturn.scheduling.flows import Costs, Mode
from fairturn.stores.memory import MemoryStore
from fairturn.validation.filters import FILTERS, Filters

NOON = 1_800_000_000_000_000
DAY_S = 86_400.0
LEASE_US = 30_000_000
LARGE = b"x" * 100_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture(params=["memory", "sqlite"])
def queue(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Queue]:
    database = ":memory:" if request.param == "memory" else tmp_path / "documents.db"
    with Queue(database, clock=clock) as queue:
        yield queue


def claim(queue: Queue, n: int = 1) -> list[Claim]:
    return queue.store.claim(n, worker="w", lease_us=LEASE_US).claims


def complete(queue: Queue, result: str | None = None) -> str:
    (claimed,) = claim(queue)
    queue.store.finish([Completed(claimed.fence, result)])
    return claimed.document.id


def fail(queue: Queue, error: str) -> str:
    (claimed,) = claim(queue)
    queue.store.finish([Failed(claimed.fence, error)])
    return claimed.document.id


def contents_in(queue: Queue) -> set[str]:
    return set(queue.contents.names(older_than=1 << 62))


# ── Submitting ───────────────────────────────────────────────────────────────────────────────────


def test_a_receipt_tells_id_count_priority_and_moment(queue: Queue) -> None:
    receipts = [queue.submit("acme", payload={"n": n}) for n in range(4)]

    assert [(r.customer, r.count, r.priority, r.submitted_at_us, r.replayed) for r in receipts] == [
        ("acme", 0, 1, NOON, False),
        ("acme", -1, 1, NOON, False),
        ("acme", -2, 1, NOON, False),
        ("acme", -3, 2, NOON, False),
    ]
    assert [queue.payload(r.id) for r in receipts] == [{"n": n} for n in range(4)]


def test_many_documents_are_accepted_in_the_order_given(queue: Queue, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"file")

    receipts = queue.submit_many(
        [
            Submission(customer="acme", payload=1),
            Submission(customer="acme", content=b"bytes", metadata={"a": 1}),
            Submission(customer="bolt", file=file, cost=2.5),
            Submission(customer="acme", payload=2, name="two"),
        ]
    )

    assert [(r.customer, r.count) for r in receipts] == [
        ("acme", 0),
        ("acme", -1),
        ("bolt", 0),
        ("acme", -2),
    ]
    documents = [queue.get(r.id) for r in receipts]
    assert [d.name for d in documents] == [None, None, "a.txt", "two"]
    assert queue.read(receipts[2].id) == b"file"
    assert documents[1].metadata == {"a": 1}


@pytest.mark.parametrize("kind", ["", "OCR", ".", "..", "a/b", "fairturn.x", "x" * 65])
def test_a_worker_signs_on_with_valid_names_of_kinds_only(queue: Queue, kind: str) -> None:
    with pytest.raises(ValueError, match="^kind "):
        queue.sign_on("w", 1, ["ocr", kind])

    assert [each.name for each in queue.kinds()] == ["default"]


def test_no_documents_at_all_are_accepted_too(queue: Queue) -> None:
    assert queue.submit_many([]) == []


def test_one_document_that_is_refused_refuses_all_and_is_named(queue: Queue) -> None:
    submissions = [
        Submission(customer="acme", content=LARGE),
        Submission(customer="acme", payload=1),
        Submission(customer="", payload=2),
    ]

    with pytest.raises(ValueError, match="submission 2: customer is empty"):
        queue.submit_many(submissions)

    assert queue.summary().waiting == 0
    assert contents_in(queue) == set()
    assert queue.submit("acme").count == 0


@pytest.mark.parametrize("wrong", [{"customer": "acme"}, None, "acme"])
def test_what_is_no_submission_is_refused_by_its_place(queue: Queue, wrong: Any) -> None:
    with pytest.raises(TypeError, match="submission 1: .* is not a Submission"):
        queue.submit_many([Submission(customer="acme"), wrong])

    assert queue.summary().waiting == 0


def test_an_error_of_the_producer_is_passed_on_and_nothing_is_kept(queue: Queue) -> None:
    def submissions() -> Iterator[Submission]:
        yield Submission(customer="acme", content=LARGE)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        queue.submit_many(submissions())

    assert (queue.summary().waiting, contents_in(queue)) == (0, set())


def test_more_documents_than_fit_into_one_call_are_refused_without_reading_them_all(
    queue: Queue,
) -> None:
    read = 0

    def endless() -> Iterator[Submission]:
        nonlocal read
        while True:
            read += 1
            yield Submission(customer="acme")

    with pytest.raises(ValueError, match="at most 10,000 documents"):
        queue.submit_many(endless())

    assert read == SUBMIT_DOCUMENTS_MAX + 1
    assert queue.summary().waiting == 0


def test_a_call_that_copies_longer_than_a_sweep_would_wait_is_refused(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1_800.5])
    monkeypatch.setattr("fairturn.queue.stopwatch", lambda: next(times))

    with pytest.raises(Refused, match="1 documents took more than 30 minutes"):
        queue.submit_many([Submission(customer="acme", content=LARGE)])

    assert (queue.summary().waiting, contents_in(queue)) == (0, set())


def test_a_child_takes_its_parents_priority_and_another_customers_document_is_no_parent(
    queue: Queue,
) -> None:
    for _ in range(4):
        parent = queue.submit("acme")

    child = queue.submit("acme", parent=parent.id)

    assert (child.count, child.priority) == (-3, 2)
    assert queue.get(child.id).parent == parent.id
    with pytest.raises(NotFound, match="customer 'bolt' has no document"):
        queue.submit("bolt", parent=parent.id, content=LARGE)
    assert contents_in(queue) == set()


# ── Submitting again ─────────────────────────────────────────────────────────────────────────────


def test_the_same_key_gives_the_first_receipt_and_keeps_one_content(
    queue: Queue, clock: ManualClock, tmp_path: Path
) -> None:
    file = tmp_path / "scan.pdf"
    file.write_bytes(LARGE)
    first = queue.submit("acme", file=file, key="k", metadata={"a": 1, "b": 2}, cost=3)
    contents = contents_in(queue)
    clock.advance(1_500)

    again = queue.submit("acme", file=file, key="k", metadata={"b": 2, "a": 1}, cost=3.0)

    assert again == first._replace(replayed=True)
    assert contents_in(queue) == contents
    assert queue.read(again.id) == LARGE
    assert queue.submit("acme").count == -1


def test_equal_payloads_are_the_same_however_their_keys_are_ordered(queue: Queue) -> None:
    first = queue.submit("acme", payload={"a": [1, {"x": 1, "y": 2}], "b": "é"}, key="k")

    again = queue.submit("acme", payload={"b": "é", "a": [1, {"y": 2, "x": 1}]}, key="k")

    assert (again.id, again.replayed) == (first.id, True)


CHANGES: dict[str, dict[str, Any]] = {
    "payload": {"payload": {"n": 2}},
    "kind": {"payload": None, "content": b'{"n":1}'},
    "metadata": {"metadata": {"a": 2}},
    "no metadata": {"metadata": None},
    "cost": {"cost": 2},
    "no cost": {"cost": None},
    "due time": {"due_at": NOON + 1},
    "no due time": {"due_at": None},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_the_same_key_with_another_document_is_refused(
    queue: Queue, change: dict[str, Any]
) -> None:
    given: dict[str, Any] = {
        "payload": {"n": 1},
        "metadata": {"a": 1},
        "cost": 1,
        "due_at": NOON,
        "key": "k",
    }
    first = queue.submit("acme", **given)

    with pytest.raises(
        KeyReused, match=f"key 'k' of customer 'acme' belongs to document {first.id}"
    ):
        queue.submit("acme", **{**given, **change})

    assert queue.submit("acme", **given).id == first.id
    assert queue.submit("bolt", **{**given, **change}).replayed is False


def test_the_same_key_with_another_large_content_leaves_no_content(queue: Queue) -> None:
    queue.submit("acme", content=LARGE, key="k")
    contents = contents_in(queue)

    with pytest.raises(KeyReused):
        queue.submit("acme", content=LARGE + b"!", key="k")

    assert contents_in(queue) == contents


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=12))
def test_any_mix_of_keys_moves_the_count_once_for_each_key(keys: list[tuple[str, int]]) -> None:
    with Queue(":memory:") as queue:
        seen: dict[tuple[str, int], Receipt] = {}
        for customer, number in keys:
            receipt = queue.submit(customer, payload=number, key=f"k{number}")
            known = seen.setdefault((customer, number), receipt)
            assert receipt == known._replace(replayed=receipt is not known)

        assert queue.summary().waiting == len(seen)


class FailingStore(MemoryStore):
    """A store that fails before or after it has stored."""

    error: FairturnError
    stores = False

    def submit(self, documents: Any, *, connection: Any = None) -> list[Receipt]:
        if self.stores:
            super().submit(documents)
        raise self.error


@pytest.mark.parametrize(
    "error", [StoreFull("full"), QueueFull(limit="x", maximum=1, waiting=1, customer=None)]
)
def test_what_stored_nothing_keeps_no_content(error: FairturnError) -> None:
    store = FailingStore()
    store.error = error
    with Queue(store) as queue:
        with pytest.raises(type(error)):
            queue.submit("acme", content=LARGE)

        assert contents_in(queue) == set()


def test_when_nobody_knows_whether_it_was_stored_the_content_is_kept() -> None:
    store = FailingStore()
    store.error, store.stores = StoreUnavailable("the connection was lost during the commit"), True
    with Queue(store) as queue:
        with pytest.raises(StoreUnavailable):
            queue.submit("acme", content=LARGE)

        (document,) = queue.iterate()
        assert queue.read(document.id) == LARGE


# ── Limits ───────────────────────────────────────────────────────────────────────────────────────


def test_a_full_queue_refuses_and_moves_no_count(queue: Queue) -> None:
    queue.configure(waiting_per_customer_max=2)
    queue.submit("acme")

    with pytest.raises(QueueFull, match="waiting_per_customer_max is 2") as full:
        queue.submit_many([Submission(customer="acme", content=LARGE)] * 2)

    assert full.value.customer == "acme"
    assert contents_in(queue) == set()
    assert queue.submit("acme").count == -1
    assert queue.submit("bolt").count == 0


def test_a_producer_can_wait_for_room(queue: Queue) -> None:
    queue.configure(waiting_per_customer_max=2, waiting_max=3)
    queue.submit("acme", due_at=NOON + 10**9)
    queue.submit("acme")

    assert queue.wait_for_room("acme", timeout_s=0) is False
    assert queue.wait_for_room("bolt", timeout_s=0) is True
    assert queue.wait_for_room(timeout_s=0) is True
    assert queue.wait_for_room(n=2, timeout_s=0) is False
    claim(queue)
    assert queue.wait_for_room("acme", timeout_s=0) is True
    assert queue.wait_for_room("bolt", n=2, timeout_s=0) is True


def test_room_that_comes_wakes_the_producer(queue: Queue) -> None:
    queue.configure(waiting_max=1)
    queue.submit("acme")
    answers: list[bool] = []
    waiting = threading.Thread(
        target=lambda: answers.append(queue.wait_for_room("acme", timeout_s=60))
    )
    waiting.start()

    claim(queue)
    waiting.join(60)

    assert answers == [True]


@pytest.mark.parametrize(
    ("customer", "n", "sentence"),
    [
        ("acme", 0, "n is 0"),
        ("acme", 3, "n is 3; it must be at most 2"),
        (None, 4, "n is 4"),
        ("", 1, "empty"),
    ],
)
def test_room_that_can_never_be_there_is_misuse(
    queue: Queue, customer: str | None, n: int, sentence: str
) -> None:
    queue.configure(waiting_per_customer_max=2, waiting_max=3)

    with pytest.raises(ValueError, match=sentence):
        queue.wait_for_room(customer, n, timeout_s=0)


# ── Looking ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("id", ["", "nonsense", "0123456789abcde", "\ud800", "../x"])
@pytest.mark.parametrize(
    "look", [Queue.get, Queue.payload, Queue.open, Queue.read, Queue.result, Queue.wait]
)
def test_a_document_that_is_not_there_is_not_found(
    queue: Queue, look: Callable[[Queue, str], Any], id: str
) -> None:
    queue.submit("acme")

    with pytest.raises(NotFound, match="there is no document"):
        look(queue, id)


def test_a_payload_is_no_content_and_a_content_no_payload(queue: Queue) -> None:
    payload = queue.submit("acme", payload=1).id
    content = queue.submit("acme", content=b"1").id

    with pytest.raises(ValueError, match=f"document {payload} has a payload"):
        queue.read(payload)
    with pytest.raises(ValueError, match=f"document {content} has content"):
        queue.payload(content)


def test_a_content_that_was_lost_is_reported_as_damage(queue: Queue) -> None:
    content = queue.submit("acme", content=LARGE).id
    payload = queue.submit("acme", payload=LARGE.decode()).id

    queue.contents.delete(contents_in(queue))

    with pytest.raises(ContentDamaged, match="is missing"):
        queue.read(content)
    with pytest.raises(ContentDamaged, match="is missing"):
        queue.payload(payload)


def test_a_content_that_was_changed_in_its_row_is_reported_as_damage() -> None:
    class Damaged(MemoryStore):
        def read(self, id: str) -> Stored | None:
            stored = super().read(id)
            return stored and stored._replace(body=b"another content")

    with Queue(Damaged()) as queue:
        id = queue.submit("acme", content=b"a content").id

        with pytest.raises(ContentDamaged, match=f"content of document {id} does not match"):
            queue.read(id)


def test_a_result_is_there_once_the_document_is_completed(queue: Queue) -> None:
    id = queue.submit("acme").id
    with pytest.raises(WrongState, match=f"document {id} is waiting; only a completed document"):
        queue.result(id)

    complete(queue, '{"pages": 3}')

    assert queue.result(id) == {"pages": 3}
    assert queue.get(id).state is State.COMPLETED


def test_a_dead_document_has_a_reason_and_no_result(queue: Queue) -> None:
    id = queue.submit("acme").id
    fail(queue, "not a PDF\x00")

    with pytest.raises(WrongState, match="is dead \\(not a PDF\ufffd\\)"):
        queue.result(id)


def test_a_completed_document_without_a_result_gives_none(queue: Queue) -> None:
    queue.submit("acme")

    assert queue.result(complete(queue)) is None


def test_documents_are_listed_newest_first_in_pages(queue: Queue) -> None:
    ids = [queue.submit("acme").id for _ in range(5)]

    first = queue.list(size=2)
    queue.submit("acme")
    second = queue.list(size=2, after=first.next)
    last = queue.list(size=2, after=second.next)

    listed = [d.id for page in (first, second, last) for d in page.documents]
    assert listed == ids[::-1]
    assert last.next is None


def test_filters_choose_documents(queue: Queue, clock: ManualClock) -> None:
    dead = queue.submit("acme").id
    fail(queue, "x")
    clock.advance(10)
    named = queue.submit("acme", name="n\x00").id
    later = [queue.submit("acme").id for _ in range(2)]
    delayed = queue.submit("bolt", due_at=NOON + 10**9).id

    def ids(**filters: Any) -> list[str]:
        return [d.id for d in queue.iterate(**filters)]

    assert ids(customer="bolt") == [delayed]
    assert ids(customer="nobody") == []
    assert ids(states="dead") == [dead]
    assert ids(states=[State.DEAD, "delayed"]) == [delayed, dead]
    assert ids(states=[]) == []
    assert ids(priorities=2) == [later[1]]
    assert ids(priorities=range(3, 10)) == []
    assert ids(name="n\x00") == [named]
    assert ids(submitted_before=NOON + 1) == [dead]
    assert ids(submitted_from=to_datetime(NOON + 1), customer="acme") == [*later[::-1], named]
    assert ids(ids=[dead, delayed, "nonsense"]) == [delayed, dead]
    assert ids(ids=named) == [named]
    assert ids(customer="acme", states="waiting", priorities=1) == [later[0], named]


def test_the_list_of_filters_has_every_filter_once() -> None:
    names = [each.name for each in FILTERS]

    assert sorted(names) == sorted(Filters.__annotations__)
    assert sorted(names) == sorted(field.name for field in fields(Filter))
    assert len({each.parameter for each in FILTERS}) == len(FILTERS)


@pytest.mark.parametrize(
    ("filters", "kind", "sentence"),
    [
        ({"states": "done"}, ValueError, "'done' is not a state"),
        ({"priorities": 0}, ValueError, "0 is not a priority"),
        ({"priorities": [1, 10]}, ValueError, "10 is not a priority"),
        ({"customer": "\x00"}, ValueError, "NUL"),
        ({"submitted_from": 1.5}, TypeError, "submitted_from is 1.5"),
        ({"ids": ["x"] * (PAGE_MAX + 1)}, ValueError, "1,001 ids"),
        ({"size": 0}, ValueError, "size is 0"),
        ({"size": PAGE_MAX + 1}, ValueError, "size is 1001"),
        ({"after": "nonsense"}, ValueError, "after is 'nonsense'"),
        ({"colour": "red"}, TypeError, "unknown filter: colour; the filters are: customer"),
    ],
)
def test_a_filter_that_is_wrong_is_refused(
    queue: Queue, filters: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        queue.list(**filters)


def test_iterating_goes_over_all_pages(queue: Queue) -> None:
    receipts = queue.submit_many([Submission(customer="acme")] * (PAGE_MAX + 1))

    assert [d.id for d in queue.iterate(customer="acme")] == [r.id for r in receipts][::-1]


# ── Waiting ──────────────────────────────────────────────────────────────────────────────────────


def test_waiting_ends_with_the_document(queue: Queue) -> None:
    id = queue.submit("acme").id
    seen: list[State] = []
    waiting = threading.Thread(target=lambda: seen.append(queue.wait(id, timeout_s=60).state))
    waiting.start()

    complete(queue)
    waiting.join(60)

    assert seen == [State.COMPLETED]
    assert queue.wait(id).state is State.COMPLETED


def test_a_document_that_ends_between_a_look_and_the_wait_is_not_missed() -> None:
    class EndsAfterTheFirstLook(MemoryStore):
        looks = 0

        def read(self, id: str) -> Stored | None:
            stored = super().read(id)
            self.looks += 1
            if self.looks == 1:
                self.cancel([id])
            return stored

        def wait(self, version: int, timeout_s: float, *, certain: bool = True) -> int:
            assert version != self.version(), "this would wait although the document has ended"
            return super().wait(version, timeout_s)

    with Queue(EndsAfterTheFirstLook()) as queue:
        id = queue.submit("acme").id

        assert queue.wait(id, timeout_s=10).state is State.CANCELLED


def test_waiting_in_vain_says_in_which_state_the_document_is(queue: Queue) -> None:
    id = queue.submit("acme").id
    claim(queue)

    with pytest.raises(TimeoutError, match=f"document {id} is still running after 0 s"):
        queue.wait(id, timeout_s=0)


# ── Cancelling and retrying ──────────────────────────────────────────────────────────────────────


def test_cancelling_ends_what_has_not_begun_and_asks_what_runs(queue: Queue) -> None:
    running = queue.submit("acme").id
    claim(queue)
    waiting = queue.submit("acme").id
    delayed = queue.submit("acme", due_at=NOON + 1).id

    assert queue.cancel(waiting) is State.CANCELLED
    assert queue.cancel(waiting) is State.CANCELLED
    assert queue.cancel(delayed) is State.CANCELLED
    assert queue.cancel(running) is State.RUNNING
    assert queue.get(running).cancel_requested


def test_what_has_ended_cannot_be_cancelled(queue: Queue) -> None:
    queue.submit("acme")
    id = complete(queue)

    with pytest.raises(WrongState, match=f"document {id} is already completed"):
        queue.cancel(id)


def test_many_are_cancelled_in_one_call_without_an_error(queue: Queue) -> None:
    queue.submit("acme")
    completed = complete(queue)
    waiting = [r.id for r in queue.submit_many([Submission(customer="acme")] * 1_500)]

    states = queue.cancel([completed, "nonsense", *waiting])

    assert states == [State.COMPLETED, None, *[State.CANCELLED] * 1_500]


def test_a_dead_document_waits_again_with_its_priority(queue: Queue) -> None:
    for _ in range(4):
        receipt = queue.submit("acme")
    for _ in range(4):
        fail(queue, "x")

    queue.retry(receipt.id)

    document = queue.get(receipt.id)
    assert (document.state, document.priority, document.attempts) == (State.WAITING, 2, 0)


def test_only_dead_documents_are_retried(queue: Queue) -> None:
    queue.submit("acme")
    dead = fail(queue, "x")
    waiting = attempted(queue)

    with pytest.raises(WrongState, match=f"document {waiting} is waiting; only a dead document"):
        queue.retry(waiting)
    assert queue.retry([dead, waiting, "nonsense"]) == [State.DEAD, State.WAITING, None]
    assert queue.get(dead).state is State.WAITING
    (claim,) = queue.store.claim(1, worker="w", lease_us=10**9).claims
    with pytest.raises(WrongState, match="is running; only a dead document"):
        queue.retry(claim.document.id)


def attempted(queue: Queue) -> str:
    """Return a document that waits after a failed attempt."""
    id = queue.submit("acme").id
    (claim,) = queue.store.claim(1, worker="w", lease_us=10**9).claims
    assert claim.document.id == id
    queue.store.finish([Failed(claim.fence, "busy", 0)])
    queue.store.claim(0, worker="w", lease_us=10**9)  # it is due
    assert (queue.get(id).state, queue.get(id).attempts) == (State.WAITING, 1)
    return id


def test_a_retry_that_is_repeated_succeeds_and_changes_nothing(queue: Queue) -> None:
    queue.submit("acme")
    dead = fail(queue, "x")
    queue.retry(dead)
    before = queue.get(dead), queue.summary()

    queue.retry(dead)  # as after a lost reply

    assert (queue.get(dead), queue.summary()) == before
    assert [c.document.id for c in queue.store.claim(9, worker="w", lease_us=10**9).claims] == [
        dead
    ]


class ClaimedMeanwhile(MemoryStore):
    """A worker claims the document between the retry and the query."""

    def retry(self, ids: Sequence[str], *, expires_at: int | None = None) -> list[State | None]:
        states = super().retry(ids, expires_at=expires_at)
        self.claim(1, worker="w", lease_us=10**9)
        return states


def test_a_repeated_retry_succeeds_although_a_worker_claims_the_document_meanwhile() -> None:
    with Queue(ClaimedMeanwhile()) as queue:
        id = queue.submit("acme").id

        queue.retry(id)

        assert queue.get(id).state is State.RUNNING


@pytest.mark.parametrize("change", [Queue.cancel, Queue.retry])
def test_changing_a_document_that_is_not_there_says_so(
    queue: Queue, change: Callable[[Queue, str], Any]
) -> None:
    with pytest.raises(NotFound, match="there is no document 'nonsense'"):
        change(queue, "nonsense")


# ── Customers ────────────────────────────────────────────────────────────────────────────────────


def test_a_customer_shows_its_count_and_what_waits_and_runs(queue: Queue) -> None:
    queue.submit_many([Submission(customer="acme")] * 5)
    queue.submit("acme", due_at=NOON + 1)
    claim(queue)

    customer = queue.customer("acme")

    assert (customer.count, customer.waiting, customer.running, customer.delayed) == (-5, 4, 1, 1)
    assert customer.waiting_by_priority == (2, 2, 0, 0, 0, 0, 0, 0, 0)


def test_customers_are_listed_by_name_in_pages(queue: Queue) -> None:
    for name in ("b", "ä", "a", "c"):
        queue.submit(name)

    first = queue.customers(size=3)
    second = queue.customers(size=3, after=first.next)

    assert [c.name for c in first.customers] == ["a", "b", "c"]
    assert [c.name for c in second.customers] == ["ä"]
    assert second.next is None


def test_a_setting_of_a_customer_changes_alone(queue: Queue) -> None:
    queue.set_customer("acme", weight=2.5, limit=3)

    queue.set_customer("acme", paused=True)
    customer = queue.set_customer("acme", limit=None)

    assert customer == queue.customer("acme")
    settings = customer.settings
    assert (settings.weight, settings.limit, settings.paused) == (2.5, None, True)


@pytest.mark.parametrize(
    ("given", "kind", "sentence"),
    [
        ({"weight": 0}, ValueError, "weight is 0"),
        ({"weight": 101}, ValueError, "weight is 101"),
        ({"weight": "2"}, TypeError, "weight is '2'"),
        ({"weight": float("inf")}, TypeError, "weight is inf"),
        ({"weight": True}, TypeError, "weight is True"),
        ({"limit": 0}, ValueError, "limit is 0"),
        ({"limit": 1.5}, TypeError, "limit is 1.5"),
        ({"paused": 1}, TypeError, "paused is 1"),
        ({"name": "\x00"}, ValueError, "NUL"),
    ],
)
def test_a_wrong_setting_of_a_customer_is_refused(
    queue: Queue, given: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence):
        queue.set_customer(**{"name": "acme", **given})

    with pytest.raises(NotFound, match="there is no customer 'acme'"):
        queue.customer("acme")


def test_purging_deletes_everything_of_one_customer(queue: Queue) -> None:
    for customer in ("acme", "bolt"):
        queue.submit(customer, content=LARGE)
        queue.submit(customer, payload=1, key="k")
        queue.set_customer(customer, weight=2)
    kept = {d.content_name for d in queue.iterate(customer="bolt")} - {None}

    queue.purge("acme")

    assert [d.customer for d in queue.iterate()] == ["bolt", "bolt"]
    assert contents_in(queue) == kept
    assert queue.summary().waiting == 2
    with pytest.raises(NotFound):
        queue.customer("acme")
    with pytest.raises(NotFound):
        queue.purge("acme")
    assert queue.submit("acme", key="k").count == 0


# ── The queue itself ─────────────────────────────────────────────────────────────────────────────


def test_the_summary_counts_each_priority(queue: Queue) -> None:
    queue.submit_many([Submission(customer="acme")] * 24)
    queue.submit("bolt", due_at=NOON + 1)
    claim(queue, 2)

    summary = queue.summary()

    assert summary.waiting_by_priority == (1, 2, 2, 2, 2, 2, 2, 6, 3)
    assert (summary.waiting, summary.delayed, summary.running) == (22, 1, 2)


def test_settings_change_for_everybody_and_only_those_given(queue: Queue) -> None:
    before = queue.settings

    queue.configure(mode="levels", reset="periodic", costs=Costs.KNOWN, bounds=range(-1, -9, -1))

    after = queue.settings
    assert (after.mode, after.reset, after.costs) == (Mode.LEVELS, Reset.PERIODIC, Costs.KNOWN)
    assert after.bounds == (-1, -2, -3, -4, -5, -6, -7, -8)
    assert (after.patience_s, after.attempts_max) == (before.patience_s, before.attempts_max)
    assert [queue.submit("acme").priority for _ in range(4)] == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "kind", "sentence"),
    [
        (
            {"mode": "random"},
            ValueError,
            "mode is 'random'; it must be one of: levels, fair, equal",
        ),
        ({"attempts_max": 0}, ValueError, "attempts_max is 0"),
        ({"patience_s": -1}, ValueError, "patience_s is -1"),
        ({"reset_interval_s": 0}, ValueError, "reset_interval_s is 0"),
        ({"bounds": [-1, -2]}, ValueError, "bounds is .*, 2 numbers"),
        ({"speed": 3}, TypeError, "'speed' is not a setting; the settings are: mode, costs"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_and_changes_nothing(
    queue: Queue, changes: dict[str, Any], kind: type[Exception], sentence: str
) -> None:
    before = queue.settings

    with pytest.raises(kind, match=sentence):
        queue.configure(**changes)

    assert queue.settings == before


def test_pruning_forgets_ended_documents_past_their_age_with_their_contents(
    queue: Queue, clock: ManualClock
) -> None:
    queue.submit("acme", content=LARGE)
    completed = complete(queue)
    queue.submit("acme", content=LARGE)
    dead = fail(queue, "x")
    waiting = queue.submit("acme", content=LARGE).id
    orphan = queue.contents.put([b"orphan"])
    clock.advance(7 * DAY_S)
    swept = queue.prune()
    kept = contents_in(queue)
    clock.advance(1)
    batches: list[int] = []

    pruned = queue.prune(batches.append)

    assert (swept, pruned) == ((0, 1), (1, 1))
    assert orphan.name not in kept
    assert len(kept) == 3
    assert {d.id for d in queue.iterate()} == {dead, waiting}
    assert contents_in(queue) == {queue.get(dead).content_name, queue.get(waiting).content_name}
    assert batches == list(range(1, len(batches) + 1))
    with pytest.raises(NotFound):
        queue.get(completed)


def test_pruning_ends_with_any_number_of_customers(queue: Queue, clock: ManualClock) -> None:
    names = [f"c{n}" for n in range(2_100)]
    queue.submit_many([Submission(customer=name) for name in names])
    clock.advance(DAY_S)

    queue.prune()

    assert queue.summary().waiting == len(names)


def test_a_closed_queue_says_so_and_can_be_closed_again(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "documents.db")

    queue.close()
    queue.close()

    with pytest.raises(StoreError, match="closed"):
        queue.submit("acme")
    with pytest.raises(StoreError, match="closed"):
        queue.summary()


def test_moments_and_datetimes_are_the_same_due_time(queue: Queue) -> None:
    moment = NOON + 5_000_000

    ids = [queue.submit("acme", due_at=due).id for due in (moment, to_datetime(moment))]

    assert (
        {queue.get(id).due_at_us for id in ids} == {moment} == {from_datetime(to_datetime(moment))}
    )


def test_threads_that_submit_at_once_are_counted_one_after_the_other(queue: Queue) -> None:
    receipts: list[Receipt] = []

    def submit() -> None:
        receipts.extend(queue.submit("acme", payload=n) for n in range(25))

    threads = [threading.Thread(target=submit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(r.count for r in receipts) == list(range(-99, 1))


def test_a_store_takes_payloads_as_plain_tuples() -> None:
    taken: list[NewDocument] = []

    class Spy(MemoryStore):
        def submit(self, documents: Any, *, connection: Any = None) -> list[Receipt]:
            taken.extend(documents)
            return super().submit(documents, connection=connection)

    with Queue(Spy()) as queue:
        queue.submit("acme", payload={"a": "é"})

    assert taken == [NewDocument("acme", '{"a":"\\u00e9"}', size_bytes=14)]


def test_an_application_with_an_event_loop_submits_without_blocking_it(tmp_path: Path) -> None:
    async def application(queue: Queue) -> list[str]:
        receipts = await asyncio.gather(
            queue.asubmit("acme", payload=1),
            queue.asubmit("acme", content=b"x" * 100_000, name="b"),
        )
        with pytest.raises(TypeError, match="unexpected keyword"):
            await queue.asubmit("acme", colour="red")  # type: ignore[call-arg]
        return [receipt.id for receipt in receipts]

    with Queue(tmp_path / "documents.db") as queue:
        ids = asyncio.run(application(queue))
        assert {document.id for document in queue.iterate()} == set(ids)
        assert queue.get(ids[1]).name == "b"
