"""Explanations of kinds of work: pauses, limits, outages, steps, snoozes and expiries."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairturn import Claim, Completed, Failed, Queue, Released
from fairturn.clock import SECOND_US, ManualClock
from fairturn.explain.analysis import Explanation
from fairturn.explain.reasons import Code
from fairturn.explain.sentences import tell
from fairturn.model import Advanced, Fence, OutageReport, Outcome, Snoozed

START = 1_700_000_000 * SECOND_US


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture(params=["memory", "sqlite"])
def queue(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> Iterator[Queue]:
    name = ":memory:" if request.param == "memory" else tmp_path / "documents.db"
    with Queue(name, clock=clock, synchronous="NORMAL", kinds="open") as opened:
        opened.sign_on("w", 2)
        yield opened


def submit(queue: Queue, customer: str = "acme", **fields: Any) -> str:
    return queue.submit(customer, **fields).id


def claim(queue: Queue, **options: Any) -> Claim:
    (claimed,) = queue.claim(worker="w", lease_s=3_600, **options).claims
    return claimed


def codes(explanation: Explanation) -> list[Code]:
    return [reason.code for reason in explanation.reasons]


def parameters(explanation: Explanation, code: Code) -> dict[str, Any]:
    (found,) = [dict(r.parameters) for r in explanation.reasons if r.code is code]
    return found


def hold(queue: Queue, service: str | None = None) -> None:
    """Let the kind ocr be held with an interval of 30 s."""
    reported = submit(queue, "other", kind="ocr")
    claimed = claim(queue, kinds=["ocr"])
    assert claimed.document.id == reported
    queue.finish([OutageReport(claimed.fence, "503", 30 * SECOND_US, service)])
    queue.cancel(reported)


# ── Kinds ────────────────────────────────────────────────────────────────────────────────────────


def test_a_paused_kind_is_a_reason_and_leaves_a_position_without_a_start(queue: Queue) -> None:
    submit(queue, kind="ocr")
    id = submit(queue, kind="ocr")
    queue.set_kind("ocr", paused=True)

    explained = queue.explain(id)

    assert parameters(explained, Code.KIND_PAUSED) == {"kind": "ocr"}
    assert explained.position is not None
    assert explained.position.bounds == (1, 1)
    assert explained.forecast is None
    assert not {Code.STARTS_NOW, Code.START_UNKNOWN} & set(codes(explained))


def test_a_kind_at_its_limit_is_a_reason(queue: Queue) -> None:
    queue.set_kind("ocr", limit=1)
    submit(queue, "other", kind="ocr")
    id = submit(queue, kind="ocr")
    assert Code.KIND_LIMIT_REACHED not in codes(queue.explain(id))

    claim(queue)

    explained = queue.explain(id)
    assert parameters(explained, Code.KIND_LIMIT_REACHED) == {"kind": "ocr", "limit": 1}
    assert Code.STARTS_NOW not in codes(explained)  # although a slot is free


def test_a_kind_that_no_live_worker_serves_is_a_reason(queue: Queue, clock: ManualClock) -> None:
    queue.sign_off("w")
    id = submit(queue, kind="ocr")
    assert Code.NO_WORKER in codes(queue.explain(id))
    queue.sign_on("text-only", 2, ["text"])

    explained = queue.explain(id)

    assert parameters(explained, Code.KIND_UNSERVED) == {"kind": "ocr"}
    assert Code.NO_WORKER not in codes(explained)
    assert explained.forecast is None
    clock.advance(60)
    assert Code.NO_WORKER in codes(queue.explain(id))
    queue.sign_on("general", 1)
    assert not {Code.NO_WORKER, Code.KIND_UNSERVED} & set(codes(queue.explain(id)))


def test_the_attempts_of_a_kind_are_told(queue: Queue) -> None:
    queue.set_kind("ocr", attempts_max=2)
    id = submit(queue, kind="ocr")
    queue.finish([Failed(claim(queue).fence, "x", 60_000_000)])

    assert parameters(queue.explain(id), Code.ATTEMPTS)["attempts_max"] == 2


# ── Outages ──────────────────────────────────────────────────────────────────────────────────────


def test_a_document_says_which_service_it_waits_for_since_when_and_until_when(
    queue: Queue, clock: ManualClock
) -> None:
    queue.sign_on("w", 2, needs={"ocr": ["azure-ocr"]})
    hold(queue, "azure-ocr")
    id = submit(queue, kind="ocr")
    clock.advance(5)

    explained = queue.explain(id)

    assert parameters(explained, Code.OUTAGE) == {
        "service": "azure-ocr",
        "kind": "ocr",
        "began_at": START,
        "began_us": 5 * SECOND_US,
        "probe_at": START + 30 * SECOND_US,
        "probe_in_us": 25 * SECOND_US,
    }
    assert explained.forecast is None
    assert (
        "It waits for azure-ocr, which has been unavailable for 5 seconds. The next attempt is in "
        "25 seconds."
    ) in tell(explained)
    clock.advance(25)
    assert any("The next attempt is due." in sentence for sentence in tell(queue.explain(id)))


def test_customers_are_not_told_the_name_of_a_service(queue: Queue) -> None:
    queue.sign_on("w", 2, needs={"ocr": ["azure-ocr"]})
    hold(queue, "azure-ocr")
    id = submit(queue, kind="ocr")

    sentences = tell(queue.explain(id, "customer"))

    assert not any("azure" in sentence for sentence in sentences)
    assert any("waits for a service that its kind of work, ocr, needs" in s for s in sentences)


def test_a_kind_that_is_held_alone_has_no_name_of_a_service(queue: Queue) -> None:
    hold(queue)
    id = submit(queue, kind="ocr")

    assert parameters(queue.explain(id), Code.OUTAGE)["service"] is None
    assert Code.OUTAGE not in codes(queue.explain(submit(queue, kind="text")))


def test_a_service_that_is_available_again_is_told_while_work_resumes(
    queue: Queue, clock: ManualClock
) -> None:
    hold(queue)
    id = submit(queue, kind="ocr")

    queue.resume("kind:ocr")

    assert {Code.OUTAGE_OVER} == {c for c in codes(queue.explain(id)) if c.startswith("outage")}
    clock.advance(5)
    assert Code.OUTAGE_OVER not in codes(queue.explain(id))


# ── Delays ───────────────────────────────────────────────────────────────────────────────────────


def test_a_delayed_document_says_why(queue: Queue) -> None:
    snoozed, failed, postponed = (submit(queue, c) for c in "abc")
    returned = submit(queue, kind="ocr")
    outcomes: dict[str, Callable[[Fence], Outcome]] = {
        snoozed: lambda fence: Snoozed(fence, 60_000_000),
        returned: lambda fence: OutageReport(fence, "503"),
        failed: lambda fence: Failed(fence, "x", 60_000_000),
        postponed: lambda fence: Failed(fence, "x", 0),
    }
    claims = queue.claim(4, worker="w", lease_s=60).claims
    queue.finish([outcomes[c.document.id](c.fence) for c in claims])
    again = claim(queue)
    assert again.document.id == postponed
    queue.finish([Snoozed(again.fence, 60_000_000)])
    early = submit(queue, due_at=START + 60 * SECOND_US)

    found = [queue.explain(id) for id in (snoozed, returned, failed, postponed, early)]

    delays = {Code.SNOOZED, Code.RETURNED, Code.RETRIED_LATER, Code.NOT_DUE}
    assert [code for explained in found for code in codes(explained) if code in delays] == [
        Code.SNOOZED,
        Code.RETURNED,
        Code.RETRIED_LATER,
        Code.SNOOZED,
        Code.NOT_DUE,
    ]
    assert parameters(found[0], Code.SNOOZED) == {
        "due_at": START + 60 * SECOND_US,
        "due_in_us": 60 * SECOND_US,
    }


# ── Expiry ───────────────────────────────────────────────────────────────────────────────────────


def test_a_waiting_document_says_when_it_expires(queue: Queue, clock: ManualClock) -> None:
    id = submit(queue, expires_in_s=60)
    clock.advance(10)

    assert parameters(queue.explain(id), Code.EXPIRES) == {
        "expires_at": START + 60 * SECOND_US,
        "expires_in_us": 50 * SECOND_US,
    }
    queue.finish([Failed(claim(queue).fence, "x", 0)])
    assert Code.EXPIRES not in codes(queue.explain(id))


def test_a_document_that_has_expired_says_so_before_it_is_recorded(
    queue: Queue, clock: ManualClock
) -> None:
    id = submit(queue, expires_in_s=60)
    clock.advance(70)

    explained = queue.explain(id)

    assert parameters(explained, Code.EXPIRY_PASSED) == {
        "expires_at": START + 60 * SECOND_US,
        "expired_us": 10 * SECOND_US,
    }
    assert (explained.position, explained.forecast) == (None, None)
    assert tell(explained)[0] == f"Document {id} expired before it could be processed."
    queue.expire()
    recorded = queue.explain(id)
    assert parameters(recorded, Code.EXPIRED)["expires_at"] == START + 60 * SECOND_US
    assert Code.EXPIRY_PASSED not in codes(recorded)


# ── Steps ────────────────────────────────────────────────────────────────────────────────────────


def test_a_document_says_its_step(queue: Queue, clock: ManualClock) -> None:
    id = submit(queue)
    assert Code.STEP not in codes(queue.explain(id))
    queue.finish([Advanced(claim(queue).fence, "ocr")])
    clock.advance(10)

    waiting = queue.explain(id)
    queue.finish([Completed(claim(queue).fence)])
    ended = queue.explain(id)

    assert parameters(waiting, Code.STEP) == {"step": 1, "kind": "ocr"}
    assert Code.WAITED not in codes(waiting)
    assert parameters(ended, Code.WAITED) == {
        "waited_us": 10 * SECOND_US,
        "attempts": 1,
        "step": 1,
    }
    assert "Its last attempt began 10 seconds after it was submitted." in tell(ended)


def test_a_released_document_of_a_later_step_waits_without_a_failure(queue: Queue) -> None:
    id = submit(queue)
    queue.finish([Advanced(claim(queue).fence, "ocr")])
    queue.finish([Released(claim(queue).fence)])

    explained = queue.explain(id)

    assert not {Code.ATTEMPTS, Code.LAST_ERROR, Code.RETRIED_LATER} & set(codes(explained))
