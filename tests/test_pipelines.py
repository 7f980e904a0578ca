"""Steps, attempts, outages and expiry, as users of `Queue` see them."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fairturn import (
    Claim,
    ExpiryPassed,
    Failed,
    NotFound,
    Queue,
    Refused,
    State,
    Submission,
    WrongState,
)
from fairturn.clock import ManualClock, to_datetime
from fairturn.model import Advanced, OutageReport

NOON = 1_800_000_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture(params=["memory", "sqlite"])
def queue(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Queue]:
    database = ":memory:" if request.param == "memory" else tmp_path / "documents.db"
    with Queue(database, clock=clock, kinds="open") as queue:
        yield queue


def claim(queue: Queue) -> Claim:
    (claimed,) = queue.claim(worker="w", lease_s=30).claims
    return claimed


# ── Attempts ─────────────────────────────────────────────────────────────────────────────────────


def test_the_attempts_of_a_document_are_read_with_or_without_values(queue: Queue) -> None:
    id = queue.submit("acme").id
    queue.finish([Failed(claim(queue).fence, "unreadable", 0, "Traceback")])
    queue.finish([Advanced(claim(queue).fence, "ocr", '{"pages":3}')])

    first, second = queue.attempts(id, values=True)

    assert (first.outcome, first.error, first.details) == ("failed", "unreadable", "Traceback")
    assert (second.outcome, second.kind, second.value) == ("advanced", "default", '{"pages":3}')
    assert [record.value for record in queue.attempts(id)] == [None, None]
    assert (first.claimed_at, first.ended_at) == (to_datetime(NOON), to_datetime(NOON))


def test_the_attempts_of_an_unknown_document_are_not_found(queue: Queue) -> None:
    with pytest.raises(NotFound, match="there is no document 'nonsense'"):
        queue.attempts("nonsense")


# ── Outages ──────────────────────────────────────────────────────────────────────────────────────


def test_an_outage_is_shown_until_an_operator_resumes_the_work(
    queue: Queue, clock: ManualClock
) -> None:
    queue.sign_on("w", 2, ["ocr"], needs={"ocr": ["azure-ocr"]})
    queue.submit("acme", kind="ocr")
    queue.finish([OutageReport(claim(queue).fence, "503", 5_000_000, "azure-ocr")])

    (outage,) = queue.outages()
    queue.resume("azure-ocr")

    assert (outage.service, outage.kinds, outage.error) == ("azure-ocr", ("ocr",), "503")
    assert (outage.began_at, outage.probe_at) == (to_datetime(NOON), to_datetime(NOON + 5_000_000))
    clock.advance(5)
    assert queue.outages() == []


def test_only_a_service_that_is_held_can_be_resumed(queue: Queue) -> None:
    with pytest.raises(NotFound, match=r"no service 'azure-ocr' is held; outages\(\)"):
        queue.resume("azure-ocr")
    with pytest.raises(ValueError, match="service is empty"):
        queue.resume("")


# ── Expiry ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "fields",
    [
        {"expires_in_s": 90},
        {"expires_in_s": 90.0},
        {"expires_at": NOON + 90_000_000},
        {"expires_at": datetime(2027, 1, 15, 9, 1, 30, tzinfo=UTC) - timedelta(hours=1)},
    ],
)
def test_a_submission_states_its_expiry_as_a_time_or_in_seconds(
    queue: Queue, fields: dict[str, Any]
) -> None:
    document = queue.get(queue.submit("acme", **fields).id)

    assert document.expires_at == to_datetime(NOON) + timedelta(seconds=90)


@pytest.mark.parametrize(
    ("fields", "error", "sentence"),
    [
        ({"expires_at": NOON}, ExpiryPassed, "expires_at is 2027-01-15T08:00:00.*has passed"),
        ({"expires_at": -5}, ExpiryPassed, "has passed; use a later expiry"),
        ({"expires_in_s": 0}, ValueError, "expires_in_s is 0; it must be positive"),
        ({"expires_in_s": -1.5}, ValueError, "expires_in_s is -1.5; it must be positive"),
        ({"expires_in_s": float("nan")}, ValueError, "expires_in_s is nan"),
        ({"expires_in_s": 1e11}, ValueError, r"at most 1e\+10"),
        ({"expires_in_s": True}, TypeError, "expires_in_s is True; it must be a number"),
        ({"expires_in_s": "2h"}, TypeError, "expires_in_s is '2h'; it must be a number"),
        ({"expires_at": "soon"}, TypeError, "expires_at is 'soon'"),
        ({"expires_at": datetime(2030, 1, 1)}, TypeError, "time zone"),
        ({"expires_at": NOON + 1, "expires_in_s": 1}, ValueError, "pass only one of them"),
        ({"due_at": NOON + 5, "expires_at": NOON + 5}, ValueError, "expire before it is due"),
        ({"due_at": NOON + 10**9, "expires_in_s": 5}, ValueError, "expire before it is due"),
    ],
)
def test_a_submission_with_a_wrong_expiry_is_refused(
    queue: Queue, fields: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        queue.submit("acme", **fields)

    assert queue.summary().waiting == 0
    assert issubclass(ExpiryPassed, Refused)


def test_a_submission_in_a_batch_is_named_in_the_error(queue: Queue) -> None:
    with pytest.raises(ValueError, match="submission 1: expires_in_s is -1"):
        queue.submit_many([Submission("acme"), Submission("acme", expires_in_s=-1)])


def test_a_repeated_submission_is_replayed_after_its_expiry(
    queue: Queue, clock: ManualClock
) -> None:
    first = queue.submit("acme", payload=1, key="k", expires_in_s=10)
    clock.advance(60)

    again = queue.submit("acme", payload=1, key="k", expires_in_s=10)
    late = queue.submit("acme", payload=1, key="k", expires_at=NOON + 10_000_000)

    assert (again.id, again.replayed, late.replayed) == (first.id, True, True)


def test_the_expiry_of_a_kind_is_changed_and_removed(queue: Queue) -> None:
    assert queue.set_kind("ocr", expires_in_s=60).settings.expires_in_s == 60
    expiring = queue.submit("acme", kind="ocr").id

    assert queue.set_kind("ocr", limit=2).settings.expires_in_s == 60
    assert queue.set_kind("ocr", expires_in_s=None).settings.expires_in_s is None

    forever = queue.submit("acme", kind="ocr").id
    assert queue.get(expiring).expires_at_us == NOON + 60_000_000
    assert queue.get(forever).expires_at is None


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1e11, ValueError), ("1", TypeError)]
)
def test_a_wrong_expiry_of_a_kind_is_refused(
    queue: Queue, value: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="expires_in_s is"):
        queue.set_kind("ocr", expires_in_s=value)


def expired(queue: Queue, clock: ManualClock) -> str:
    id = queue.submit("acme", expires_in_s=10).id
    clock.advance(10)
    assert queue.expire() == 1
    return id


def test_an_expired_document_is_retried_with_a_new_expiry(queue: Queue, clock: ManualClock) -> None:
    id = expired(queue, clock)
    with pytest.raises(WrongState, match="is expired; retry it with expires_at or expires_in_s"):
        queue.retry(id)

    queue.retry(id, expires_in_s=60)
    queue.retry(id, expires_in_s=60)  # as after a lost reply

    document = queue.get(id)
    assert (document.state, document.expires_at_us) == (State.WAITING, NOON + 70_000_000)
    assert queue.retry(["nonsense"], expires_in_s=60) == [None]


def test_a_retry_with_a_wrong_expiry_is_refused(queue: Queue, clock: ManualClock) -> None:
    id = expired(queue, clock)

    with pytest.raises(ExpiryPassed, match="has passed"):
        queue.retry(id, expires_at=NOON)
    with pytest.raises(ValueError, match="expires_in_s is -1"):
        queue.retry([id], expires_in_s=-1)
    with pytest.raises(ValueError, match="only one of them"):
        queue.retry([id], expires_at=NOON, expires_in_s=1)

    assert queue.get(id).state is State.EXPIRED


def test_an_expired_document_cannot_be_cancelled_and_has_no_result(
    queue: Queue, clock: ManualClock
) -> None:
    id = expired(queue, clock)

    with pytest.raises(WrongState, match="already expired"):
        queue.cancel(id)
    with pytest.raises(WrongState, match="is expired"):
        queue.result(id)
    assert queue.wait(id, timeout_s=0).state is State.EXPIRED


def test_expired_documents_are_pruned_after_their_retention(
    queue: Queue, clock: ManualClock
) -> None:
    queue.configure(expired_kept_s=60)
    id = expired(queue, clock)
    clock.advance(61)

    assert queue.prune().documents == 1

    with pytest.raises(NotFound):
        queue.get(id)
