"""Kinds of work over HTTP: submissions, filters, settings and metrics."""

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from fairturn import KindRefused, Queue, Submission
from fairturn.clock import ManualClock, SystemClock
from fairturn.explain.snapshot import ALIVE_US
from fairturn.model import KINDS_MAX
from fairturn.service.batcher import SubmissionBatcher
from fairturn.service.options import ServiceLimits
from fairturn.service.service import Service
from tests.commands import kill
from tests.http_server import bearer, client_of, code_of, key_for

LARGE = bytes(range(256)) * 1_024  # too large for a row
LINES = {"Content-Type": "application/x-ndjson"}


@pytest.fixture(params=["memory", "file"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    place = ":memory:" if request.param == "memory" else tmp_path / "documents.db"
    with Queue(place) as queue:
        yield queue


@pytest.fixture
def operator(queue: Queue) -> Iterator[httpx.Client]:
    with client_of(queue, key=key_for(queue)) as client:
        yield client


def submissions(kind: Any) -> dict[str, dict[str, Any]]:
    """Return the requests for a document of a kind, by the form of the request."""
    query = {"customer": "acme", "kind": kind}
    line = json.dumps({"customer": "acme", "payload": 1, "kind": kind})
    return {
        "payload": {"params": query, "json": {"page": 1}},
        "content": {"params": query, "content": b"Invoice 17"},
        "large content": {"params": query, "content": LARGE},
        "form": {"data": query, "files": {"file": ("a.pdf", b"a")}},
        "large form": {"data": query, "files": {"file": ("a.pdf", LARGE)}},
        "batch": {"url": "/v1/documents/batch", "content": line, "headers": LINES},
    }


FORMS = pytest.mark.parametrize("form", submissions(""))


def post(client: httpx.Client, form: str, kind: Any) -> httpx.Response:
    return client.post(**{"url": "/v1/documents", **submissions(kind)[form]})


# ── Submitting ───────────────────────────────────────────────────────────────────────────────────


@FORMS
def test_every_form_of_a_submission_takes_a_kind(
    queue: Queue, operator: httpx.Client, form: str
) -> None:
    queue.set_kind("ocr")

    response = post(operator, form, "ocr")

    assert response.status_code == 201, response.text
    (document,) = queue.iterate()
    assert document.kind == "ocr"
    assert operator.get(f"/v1/documents/{document.id}").json()["kind"] == "ocr"
    assert queue.kind("ocr").waiting == 1


@FORMS
def test_an_unknown_kind_is_a_problem_of_its_own_and_nothing_is_stored(
    queue: Queue, operator: httpx.Client, form: str
) -> None:
    response = post(operator, form, "ocr")

    assert code_of(response) == (422, "kind_refused")
    assert response.json()["title"] == "The queue does not accept this kind of work."
    assert "create it with 'fairturn kinds set ocr'" in response.json()["detail"]
    assert list(queue.iterate()) == []
    assert [kind.name for kind in queue.kinds()] == ["default"]
    assert list(queue.contents.names(older_than=1 << 62)) == []


@FORMS
@pytest.mark.parametrize("kind", ["OCR", "", "o r", "x" * 65, "fairturn.x", "é"])
def test_an_invalid_kind_is_invalid_and_nothing_is_stored(
    queue: Queue, operator: httpx.Client, form: str, kind: str
) -> None:
    assert code_of(post(operator, form, kind)) == (422, "invalid")
    assert list(queue.iterate()) == []


def test_a_kind_of_a_line_must_be_a_text(queue: Queue, operator: httpx.Client) -> None:
    response = post(operator, "batch", 7)

    assert code_of(response) == (422, "invalid")
    assert response.json()["detail"] == "submission 0: kind must be a string, not int"


def test_a_batch_with_one_unknown_kind_stores_none_of_its_documents(
    queue: Queue, operator: httpx.Client
) -> None:
    lines = [{"customer": "acme", "payload": 1}, {"customer": "acme", "kind": "ocr"}]

    batch = operator.post(
        "/v1/documents/batch", content="\n".join(map(json.dumps, lines)), headers=LINES
    )

    assert code_of(batch) == (422, "kind_refused")
    assert list(queue.iterate()) == []


def test_an_unknown_kind_fails_no_submission_that_is_stored_with_it(queue: Queue) -> None:
    batcher = SubmissionBatcher(Service(queue, ServiceLimits(), SystemClock()))
    kinds = [None, "ocr", None, "orc", None]

    async def all_together() -> list[Any]:
        submissions = (Submission("acme", kind=kind) for kind in kinds)
        answers = [batcher.submit(partial(next, iter([each]))) for each in submissions]
        return await asyncio.gather(*answers, return_exceptions=True)

    answers = asyncio.run(all_together())

    assert [isinstance(answer, KindRefused) for answer in answers] == [
        kind is not None for kind in kinds
    ]
    assert queue.kind("default").waiting == 3


def test_a_queue_that_is_open_creates_kinds_up_to_the_maximum(
    queue: Queue, operator: httpx.Client
) -> None:
    assert operator.patch("/v1/settings", json={"kinds": "open"}).json()["kinds"] == "open"
    for n in range(1, KINDS_MAX):
        assert post(operator, "payload", f"kind-{n}").status_code == 201

    too_many = post(operator, "payload", "one-more")

    assert code_of(too_many) == (422, "kind_refused")
    assert "the queue has 100 kinds already" in too_many.json()["detail"]
    assert code_of(operator.patch("/v1/kinds/one-more", json={})) == (422, "kind_refused")
    assert code_of(operator.patch("/v1/settings", json={"kinds": "any"})) == (422, "invalid")


def test_the_same_key_with_another_kind_is_another_document(
    queue: Queue, operator: httpx.Client
) -> None:
    queue.set_kind("ocr")

    def submit(kind: str) -> httpx.Response:
        query = {"customer": "acme", "kind": kind}
        headers = {"Idempotency-Key": "k"}
        return operator.post("/v1/documents", params=query, content=b"a", headers=headers)

    assert submit("ocr").status_code == 201
    assert submit("ocr").status_code == 200
    assert code_of(submit("default")) == (422, "key_reused")


# ── Filters ──────────────────────────────────────────────────────────────────────────────────────


def test_documents_are_listed_and_changed_by_kind(queue: Queue, operator: httpx.Client) -> None:
    for kind in ("text", "ocr"):
        queue.set_kind(kind)
    for kind in ("text", "ocr", "ocr", "default"):
        queue.submit("acme", kind=kind)

    def listed(*kinds: str) -> list[str]:
        query = {"kind": list(kinds)}
        found = operator.get("/v1/documents", params=query).json()["documents"]
        return [document["kind"] for document in found]

    assert listed("ocr") == ["ocr", "ocr"]
    assert listed("ocr", "text") == ["ocr", "ocr", "text"]
    assert listed() == ["default", "ocr", "ocr", "text"]
    assert listed("nobodys") == []
    assert code_of(operator.get("/v1/documents?kind=OCR")) == (422, "invalid")
    kill(queue, 4)
    bulk = {"action": "retry", "filter": {"kind": ["ocr"]}, "dry_run": False}
    assert operator.post("/v1/bulk", json=bulk).json()["changed"] == 2
    assert [document.kind for document in queue.iterate(states="waiting")] == ["ocr", "ocr"]


# ── Settings ─────────────────────────────────────────────────────────────────────────────────────


def test_an_operator_lists_creates_limits_and_pauses_kinds(
    queue: Queue, operator: httpx.Client
) -> None:
    created = operator.patch("/v1/kinds/ocr", json={})
    settings = {"limit": 2, "attempts_max": 3, "expires_in_s": 7_200}
    limited = operator.patch("/v1/kinds/ocr", json=settings)
    paused = operator.patch("/v1/kinds/ocr", json={"paused": True, "limit": 0})
    queue.sign_on("gpu", 2, ["ocr"])
    queue.submit("acme", kind="ocr")

    plain = {"limit": None, "paused": False, "attempts_max": None, "expires_in_s": None}
    zeros = {"waiting": 0, "running": 0, "workers": 0}
    assert created.json() == {"name": "ocr", **zeros, **plain}
    assert limited.json() == {"name": "ocr", **zeros, **plain, **settings}
    assert (paused.json()["paused"], paused.json()["limit"]) == (True, None)
    listed = operator.get("/v1/kinds").json()["kinds"]
    assert [kind["name"] for kind in listed] == ["default", "ocr"]
    assert (listed[1]["waiting"], listed[1]["workers"], listed[1]["attempts_max"]) == (1, 1, 3)
    assert operator.get("/v1/kinds/ocr").json() == listed[1]
    for setting in ("attempts_max", "expires_in_s"):
        assert operator.patch("/v1/kinds/ocr", json={setting: 0}).json()[setting] is None
    (worker,) = operator.get("/v1/workers").json()["workers"]
    assert worker["kinds"] == ["ocr"]


@pytest.mark.parametrize(
    "change",
    [{"limit": -1}, {"limit": 1.5}, {"limit": 1_000_001}, {"paused": 1}, {"paused": "no"},
     {"attempts_max": 1 << 31}, {"attempts_max": "3"}, {"expires_in_s": -1},
     {"expires_in_s": "2h"}, {"expires_in_s": 1e11}, {"expires_in_s": 1e-9}, {"weight": 2}, []],
)  # fmt: skip
def test_a_change_that_a_kind_cannot_have_is_invalid(
    queue: Queue, operator: httpx.Client, change: Any
) -> None:
    assert code_of(operator.patch("/v1/kinds/ocr", json=change)) == (422, "invalid")
    assert [kind.name for kind in queue.kinds()] == ["default"]


def test_a_kind_that_does_not_exist_is_not_found_and_not_created(
    queue: Queue, operator: httpx.Client
) -> None:
    assert code_of(operator.get("/v1/kinds/orc")) == (404, "not_found")
    assert code_of(operator.get("/v1/kinds/ORC")) == (422, "invalid")
    assert code_of(operator.patch("/v1/kinds/ORC", json={})) == (422, "invalid")
    assert [kind.name for kind in queue.kinds()] == ["default"]


def test_only_operators_change_kinds_and_customers_do_not_see_them(queue: Queue) -> None:
    acme, reader = key_for(queue, "acme"), key_for(queue, role="reader")
    with client_of(queue, key=key_for(queue)) as client:
        for path in ("/v1/kinds", "/v1/kinds/default"):
            assert client.get(path, headers=bearer(reader)).status_code == 200
            refused = client.get(path, headers=bearer(acme))
            assert code_of(refused) == (403, "not_allowed")
        for key in (acme, reader):
            change = client.patch("/v1/kinds/default", json={"paused": True}, headers=bearer(key))
            assert code_of(change) == (403, "not_allowed")
    assert not queue.kind("default").settings.paused


# ── Metrics ──────────────────────────────────────────────────────────────────────────────────────


def test_the_metrics_have_every_kind_with_its_workers(queue: Queue, operator: httpx.Client) -> None:
    queue.set_kind("export", paused=True)
    queue.sign_on("gpu", 2, ["ocr"])
    for kind in ("ocr", "ocr", "default"):
        queue.submit("acme", kind=kind)
    queue.claim(1, worker="gpu", lease_s=30, kinds=["ocr"])

    text = operator.get("/metrics").text

    for name, values in {
        "waiting_documents": {"default": 1, "export": 0, "ocr": 1},
        "running_documents": {"default": 0, "export": 0, "ocr": 1},
        "workers": {"default": 0, "export": 0, "ocr": 1},
        "paused": {"default": 0, "export": 1, "ocr": 0},
    }.items():
        for kind, value in values.items():
            assert f'fairturn_kind_{name}{{kind="{kind}"}} {value}.0\n' in text, name


def test_a_worker_that_is_gone_serves_no_kind(queue: Queue, operator: httpx.Client) -> None:
    queue.sign_on("gpu", 2, ["ocr"])
    queue.sign_on("every", 2)
    assert queue.kind("ocr").workers == 2
    queue.sign_off("gpu")

    assert operator.get("/v1/kinds/ocr").json()["workers"] == 1
    assert 'fairturn_kind_workers{kind="ocr"} 1.0' in operator.get("/metrics").text


def test_a_worker_that_was_not_seen_for_a_while_serves_no_kind() -> None:
    clock = ManualClock()
    with Queue(":memory:", clock=clock) as queue:
        queue.sign_on("gpu", 2, ["ocr"])
        queue.submit("acme", kind="ocr")
        clock.advance(ALIVE_US / 1_000_000)
        assert (queue.kind("ocr").workers, queue.kind("ocr").is_unserved) == (1, False)
        assert queue.kind("default").workers == 0
        clock.advance(1)

        assert (queue.kind("ocr").workers, queue.kind("ocr").is_unserved) == (0, True)
        assert not queue.kind("default").is_unserved  # no document waits for it
