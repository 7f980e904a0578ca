"""The HTTP service: many documents by id, a full queue, and the fields that a Python client needs
to return the same values as the queue."""

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fairturn import Completed, Queue
from fairturn.wire import IDS_MAX
from tests.commands import claim, complete, kill
from tests.http_server import bearer, code_of, key_for, served

NOBODYS = "0123456789abcde"
LINES = {"Content-Type": "application/x-ndjson"}


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db", waiting_per_customer_max=5) as queue:
        yield queue


@pytest.fixture
def url(queue: Queue) -> Iterator[str]:
    with served(queue) as url:
        yield url


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers=bearer(key), timeout=60)


def test_documents_are_cancelled_and_retried_by_their_ids(queue: Queue, url: str) -> None:
    (dead,) = [queue.submit("acme", payload=1).id]
    kill(queue)
    (running,) = [queue.submit("acme", payload=2).id]
    claim(queue)
    waiting, theirs = (queue.submit(name, payload=3).id for name in ("acme", "other"))
    ids = [waiting, NOBODYS, theirs, dead, running]

    with client(url, key_for(queue, "acme")) as acme:
        cancelled = acme.post("/v1/documents/cancel", json={"ids": ids})
        retried = acme.post("/v1/documents/retry", json={"ids": ids})

    assert cancelled.json()["states"] == ["cancelled", None, None, "dead", "running"]
    assert retried.json()["states"] == ["cancelled", None, None, "dead", "running"]
    assert [queue.get(id).state for id in (dead, theirs)] == ["waiting", "waiting"]
    with client(url, key_for(queue)) as operator:
        answer = operator.post("/v1/documents/cancel", json={"ids": [theirs, NOBODYS]})
        assert answer.json()["states"] == ["cancelled", None]
        assert code_of(operator.post("/v1/documents/cancel", json={"ids": []}))[0] == 422


def test_a_list_can_be_of_certain_documents(queue: Queue, url: str) -> None:
    mine, other, theirs = (queue.submit(name, payload=1).id for name in ("acme", "acme", "other"))
    with client(url, key_for(queue, "acme")) as acme:
        found = acme.get("/v1/documents", params={"id": [mine, theirs, NOBODYS]}).json()
        too_many = acme.get("/v1/documents", params={"id": [other] * (IDS_MAX + 1)})

    assert [each["id"] for each in found["documents"]] == [mine]
    assert code_of(too_many) == (422, "invalid")


def test_who_was_told_that_the_queue_is_full_can_wait_for_room(queue: Queue, url: str) -> None:
    ids = [queue.submit("acme", payload=n).id for n in range(5)]
    with client(url, key_for(queue, "acme")) as acme:
        full = acme.post("/v1/documents", json=1)
        now = acme.get("/v1/room").json()
        cancelling = threading.Timer(0.05, queue.cancel, [ids[0]])
        cancelling.start()
        later = acme.get("/v1/room", params={"wait_s": 30}).json()
        two = acme.get("/v1/room", params={"n": 2}).json()
        never = acme.get("/v1/room", params={"n": 6})

    cancelling.join()
    problem: dict[str, Any] = full.json()
    assert (full.status_code, problem["code"]) == (429, "queue_full")
    assert problem["limit"] == "waiting_per_customer_max"
    assert (problem["maximum"], problem["waiting"], problem["customer"]) == (5, 5, "acme")
    assert (now, later, two) == ({"room": False}, {"room": True}, {"room": False})
    assert code_of(never) == (422, "invalid")


def test_a_line_can_carry_bytes_and_says_whether_it_was_there_before(
    queue: Queue, url: str
) -> None:
    body = bytes(range(256)) * 300
    lines = [
        {"content": base64.b64encode(body).decode(), "key": "k"},
        {"payload": [1], "parent": NOBODYS},
    ]
    with client(url, key_for(queue, "acme")) as acme:
        answers = [
            acme.post("/v1/documents/batch", content=json.dumps(lines[0]), headers=LINES)
            for _ in range(2)
        ]
        orphan = acme.post("/v1/documents/batch", content=json.dumps(lines[1]), headers=LINES)
        wrong = acme.post("/v1/documents/batch", content='{"content": "***"}', headers=LINES)

    (first,), (again,) = (answer.json()["receipts"] for answer in answers)
    assert (first.pop("replayed"), again.pop("replayed")) == (False, True)
    assert first == again
    assert queue.read(first["id"]) == body
    assert code_of(orphan) == (422, "parent_unknown")
    assert code_of(wrong) == (422, "invalid")


def test_an_operator_is_told_of_a_missing_parent_too(queue: Queue, url: str) -> None:
    with client(url, key_for(queue)) as operator:
        answer = operator.post(f"/v1/documents?customer=acme&parent={NOBODYS}", json=1)

    assert code_of(answer) == (422, "parent_unknown")


def test_a_document_tells_how_large_the_file_of_its_result_is(queue: Queue, url: str) -> None:
    queue.submit("acme", payload=1)
    (claimed,) = claim(queue)
    file = queue.contents.put([b"x" * 1_000])
    queue.store.finish([Completed(claimed.fence, "1", file)])
    queue.submit("acme", payload=2)
    (plain,) = complete(queue)

    with client(url, key_for(queue, "acme")) as acme:
        documents = [acme.get(f"/v1/documents/{id}").json() for id in (claimed.document.id, plain)]

    assert [each["result_file_bytes"] for each in documents] == [1_000, None]
    assert queue.result_file_bytes(claimed.document.id) == 1_000


def test_a_position_is_told_with_what_it_is_made_of(queue: Queue, url: str) -> None:
    for _ in range(3):
        id = queue.submit("acme", payload=1).id
    with client(url, key_for(queue, "acme")) as acme:
        position = acme.get(f"/v1/documents/{id}").json()["explanation"]["position"]
        me = acme.get("/v1/me").json()

    found = queue.explain(id).position
    assert found is not None
    assert position == {
        **found.bounds._asdict(),
        "before": found.before._asdict(),
        "reached": True,
        "causes": [],
    }
    assert me["version"]
