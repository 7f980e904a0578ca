"""The HTTP service: submit, query, wait, fetch, change."""

import hashlib
import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest

from fairturn import Completed, Queue
from fairturn.access.registry import KeyRegistry
from fairturn.clock import stopwatch
from fairturn.service.options import ServiceLimits
from tests.commands import LEASE_US, claim, complete, kill
from tests.http_server import bearer, client_of, code_of, key_for
from tests.wait import wait_until

LARGE = bytes(range(256)) * 1_024  # too large for a row


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db") as queue:
        yield queue


@pytest.fixture
def operator(queue: Queue) -> Iterator[httpx.Client]:
    with client_of(queue, key=key_for(queue)) as client:
        yield client


@pytest.fixture
def acme(queue: Queue) -> Iterator[httpx.Client]:
    with client_of(queue, key=key_for(queue, "acme")) as client:
        yield client


def submitted(client: httpx.Client, **more: Any) -> str:
    response = client.post("/v1/documents", **{"json": {"page": 1}, **more})
    assert response.status_code == 201, response.text
    id: str = response.json()["id"]
    return id


# ── Submitting ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("body", [b"", b"Invoice 17", LARGE])
def test_a_raw_body_is_the_document_and_comes_back_as_it_was(
    queue: Queue, acme: httpx.Client, body: bytes
) -> None:
    response = acme.post(
        "/v1/documents",
        params={"name": "a.pdf", "metadata": '{"pages": 3}', "cost": 2, "due_at": "1"},
        content=body,
        headers={"Content-Type": "application/pdf"},
    )

    assert response.status_code == 201
    receipt = response.json()
    assert receipt.keys() == {"id", "customer", "count", "priority", "submitted_at"}
    assert response.headers["location"] == f"/v1/documents/{receipt['id']}"
    document = queue.get(receipt["id"])
    assert (document.customer, document.name, document.metadata) == ("acme", "a.pdf", {"pages": 3})
    assert document.sha256 == hashlib.sha256(body).digest()
    assert queue.read(document.id) == body
    assert acme.get(f"/v1/documents/{document.id}/content").content == body


def test_a_json_body_is_a_payload_unless_it_is_said_to_be_a_content(
    queue: Queue, acme: httpx.Client
) -> None:
    payload = submitted(acme, json={"page": 1})
    content = submitted(acme, json={"page": 1}, params={"body_type": "content"})

    assert queue.payload(payload) == {"page": 1}
    assert json.loads(queue.read(content)) == {"page": 1}
    assert acme.get(f"/v1/documents/{payload}/content").json() == {"page": 1}


@pytest.mark.parametrize("body", [b"small", LARGE])
def test_a_form_of_a_browser_is_a_document(queue: Queue, acme: httpx.Client, body: bytes) -> None:
    response = acme.post(
        "/v1/documents",
        data={"metadata": '{"a": 1}', "key": "k"},
        files={"file": ("../etc/Rechnung ä.pdf", body)},
    )

    assert response.status_code == 201, response.text
    document = queue.get(response.json()["id"])
    assert (document.name, document.metadata) == ("../etc/Rechnung ä.pdf", {"a": 1})
    assert queue.read(document.id) == body
    shown = acme.get(f"/v1/documents/{document.id}/content").headers["content-disposition"]
    assert shown == (
        "attachment; filename=\"Rechnung _.pdf\"; filename*=UTF-8''Rechnung%20%C3%A4.pdf"
    )


def test_lines_are_accepted_all_or_none(queue: Queue, acme: httpx.Client) -> None:
    lines = [json.dumps({"payload": n, "key": f"k{n}"}) for n in range(3)]
    headers = {"Content-Type": "application/x-ndjson"}

    bad = acme.post("/v1/documents/batch", content="\n".join([*lines, '{"x": 1}']), headers=headers)
    good = acme.post("/v1/documents/batch", content="\n".join(lines), headers=headers)

    assert code_of(bad) == (422, "invalid")
    assert bad.json()["detail"].startswith("line 4: 'x' is not a field")
    assert good.status_code == 201
    assert [each["count"] for each in good.json()["receipts"]] == [0, -1, -2]
    assert queue.summary().waiting == 3


def test_the_same_idempotency_key_gives_the_first_receipt_again(
    queue: Queue, acme: httpx.Client
) -> None:
    def submit(body: bytes) -> httpx.Response:
        return acme.post("/v1/documents", content=body, headers={"Idempotency-Key": "k"})

    first, again, other = submit(LARGE), submit(LARGE), submit(LARGE + b"!")

    assert (first.status_code, again.status_code) == (201, 200)
    assert first.content == again.content
    assert again.headers["idempotency-replayed"] == "true"
    assert code_of(other) == (422, "key_reused")
    assert queue.customer("acme").count == 0
    assert sum(1 for _ in queue.contents.names(1 << 60)) == 1


def test_two_customers_with_the_same_idempotency_key_have_a_document_each(queue: Queue) -> None:
    keys = [key_for(queue, "acme"), key_for(queue, "other")]
    with client_of(queue) as client:
        answers = [
            client.post(
                "/v1/documents",
                json=1,
                headers={"Idempotency-Key": "k", "Authorization": f"Bearer {key}"},
            )
            for key in keys
        ]

    assert [answer.status_code for answer in answers] == [201, 201]


# ── Looking ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "accept, language, sentence",
    [
        (None, "en", "is waiting."),
        ("de-AT, en;q=0.5", "de", "wartet."),
        ("fr, pl;q=0.4, es;q=0.8", "es", "espera"),
        ("xx;q=high, ;;,*", "en", "is waiting."),
        ("q" * 5_000, "en", "is waiting."),
    ],
)
def test_a_document_is_explained_in_the_language_of_who_asks(
    acme: httpx.Client, accept: str | None, language: str, sentence: str
) -> None:
    id = submitted(acme)

    response = acme.get(
        f"/v1/documents/{id}", headers={} if accept is None else {"Accept-Language": accept}
    )

    explanation = response.json()["explanation"]
    assert response.headers["content-language"] == explanation["language"] == language
    assert sentence in explanation["sentences"][0]
    position = explanation["position"]
    assert (position["least"], position["most"]) == (0, 0)
    assert {"no_worker", "next"} <= {reason["code"] for reason in explanation["reasons"]}


def test_a_customer_is_told_of_others_only_how_many_they_are(
    queue: Queue, acme: httpx.Client
) -> None:
    for _ in range(3):
        queue.submit("Secret & Sons", payload=1)
    id = submitted(acme)
    claimed = claim(queue)[0]
    queue.store.finish([Completed(claimed.fence)])

    text = acme.get(f"/v1/documents/{id}").text

    assert "Secret" not in text
    assert '"worker":"w"' not in text


def test_a_setting_hides_positions_from_customers(queue: Queue) -> None:
    keys = key_for(queue, "acme"), key_for(queue)
    with client_of(queue, ServiceLimits(show_positions=False)) as client:
        hidden, shown = (
            client.get(
                f"/v1/documents/{queue.submit('acme', payload=1).id}",
                headers={"Authorization": f"Bearer {key}"},
            ).json()["explanation"]
            for key in keys
        )

    assert hidden["position"] is None
    assert not {"next", "position", "before_own"} & {each["code"] for each in hidden["reasons"]}
    assert shown["position"] is not None


def test_waiting_for_a_document_ends_when_it_ends(queue: Queue, acme: httpx.Client) -> None:
    id = submitted(acme)
    answers: list[httpx.Response] = []
    waiting = threading.Thread(
        target=lambda: answers.append(
            acme.get(f"/v1/documents/{id}", params={"wait_s": 60}, timeout=60)
        )
    )
    waiting.start()

    complete(queue)
    waiting.join(30)

    assert [answer.json()["state"] for answer in answers] == ["completed"]


def test_waiting_for_a_document_ends_when_the_time_is_over(acme: httpx.Client) -> None:
    id = submitted(acme)

    answer = acme.get(f"/v1/documents/{id}", params={"wait_s": 0.05, "explain": False})

    assert (answer.json()["state"], answer.json()["explanation"]) == ("waiting", None)


def test_documents_are_listed_in_pages_and_by_filters(queue: Queue, acme: httpx.Client) -> None:
    queue.submit("other", payload=0)
    ids = [submitted(acme, params={"name": f"n{n}"}) for n in range(5)]

    def listed(**params: Any) -> Any:
        return acme.get("/v1/documents", params=params).json()

    first = listed(size=2)
    second = listed(size=3, after=first["next"])
    assert [d["id"] for d in first["documents"] + second["documents"]] == ids[::-1]
    assert second["next"] is None
    assert [d["id"] for d in listed(name="n3")["documents"]] == [ids[3]]
    assert [d["id"] for d in listed(priority=2)["documents"]] == ids[:2:-1]
    assert listed(state=["dead", "running"])["documents"] == []


# ── Fetching ─────────────────────────────────────────────────────────────────────────────────────


def test_what_is_downloaded_is_never_shown_as_a_page(acme: httpx.Client) -> None:
    id = submitted(
        acme, json=None, content=b"<script>alert(1)</script>", params={"name": 'a"\r\nX: y.html'}
    )

    headers = acme.get(f"/v1/documents/{id}/content").headers

    assert headers["content-type"] == "application/octet-stream"
    assert headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in headers["content-security-policy"]
    assert headers["content-disposition"].startswith('attachment; filename="a___X_ y.html"')


def test_a_result_is_there_when_the_document_is_completed(queue: Queue, acme: httpx.Client) -> None:
    id = submitted(acme)
    assert code_of(acme.get(f"/v1/documents/{id}/result")) == (409, "wrong_state")
    (claimed,) = claim(queue)
    ref = queue.contents.put([b"the ", b"result"])
    queue.store.finish([Completed(claimed.fence, '{"pages": 3}', ref)])

    assert acme.get(f"/v1/documents/{id}/result").json() == {"pages": 3}
    assert acme.get(f"/v1/documents/{id}/result/file").content == b"the result"


def test_a_result_without_a_file_has_none_to_download(queue: Queue, acme: httpx.Client) -> None:
    id = submitted(acme)
    complete(queue)

    assert code_of(acme.get(f"/v1/documents/{id}/result/file")) == (404, "not_found")


# ── Changing ─────────────────────────────────────────────────────────────────────────────────────


def test_documents_are_cancelled_and_dead_ones_tried_again(
    queue: Queue, acme: httpx.Client
) -> None:
    dead = submitted(acme)
    assert kill(queue) == [dead]
    waiting = submitted(acme)

    for _ in range(2):  # as after a lost response
        retried = acme.post(f"/v1/documents/{dead}/retry")
        assert (retried.status_code, retried.json()) == (200, {"id": dead, "state": "waiting"})
    assert acme.post(f"/v1/documents/{waiting}/cancel").json()["state"] == "cancelled"
    assert code_of(acme.post(f"/v1/documents/{waiting}/retry")) == (409, "wrong_state")
    assert queue.summary().waiting == 1


def test_a_customer_sees_where_it_stands(queue: Queue, acme: httpx.Client) -> None:
    before = acme.get("/v1/me").json()["customer"]
    for _ in range(3):
        submitted(acme)
    queue.store.claim(1, worker="w", lease_us=LEASE_US)

    after = acme.get("/v1/me").json()

    assert (before["count"], before["priority_of_next"], before["resets_at"]) == (0, 1, None)
    assert after["role"] == "customer"
    standing = after["customer"]
    last = queue.customer("acme").count_updated_at_us
    assert last is not None
    assert standing == {
        "name": "acme",
        "count": -2,
        "priority_of_next": 2,
        "resets_at": last + 1_500_000_000,
        "waiting": 2,
        "waiting_by_priority": [2, 0, 0, 0, 0, 0, 0, 0, 0],
        "running": 1,
        "delayed": 0,
    }


# ── Operating ────────────────────────────────────────────────────────────────────────────────────


def test_an_operator_sets_weights_limits_and_pauses(queue: Queue, operator: httpx.Client) -> None:
    made = operator.post("/v1/customers", json={"name": "a/b ü", "weight": 2, "limit": 3})
    paused = operator.post("/v1/customers", json={"name": "a/b ü", "paused": True, "limit": 0})

    assert (made.json()["weight"], made.json()["limit"], made.json()["paused"]) == (2, 3, False)
    assert (paused.json()["weight"], paused.json()["limit"], paused.json()["paused"]) == (
        2,
        None,
        True,
    )
    found = operator.get("/v1/customers", params={"name": "a/b ü"}).json()["customers"]
    assert [customer["name"] for customer in found] == ["a/b ü"]
    assert queue.customer("a/b ü").settings.paused


def test_purging_a_customer_takes_a_second_word(queue: Queue, operator: httpx.Client) -> None:
    queue.submit("acme", payload=1)

    tried = operator.post("/v1/customers/purge", json={"name": "acme"})
    assert (tried.json()["dry_run"], tried.json()["waiting"]) == (True, 1)
    assert queue.summary().waiting == 1
    operator.post("/v1/customers/purge", json={"name": "acme", "dry_run": False})

    assert queue.summary().waiting == 0
    again = operator.post("/v1/customers/purge", json={"name": "acme"})
    assert code_of(again) == (404, "not_found")


def test_a_bulk_action_changes_what_matches_and_only_without_dry_run(
    queue: Queue, operator: httpx.Client
) -> None:
    for customer in ("acme", "acme", "other"):
        queue.submit(customer, payload=1)
    bulk = {"action": "cancel", "filter": {"customer": "acme"}}

    tried = operator.post("/v1/bulk", json=bulk).json()
    done = operator.post("/v1/bulk", json={**bulk, "dry_run": False}).json()

    assert tried == {"matched": 2, "changed": 0, "more": False, "dry_run": True}
    assert done == {"matched": 2, "changed": 2, "more": False, "dry_run": False}
    assert [document.customer for document in queue.list(states="waiting").documents] == ["other"]


def test_settings_are_changed_for_everybody(queue: Queue, operator: httpx.Client) -> None:
    answer = operator.patch("/v1/settings", json={"attempts_max": 2, "mode": "equal"})

    assert (answer.json()["attempts_max"], answer.json()["mode"]) == (2, "equal")
    assert queue.settings.attempts_max == 2
    assert code_of(operator.patch("/v1/settings", json={"bounds": [0] * 8})) == (422, "invalid")
    assert operator.get("/v1/rule").json()["mode"] == "equal"


def test_an_operator_sees_the_queue_at_a_glance(queue: Queue, operator: httpx.Client) -> None:
    receipt = queue.submit("acme", payload=1)
    queue.submit("acme", payload=1)
    claim(queue)
    queue.store.sign_on("w", 4)

    summary = operator.get("/v1/summary").json()
    workers = operator.get("/v1/workers").json()["workers"]

    assert (summary["waiting"], summary["running"], summary["workers"]) == (1, 1, 1)
    assert summary["oldest_waiting_since_at"] >= receipt.submitted_at_us
    assert [(w["name"], w["slots"], w["alive"]) for w in workers] == [("w", 4, True)]


# ── Watching ─────────────────────────────────────────────────────────────────────────────────────


def events_of(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield id, json.loads(line.removeprefix("data: "))


def test_a_customer_hears_of_its_own_documents_and_of_no_others(
    queue: Queue, acme: httpx.Client
) -> None:
    queue.submit("other", payload=1)
    with acme.stream("GET", "/v1/events") as response:
        events = events_of(response)
        _, first = next(events)
        id = queue.submit("acme", payload=1).id
        last, second = next(events)

    assert (first["documents"], first["customer"]["waiting"]) == ([], 0)
    assert [document["id"] for document in second["documents"]] == [id]
    assert second["customer"]["waiting"] == 1
    assert "other" not in json.dumps([first, second])

    with acme.stream("GET", "/v1/events", headers={"Last-Event-ID": last}) as response:
        events = events_of(response)
        newer = queue.submit("acme", payload=2).id
        # The first event may have come before it, or in the middle of it.
        assert any(newer in {one["id"] for one in told["documents"]} for _, told in events)


def test_changes_are_told_together_four_times_a_second_at_most(
    queue: Queue, acme: httpx.Client
) -> None:
    heard = threading.Event()

    def submit() -> None:
        while not heard.is_set():
            queue.submit("acme", payload=1)

    submitting = threading.Thread(target=submit)
    begun = stopwatch()
    with acme.stream("GET", "/v1/events") as response:
        submitting.start()
        last = [event for _, event in islice(events_of(response), 5)][-1]
        took_s = stopwatch() - begun
        heard.set()
    submitting.join()

    assert took_s >= 4 * 0.25
    assert last["customer"]["waiting"] > 5


def test_a_stream_ends_with_its_key(queue: Queue) -> None:
    key = key_for(queue, "acme")
    with client_of(queue, key=key) as client, client.stream("GET", "/v1/events") as response:
        events = events_of(response)
        next(events)
        KeyRegistry(queue.store).revoke(key.split("_")[1])

        assert list(events) == []


def test_one_key_has_only_so_many_streams(queue: Queue) -> None:
    keys = [bearer(key_for(queue, name)) for name in ("acme", "other")]
    with client_of(queue, ServiceLimits(streams_per_key_max=1)) as client:
        with client.stream("GET", "/v1/events", headers=keys[0]) as first:
            events = events_of(first)
            next(events)
            second = client.get("/v1/events", headers=keys[0])
            with client.stream("GET", "/v1/events", headers=keys[1]) as others:
                assert others.status_code == 200

        assert code_of(second) == (429, "too_many_at_once")
        assert int(second.headers["retry-after"]) > 0
        wait_until(lambda: _opens(client, keys[0]), "the stream that ended makes room")


def _opens(client: httpx.Client, key: dict[str, str]) -> bool:
    with client.stream("GET", "/v1/events", headers=key) as response:
        return response.status_code == 200


def test_an_operator_hears_of_the_whole_queue(queue: Queue, operator: httpx.Client) -> None:
    with operator.stream("GET", "/v1/events") as response:
        events = events_of(response)
        next(events)
        queue.submit("acme", payload=1)
        _, event = next(events)

    assert event["summary"]["waiting"] == 1
    assert [document["customer"] for document in event["documents"]] == ["acme"]


# ── Observing ────────────────────────────────────────────────────────────────────────────────────


def test_the_numbers_for_prometheus_are_those_of_the_store(
    queue: Queue, operator: httpx.Client
) -> None:
    for _ in range(4):
        queue.submit("acme", payload=1)
    complete(queue)
    queue.store.sign_on("w", 4)

    text = operator.get("/metrics").text

    assert 'fairturn_waiting_documents{priority="1"} 2.0' in text
    assert 'fairturn_waiting_documents{priority="2"} 1.0' in text
    assert 'fairturn_recent_documents{state="completed"} 1.0' in text
    assert "fairturn_workers 1.0" in text
    assert "fairturn_worker_slots 4.0" in text
    assert "fairturn_idle_slots 4.0" in text
    assert 'fairturn_recent_wait_seconds{quantile="0.99"}' in text
    assert "acme" not in text  # unless it is requested


def test_outcomes_are_counted_for_prometheus_although_their_documents_are_gone(
    queue: Queue, operator: httpx.Client
) -> None:
    for customer in "abcd":
        queue.submit(customer, payload=1)
    complete(queue, 2)
    kill(queue)
    queue.cancel(queue.submit("d", payload=1).id)
    for customer in "abcd":
        queue.purge(customer)

    text = operator.get("/metrics").text

    assert 'fairturn_ended_documents_total{state="completed"} 2.0' in text
    assert 'fairturn_ended_documents_total{state="dead"} 1.0' in text
    assert 'fairturn_ended_documents_total{state="cancelled"} 1.0' in text
    assert "fairturn_retried_attempts_total 0.0" in text
    assert "fairturn_repairs_total 0.0" in text
    assert operator.get("/v1/summary").json()["completed"] == 2


def test_customers_are_in_the_numbers_only_when_asked_for_and_no_more_than_that(
    queue: Queue,
) -> None:
    for customer in ("a", "b", "c"):
        queue.submit(customer, payload=1)
    with client_of(queue, ServiceLimits(customers_in_metrics=2)) as client:
        text = client.get("/metrics").text

    assert 'fairturn_customer_waiting_documents{customer="b"} 1.0' in text
    assert 'customer="c"' not in text


def test_a_service_is_ready_with_notes_and_not_ready_with_reasons(queue: Queue) -> None:
    with client_of(queue) as client:
        ready = client.get("/readyz")
        queue.close()
        wait_until(lambda: client.get("/readyz").status_code == 503, "it is looked at anew")
        not_ready = client.get("/readyz")
        live = client.get("/livez")

    assert ready.json()["notes"] == ["no worker is running: documents are accepted, and wait"]
    assert not_ready.status_code == 503
    assert not_ready.json()["reasons"] == ["store: it does not respond"]
    assert live.json() == {"live": True}


def test_the_description_can_be_looked_at_without_another_server(operator: httpx.Client) -> None:
    page = operator.get("/docs")

    assert "http:" not in page.text
    assert "https:" not in page.text
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    for name in ("docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "docs/begin.js"):
        assert name in page.text
        assert operator.get(f"/{name}").status_code == 200
    assert code_of(operator.get("/docs/nothing")) == (404, "not_found")
