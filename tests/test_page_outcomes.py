"""Attempts, steps, outages and expiry on the page, before a browser draws it."""

import re
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI

from fairturn import Failed, Queue, State
from fairturn.clock import SECOND_US, ManualClock
from fairturn.dashboard.routes import install
from fairturn.model import Advanced, KindSettings
from fairturn.service.app import make_app
from tests.commands import hold
from tests.http_server import TOKEN, asked, entered, key_for

SERVICE = "azure <ocr>"
SAME = {"Sec-Fetch-Site": "same-origin"}
NOON = 1_900_000_000 * SECOND_US


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOON)


@pytest.fixture
def queue(clock: ManualClock) -> Iterator[Queue]:
    with Queue(":memory:", clock=clock, kinds="open") as found:
        yield found


@pytest.fixture
def app(queue: Queue, clock: ManualClock) -> FastAPI:
    made = make_app(queue, clock=clock, token=TOKEN)
    install(made)
    return made


def session_of(app: FastAPI, key: str) -> dict[str, str]:
    response = asked(app, "POST", "/login", data={"key": key}, headers=SAME)
    return {"Cookie": response.headers["set-cookie"].partition(";")[0]}


def opened(app: FastAPI, path: str, key: str | None = None) -> httpx.Response:
    """Return a page as the operator of a queue without keys sees it, or as the holder of a key."""
    headers = entered(app) if key is None else session_of(app, key)
    response = asked(app, "GET", path, headers=headers)
    assert response.status_code == 200, response.text
    return response


def sent(app: FastAPI, path: str, key: str | None = None, **fields: str) -> httpx.Response:
    headers = entered(app) if key is None else session_of(app, key)
    return asked(app, "POST", path, data=fields, headers=headers | SAME)


def part(response: httpx.Response, id: str) -> str:
    """Return the text of the element with this id up to the end of its section."""
    html = response.text.partition(f'id="{id}"')[2].partition(">")[2].partition("</section>")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


# ── Attempts and steps ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def routed(queue: Queue, clock: ManualClock) -> str:
    """A document that failed once with a traceback, then finished a step."""
    id = queue.submit("acme", kind="text").id
    (claim,) = queue.claim(1, worker="gpu-7", lease_s=30).claims
    clock.advance(2)
    queue.finish([Failed(claim.fence, "unreadable", 0, "Traceback\n  <b>secret</b>")])
    (claim,) = queue.claim(1, worker="gpu-8", lease_s=30).claims
    clock.advance(3)
    queue.finish([Advanced(claim.fence, "ocr", '{"pages":3}')])
    return id


def test_an_operator_sees_attempts_and_steps_with_their_workers_and_details(
    app: FastAPI, routed: str
) -> None:
    shown = opened(app, f"/documents/{routed}")

    rows = part(shown, "attempts")
    assert "text 1 1 gpu-7 2 s failed unreadable Details Traceback &lt;b&gt;secret" in rows
    assert "text 1 2 gpu-8 3 s step finished" in rows
    assert rows.index("gpu-7") < rows.index("gpu-8")
    assert "<b>secret" not in shown.text
    assert "Finished steps 1" in part(shown, "actions")
    assert "began" not in part(shown, "timeline")  # no attempt of the present step has


def test_a_customer_sees_its_attempts_without_workers_and_details(
    queue: Queue, app: FastAPI, routed: str
) -> None:
    shown = opened(app, f"/documents/{routed}", key_for(queue, "acme"))

    assert "text 1 1 2 s failed unreadable" in part(shown, "attempts")
    for hidden in ("gpu-7", "gpu-8", "secret", "Traceback"):
        assert hidden not in shown.text


def test_a_document_without_stored_attempts_has_no_table_of_them(
    queue: Queue, app: FastAPI
) -> None:
    id = queue.submit("acme").id

    assert '<section class="card gone" id="attempts"' in opened(app, f"/documents/{id}").text


# ── Outages ──────────────────────────────────────────────────────────────────────────────────────


def test_a_banner_names_the_service_its_kinds_and_the_next_attempt(
    queue: Queue, app: FastAPI, clock: ManualClock
) -> None:
    assert 'class="banner late outage"' not in opened(app, "/").text
    hold(queue, SERVICE)
    clock.advance(5)

    banner = part(opened(app, "/"), "banners")
    assert (
        "azure &lt;ocr&gt; · Unavailable for 5 s . 1 kind of work waits: ocr . "
        "Next attempt in 20 s 503 &lt;busy&gt; Resume" in banner
    )
    clock.advance(20)
    assert "The next attempt is due." in part(opened(app, "/"), "banners")


def test_a_hold_of_a_kind_alone_names_the_kind(queue: Queue, app: FastAPI) -> None:
    hold(queue, None)

    banner = part(opened(app, "/"), "banners")
    assert "A service that the kind of work ocr needs: Unavailable for 0 s" in banner
    assert "kind:" not in banner


def test_an_operator_resumes_the_work_of_a_service(queue: Queue, app: FastAPI) -> None:
    hold(queue, SERVICE)
    form = 'name="service" value="azure &lt;ocr&gt;"'
    assert form in opened(app, "/").text

    assert sent(app, "/outages/resume", service=SERVICE).headers["location"] == "/"

    (outage,) = queue.outages()
    assert outage.resumed_at_us == NOON
    page = opened(app, "/")
    assert "It is available again; work resumes step by step." in part(page, "banners")
    assert form not in page.text
    # A second click, and a hold that has ended meanwhile, are no errors.
    assert sent(app, "/outages/resume", service=SERVICE).status_code == 303


def test_a_reader_sees_an_outage_without_the_button_and_a_customer_does_not(
    queue: Queue, app: FastAPI
) -> None:
    hold(queue, SERVICE)
    key_for(queue)
    reader, acme = key_for(queue, role="reader"), key_for(queue, "acme")

    seen = opened(app, "/", reader)
    assert "azure &lt;ocr&gt;" in part(seen, "banners")
    assert "/outages/resume" not in seen.text
    assert "azure" not in opened(app, "/mine", acme).text
    for key in (reader, acme):
        assert sent(app, "/outages/resume", key, service=SERVICE).status_code == 403
    foreign = session_of(app, key_for(queue)) | {"Sec-Fetch-Site": "cross-site"}
    fields = {"service": SERVICE}
    assert asked(app, "POST", "/outages/resume", data=fields, headers=foreign).status_code == 403
    assert queue.outages()[0].resumed_at_us is None


# ── Expiry ───────────────────────────────────────────────────────────────────────────────────────


def test_a_document_shows_when_it_expires_and_is_retried_with_a_new_expiry(
    queue: Queue, app: FastAPI, clock: ManualClock
) -> None:
    id = queue.submit("acme", expires_in_s=60).id
    assert "Expires 2030-03-17 17:47:40 UTC" in part(opened(app, f"/documents/{id}"), "actions")
    clock.advance(60)
    queue.expire()

    expired = opened(app, f"/documents/{id}")
    assert '<span class="state expired">expired</span>' in expired.text
    assert "Hours until it expires again" in part(expired, "actions")
    for wrong in ({}, {"hours": ""}, {"hours": "0"}, {"hours": "-1"}, {"hours": "nan"}):
        assert sent(app, f"/documents/{id}/retry", **wrong).status_code in (409, 422)
    assert queue.get(id).state is State.EXPIRED

    assert sent(app, f"/documents/{id}/retry", hours="0.5").status_code == 303
    document = queue.get(id)
    assert (document.state, document.expires_at_us) == (
        State.WAITING,
        clock.now() + 1_800 * SECOND_US,
    )


def test_expired_documents_are_listed_by_their_state(
    queue: Queue, app: FastAPI, clock: ManualClock
) -> None:
    queue.submit("acme", name="late.pdf", expires_in_s=60)
    queue.submit("acme", name="kept.pdf")
    clock.advance(60)
    queue.expire()

    found = opened(app, "/documents?state=expired").text
    assert "late.pdf" in found
    assert "kept.pdf" not in found


def test_an_operator_sets_the_expiry_of_a_kind(queue: Queue, app: FastAPI) -> None:
    def save(expires_in_s: str) -> int:
        fields = {"name": "ocr", "limits": "true", "expires_in_s": expires_in_s}
        return sent(app, "/kinds", **fields).status_code

    assert save("90") == 303
    assert queue.kind("ocr").settings == KindSettings(expires_in_s=90)
    assert "ocr 0 0 0 – 5 1 min 30 s" in part(opened(app, "/kinds"), "kinds")
    for wrong in ("soon", "0", "-1", "nan", "1e99"):
        assert save(wrong) == 422
    assert queue.kind("ocr").settings == KindSettings(expires_in_s=90)
    assert save("") == 303
    assert queue.kind("ocr").settings == KindSettings()
