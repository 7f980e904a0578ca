"""The service has the same behaviour on every store."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from fairturn import Completed, Queue
from fairturn.contents.local import Folder
from tests.commands import claim, kill
from tests.http_server import bearer, client_of, code_of, key_for
from tests.servers.queues import Databases
from tests.wait import wait_until

LARGE = bytes(range(256)) * 1_024  # too large for a row
LINES = {"Content-Type": "application/x-ndjson"}


@pytest.fixture(params=["memory", "file", "postgres"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    with ExitStack() as stack:
        if request.param == "memory":
            queue = Queue(":memory:")
        elif request.param == "file":
            queue = Queue(tmp_path / "documents.db")
        else:
            databases = stack.enter_context(Databases())
            queue = Queue(databases.new(), contents=Folder(tmp_path / "contents"))
        yield stack.enter_context(queue)


@pytest.fixture
def client(queue: Queue) -> Iterator[httpx.Client]:
    with client_of(queue) as client:
        yield client


def test_a_document_goes_its_whole_way(queue: Queue, client: httpx.Client) -> None:
    acme, other = (bearer(key_for(queue, name)) for name in ("acme", "other"))
    first, again = (
        client.post(
            "/v1/documents?name=a.pdf", content=LARGE, headers={**acme, "Idempotency-Key": "k"}
        )
        for _ in range(2)
    )
    id = first.json()["id"]
    explained = client.get(f"/v1/documents/{id}", headers=acme).json()["explanation"]
    waiting: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: waiting.append(client.get(f"/v1/documents/{id}?wait_s=60", headers=acme))
    )
    thread.start()
    (claimed,) = claim(queue)
    queue.store.finish([Completed(claimed.fence, '{"pages": 3}', queue.contents.put([b"result"]))])
    thread.join(30)

    assert (first.status_code, again.status_code) == (201, 200)
    assert first.content == again.content
    assert (explained["position"]["least"], explained["position"]["most"]) == (0, 0)
    assert [answer.json()["state"] for answer in waiting] == ["completed"]
    assert client.get(f"/v1/documents/{id}/content", headers=acme).content == LARGE
    assert client.get(f"/v1/documents/{id}/result", headers=acme).json() == {"pages": 3}
    assert client.get(f"/v1/documents/{id}/result/file", headers=acme).content == b"result"
    missing = client.get("/v1/documents/0123456789abcde", headers=other)
    assert client.get(f"/v1/documents/{id}", headers=other).content == missing.content


def test_lines_pages_and_bulk_actions(queue: Queue, client: httpx.Client) -> None:
    operator = bearer(key_for(queue))
    lines = "\n".join(json.dumps({"customer": f"c{n % 2}", "payload": n}) for n in range(5))
    made = client.post("/v1/documents/batch", content=lines, headers={**operator, **LINES})
    ids = [receipt["id"] for receipt in made.json()["receipts"]]
    dead = kill(queue)

    first = client.get("/v1/documents?size=3", headers=operator).json()
    second = client.get(f"/v1/documents?after={first['next']}", headers=operator).json()
    bulk = {"action": "retry", "filter": {"state": ["dead"]}, "dry_run": False}
    retried = client.post("/v1/bulk", json=bulk, headers=operator).json()
    purged = client.post(
        "/v1/customers/purge", json={"name": "c1", "dry_run": False}, headers=operator
    )

    assert [d["id"] for d in first["documents"] + second["documents"]] == ids[::-1]
    assert len(dead) == retried["changed"] == 1
    assert purged.json()["waiting"] == 2
    assert client.get("/v1/summary", headers=operator).json()["waiting"] == 3


def test_keys_open_and_end(queue: Queue, client: httpx.Client) -> None:
    operator = bearer(key_for(queue))
    wanted = {"role": "customer", "customer": "acme", "name": "scanner"}
    made = client.post("/v1/keys", json=wanted, headers=operator).json()
    acme = bearer(made["shown"])

    assert client.get("/v1/me", headers=acme).json()["key_name"] == "scanner"
    assert code_of(client.get("/v1/summary", headers=acme)) == (403, "not_allowed")
    new = client.post(f"/v1/keys/{made['id']}/rotate", json={}, headers=operator).json()
    assert client.get("/v1/me", headers=bearer(new["shown"])).status_code == 200
    assert code_of(client.get("/v1/me", headers=acme)) == (401, "key_unknown")
    client.post("/v1/customers", json={"name": "acme"}, headers=operator)
    client.post("/v1/customers/purge", json={"name": "acme", "dry_run": False}, headers=operator)
    assert code_of(client.get("/v1/me", headers=bearer(new["shown"]))) == (401, "key_unknown")


def test_events_and_numbers_follow_what_happens(queue: Queue, client: httpx.Client) -> None:
    reader = bearer(key_for(queue, role="reader"))
    with client.stream("GET", "/v1/events", headers=reader) as response:
        lines = response.iter_lines()
        assert '"waiting": 0' in next(line for line in lines if line.startswith("data: "))
        id = queue.submit("acme", payload=1).id
        event = next(line for line in lines if line.startswith("data: "))

    assert id in event
    assert (
        'fairturn_waiting_documents{priority="1"} 1.0'
        in client.get("/metrics", headers=reader).text
    )
    wait_until(lambda: client.get("/readyz").status_code == 200, "it is ready")
