"""Expiry over HTTP: submissions, retries, and the service that records expired documents."""

from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from fairturn import Queue, State, StoreBusy, Submission
from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import EXPIRE_MAX
from fairturn.stores.memory import MemoryStore
from tests.http_server import client_of, code_of
from tests.wait import wait_until

LARGE = bytes(range(256)) * 1_024  # too large for a row
LINES = {"Content-Type": "application/x-ndjson"}
NOON = 1_900_000_000 * SECOND_US


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture(params=["memory", "file"])
def queue(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Queue]:
    place = ":memory:" if request.param == "memory" else tmp_path / "documents.db"
    with Queue(place, clock=clock) as queue:
        yield queue


@pytest.fixture
def operator(queue: Queue) -> Iterator[httpx.Client]:
    with client_of(queue) as client:
        yield client


def submissions(**expiry: Any) -> dict[str, dict[str, Any]]:
    """Return the requests for a document with an expiry, by the form of the request."""
    query = {"customer": "acme", **expiry}
    line = httpx.Request("POST", "http://x", json={"payload": 1, **query}).content
    return {
        "payload": {"params": query, "json": {"page": 1}},
        "large content": {"params": query, "content": LARGE},
        "form": {"data": query, "files": {"file": ("a.pdf", b"a")}},
        "batch": {"url": "/v1/documents/batch", "content": line, "headers": LINES},
    }


FORMS = pytest.mark.parametrize("form", submissions())


def post(client: httpx.Client, form: str, **expiry: Any) -> httpx.Response:
    return client.post(**{"url": "/v1/documents", **submissions(**expiry)[form]})


# ── Submitting ───────────────────────────────────────────────────────────────────────────────────


@FORMS
@pytest.mark.parametrize(
    ("expiry", "after_s"),
    [({"expires_in_s": 90.5}, 90.5), ({"expires_at": "2030-03-17T17:47:00Z"}, 20)],
    ids=["seconds", "timestamp"],
)
def test_every_form_of_a_submission_takes_an_expiry(
    queue: Queue, operator: httpx.Client, form: str, expiry: dict[str, Any], after_s: float
) -> None:
    response = post(operator, form, **expiry)

    assert response.status_code == 201, response.text
    (document,) = queue.iterate()
    assert document.expires_at_us == NOON + round(after_s * SECOND_US)
    shown = operator.get(f"/v1/documents/{document.id}").json()
    assert (shown["expires_at"], shown["step"]) == (document.expires_at_us, 0)


@FORMS
def test_a_document_that_would_have_expired_is_a_problem_of_its_own_and_is_not_stored(
    queue: Queue, operator: httpx.Client, form: str
) -> None:
    response = post(operator, form, expires_at="2030-03-17T17:46:40Z")  # now

    assert code_of(response) == (422, "expiry_passed")
    assert response.json()["title"] == "The document would have expired already."
    assert list(queue.iterate()) == []
    assert list(queue.contents.names(older_than=1 << 62)) == []


@FORMS
@pytest.mark.parametrize(
    "expiry",
    [
        {"expires_in_s": 0},
        {"expires_in_s": 1e11},
        {"expires_in_s": "2h"},
        {"expires_at": "2030-01-01"},
        {"expires_in_s": 1, "expires_at": "2100-01-01T00:00Z"},
        {"expires_in_s": 1, "due_at": "2100-01-01T00:00Z"},
    ],
    ids=str,
)
def test_an_invalid_expiry_is_invalid_and_nothing_is_stored(
    queue: Queue, operator: httpx.Client, form: str, expiry: dict[str, Any]
) -> None:
    assert code_of(post(operator, form, **expiry)) == (422, "invalid")
    assert list(queue.iterate()) == []


# ── Retrying ─────────────────────────────────────────────────────────────────────────────────────


def expired(queue: Queue, clock: ManualClock, n: int = 1) -> list[str]:
    """Return documents that have expired."""
    ids = [queue.submit("acme", expires_in_s=60).id for _ in range(n)]
    clock.advance(60)
    queue.expire()
    assert {queue.get(id).state for id in ids} == {State.EXPIRED}
    return ids


def test_an_expired_document_waits_again_with_a_new_expiry(
    queue: Queue, operator: httpx.Client, clock: ManualClock
) -> None:
    one, two, three = expired(queue, clock, 3)

    without = operator.post(f"/v1/documents/{one}/retry")
    alone = operator.post(f"/v1/documents/{one}/retry", json={"expires_in_s": 30})
    several = operator.post(
        "/v1/documents/retry", json={"ids": [two, three], "expires_at": "2030-03-17T18:00Z"}
    )

    assert code_of(without) == (409, "wrong_state")
    assert alone.json() == {"id": one, "state": "waiting"}
    assert several.json() == {"states": ["expired", "expired"]}
    assert queue.get(one).expires_at_us == clock.now() + 30 * SECOND_US
    assert queue.get(two).expires_at_us == NOON + 800 * SECOND_US
    assert queue.summary().waiting == 3


@pytest.mark.parametrize(
    "expiry",
    [{"expires_in_s": 0}, {"expires_in_s": "1"}, {"expires_at": "tomorrow"}, {"expires": 1},
     {"expires_at": True}, {"expires_in_s": 1, "expires_at": 1 << 60}, {"expires_at": 1 << 63}],
    ids=str,
)  # fmt: skip
def test_an_invalid_expiry_retries_nothing(
    queue: Queue, operator: httpx.Client, clock: ManualClock, expiry: dict[str, Any]
) -> None:
    (id,) = expired(queue, clock)

    alone = operator.post(f"/v1/documents/{id}/retry", json=expiry)
    several = operator.post("/v1/documents/retry", json={"ids": [id], **expiry})

    assert code_of(alone) == code_of(several) == (422, "invalid")
    assert code_of(operator.post(f"/v1/documents/{id}/retry", json={"expires_at": NOON})) == (
        422,
        "expiry_passed",
    )
    assert queue.get(id).state is State.EXPIRED


def test_a_retry_without_a_body_is_one_without_an_expiry(
    queue: Queue, operator: httpx.Client
) -> None:
    id = queue.submit("acme").id
    bodies: tuple[dict[str, Any], ...] = ({}, {"json": None}, {"json": {}})
    for body in bodies:
        assert operator.post(f"/v1/documents/{id}/retry", **body).status_code == 200


# ── Recording ────────────────────────────────────────────────────────────────────────────────────


def test_the_service_records_expired_documents_although_nothing_claims(
    queue: Queue, operator: httpx.Client, clock: ManualClock
) -> None:
    id = queue.submit("acme", expires_in_s=60).id
    kept = queue.submit("acme").id

    clock.advance(60)

    wait_until(lambda: queue.get(id).state is State.EXPIRED, "the document expires")
    assert operator.get("/v1/summary").json()["expired"] == 1
    assert 'fairturn_ended_documents_total{state="expired"} 1.0' in operator.get("/metrics").text
    assert queue.get(kept).state is State.WAITING


class SlowStore(MemoryStore):
    """Records expired documents only when it may, and counts the calls."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.begun, self.may_end = Event(), Event()
        self.calls = self.most = self.in_flight = 0

    def expire(self, limit: int = EXPIRE_MAX) -> int:
        self.calls += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        self.begun.set()
        assert self.may_end.wait(60)
        self.in_flight -= 1
        return super().expire(limit)


def test_a_slow_record_delays_no_request_and_is_followed_by_another_when_it_ends(
    clock: ManualClock,
) -> None:
    store = SlowStore(clock)
    with Queue(store, clock=clock) as queue, client_of(queue) as client:
        try:
            assert store.begun.wait(60)
            for n in range(5):
                query = {"customer": "acme"}
                assert client.post("/v1/documents", params=query, json=n).status_code == 201
            assert store.calls == 1
        finally:
            store.may_end.set()

        wait_until(lambda: store.calls >= 3, "the service goes on")
        assert store.most == 1


def test_more_documents_than_one_transaction_records_all_expire(
    clock: ManualClock,
) -> None:
    store = SlowStore(clock)
    with Queue(store, clock=clock) as queue, client_of(queue):
        submissions = [Submission("acme", expires_in_s=60)] * (EXPIRE_MAX + 1)
        queue.submit_many(submissions)
        clock.advance(60)
        store.may_end.set()

        wait_until(lambda: queue.summary().expired == EXPIRE_MAX + 1, "all of them expire")


class FailingStore(MemoryStore):
    """Fails the first calls that record expired documents."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.errors: list[Exception] = [StoreBusy("another process has the lock"), KeyError("bug")]

    def expire(self, limit: int = EXPIRE_MAX) -> int:
        if self.errors:
            raise self.errors.pop(0)
        return super().expire(limit)


def test_an_error_while_recording_ends_neither_the_service_nor_the_recording(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    with Queue(FailingStore(clock), clock=clock) as queue, client_of(queue) as client:
        id = queue.submit("acme", expires_in_s=60).id
        clock.advance(60)

        wait_until(lambda: queue.get(id).state is State.EXPIRED, "the document expires")
        assert client.get("/livez").status_code == 200
    (record,) = [each for each in caplog.records if each.name == "fairturn.service"]
    assert record.message == "the service could not record expired documents"
