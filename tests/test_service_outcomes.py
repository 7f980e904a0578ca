"""Attempts and outages over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fairturn import Completed, Failed, Queue
from fairturn.clock import SECOND_US, ManualClock
from fairturn.model import STEP_VALUE_BYTES_MAX, Advanced, OutageReport
from fairturn.service.app import make_app
from tests.commands import hold
from tests.http_server import TOKEN, asked, bearer, client_of, code_of, key_for

NOON = 1_900_000_000 * SECOND_US


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture(params=["memory", "file"])
def queue(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[Queue]:
    place = ":memory:" if request.param == "memory" else tmp_path / "documents.db"
    with Queue(place, clock=clock, kinds="open") as queue:
        yield queue


@pytest.fixture
def operator(queue: Queue) -> Iterator[httpx.Client]:
    with client_of(queue, key=key_for(queue)) as client:
        yield client


# ── Attempts ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def routed(queue: Queue, clock: ManualClock) -> str:
    """A document of acme that failed, lost its lease, finished a step and was completed."""
    id = queue.submit("acme", kind="text").id

    def claimed(worker: str) -> "Completed":
        (claim,) = queue.claim(1, worker=worker, lease_s=30).claims
        clock.advance(1)
        return Completed(claim.fence)

    failed = claimed("w1").fence
    queue.finish([Failed(failed, "unreadable", 0, "Traceback of w1")])
    claimed("w2")
    clock.advance(60)
    advanced = claimed("w3").fence
    queue.finish([Advanced(advanced, "ocr", '{"pages":3}')])
    queue.finish([claimed("w4")])
    return id


def test_an_operator_reads_every_stored_attempt_oldest_first(
    operator: httpx.Client, routed: str
) -> None:
    attempts = operator.get(f"/v1/documents/{routed}/attempts").json()["attempts"]

    found = [
        (each["step"], each["kind"], each["attempt"], each["worker"], each["outcome"])
        for each in attempts
    ]
    assert found == [
        (0, "text", 1, "w1", "failed"),
        (0, "text", 2, "w2", "lost"),
        (0, "text", 3, "w3", "advanced"),
    ]
    first = attempts[0]
    assert (first["error"], first["details"]) == ("unreadable", "Traceback of w1")
    assert (first["claimed_at"], first["ended_at"]) == (NOON, NOON + SECOND_US)
    assert {each["value"] for each in attempts} == {None}
    document = operator.get(f"/v1/documents/{routed}").json()
    assert (document["state"], document["kind"], document["step"]) == ("completed", "ocr", 1)


def test_values_of_steps_are_read_on_request(operator: httpx.Client, routed: str) -> None:
    path = f"/v1/documents/{routed}/attempts"

    values = [each["value"] for each in operator.get(f"{path}?values=true").json()["attempts"]]

    assert values == [None, None, '{"pages":3}']
    assert code_of(operator.get(f"{path}?values=perhaps")) == (422, "invalid")
    assert code_of(operator.get(f"{path}?value=true")) == (422, "invalid")


def test_a_customer_reads_its_attempts_without_workers_details_and_values(
    queue: Queue, operator: httpx.Client, routed: str
) -> None:
    acme, rival = (bearer(key_for(queue, customer)) for customer in ("acme", "rival"))
    path = f"/v1/documents/{routed}/attempts"

    own = operator.get(path, headers=acme)

    assert [each["outcome"] for each in own.json()["attempts"]] == ["failed", "lost", "advanced"]
    for each in own.json()["attempts"]:
        assert (each["worker"], each["details"], each["value"]) == (None, None, None)
    assert code_of(operator.get(f"{path}?values=true", headers=acme)) == (403, "not_allowed")
    for foreign in (path, f"{path}?values=false", "/v1/documents/0123456789abcde/attempts"):
        assert code_of(operator.get(foreign, headers=rival)) == (404, "not_found")


def test_the_largest_value_of_a_step_is_returned_unchanged(
    queue: Queue, operator: httpx.Client
) -> None:
    id = queue.submit("acme", kind="text").id
    (claim,) = queue.claim(1, worker="w", lease_s=30).claims
    value = '"' + "\\u00e4" * ((STEP_VALUE_BYTES_MAX - 2) // 6) + '"'
    queue.finish([Advanced(claim.fence, "ocr", value)])

    (attempt,) = operator.get(f"/v1/documents/{id}/attempts?values=true").json()["attempts"]

    assert attempt["value"] == value


# ── Outages ──────────────────────────────────────────────────────────────────────────────────────


def test_held_services_are_listed_with_their_kinds_and_the_next_probe(
    queue: Queue, operator: httpx.Client
) -> None:
    assert operator.get("/v1/outages").json() == {"outages": []}
    hold(queue)

    (outage,) = operator.get("/v1/outages").json()["outages"]

    assert outage == {
        "service": "azure-ocr",
        "kinds": ["ocr"],
        "began_at": NOON,
        "error": "503 <busy>",
        "probes": 0,
        "probe_at": NOON + 25 * SECOND_US,
        "resumed_at": None,
    }


@pytest.mark.parametrize("service", [None, "a/b", "..", "ä ?#%2F", "x" * 64])
def test_an_operator_resumes_the_work_of_a_service_of_any_name(
    queue: Queue, operator: httpx.Client, clock: ManualClock, service: str | None
) -> None:
    hold(queue, service)
    (outage,) = operator.get("/v1/outages").json()["outages"]
    assert outage["service"] == (service or "kind:ocr")
    assert queue.claim(1, worker="w", lease_s=30).claims == []
    clock.advance(1)

    resumed = operator.post("/v1/outages/resume", json={"service": outage["service"]})

    assert (resumed.status_code, resumed.content) == (204, b"")
    assert operator.get("/v1/outages").json()["outages"][0]["resumed_at"] == NOON + SECOND_US
    assert len(queue.claim(1, worker="w", lease_s=30).claims) == 1


@pytest.mark.parametrize("body", [{}, {"service": ""}, {"service": 7}, {"service": "x" * 70}, [],
                                  {"service": "ä" * 60}, {"service": "a\x00b"},
                                  {"service": "azure-ocr", "now": True}])  # fmt: skip
def test_a_wrong_name_of_a_service_is_invalid(
    queue: Queue, operator: httpx.Client, body: object
) -> None:
    hold(queue)

    assert code_of(operator.post("/v1/outages/resume", json=body)) == (422, "invalid")
    assert queue.outages()[0].resumed_at_us is None


def test_a_service_that_is_not_held_is_not_found(queue: Queue, operator: httpx.Client) -> None:
    hold(queue)

    for service in ("azure", "kind:ocr", "ocr"):
        response = operator.post("/v1/outages/resume", json={"service": service})
        assert code_of(response) == (404, "not_found")
    assert queue.outages()[0].resumed_at_us is None


def test_the_metrics_have_each_held_service(queue: Queue, clock: ManualClock) -> None:
    app = make_app(queue, clock=clock, token=TOKEN)

    def metrics() -> str:
        return asked(app, "GET", "/metrics", headers=bearer(TOKEN)).text

    assert 'service="' not in metrics()
    hold(queue)
    clock.advance(25)
    (probe,) = queue.claim(1, worker="w", lease_s=30).claims
    queue.finish([OutageReport(probe.fence, "503", service="azure-ocr")])

    held = metrics()
    queue.resume("azure-ocr")
    resumed = metrics()

    assert 'fairturn_outage_held{service="azure-ocr"} 1.0' in held
    assert 'fairturn_outage_seconds{service="azure-ocr"} 25.0' in held
    assert 'fairturn_outage_probes{service="azure-ocr"} 1.0' in held
    assert 'fairturn_outage_held{service="azure-ocr"} 0.0' in resumed
