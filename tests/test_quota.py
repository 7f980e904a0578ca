"""The byte quota of a customer at every way in, and readiness as a test of writes."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from fairturn import Client, Completed, Queue, QuotaExceeded
from fairturn.clock import ManualClock
from fairturn.contents.local import Folder
from fairturn.dashboard.routes import install
from fairturn.errors import StoreFull
from fairturn.model import DOCUMENT_BYTES
from fairturn.service.app import make_app
from fairturn.service.options import ServiceLimits
from tests.commands import claim, error_of, fairturn, lines_of
from tests.http_server import TOKEN, asked, bearer, code_of, entered, key_for, served
from tests.test_service_uploads import connected, head
from tests.test_sqlite_faults import leave

START = 1_790_000_000_000_000
LIMIT = 300_000
SAME_ORIGIN = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db") as queue:
        queue.set_customer("acme", bytes_max=LIMIT)
        yield queue


def contents_of(queue: Queue) -> list[str]:
    return list(queue.contents.names(1 << 60))


# ── In Python ────────────────────────────────────────────────────────────────────────────────────


def test_a_content_over_the_quota_is_not_stored(queue: Queue) -> None:
    queue.submit("acme", content=bytes(200_000))

    with pytest.raises(QuotaExceeded, match="raise bytes_max of the customer"):
        queue.submit("acme", content=bytes(100_000))

    assert len(contents_of(queue)) == 1
    assert queue.customer("acme").stored_bytes == 200_000 + DOCUMENT_BYTES
    queue.submit("bolt", content=bytes(400_000))


def test_pruning_makes_room(tmp_path: Path) -> None:
    clock = ManualClock(START)
    with Queue(tmp_path / "documents.db", clock=clock) as queue:
        queue.configure(bytes_per_customer_max=LIMIT)
        queue.submit("acme", content=bytes(200_000))
        (claimed,) = claim(queue)
        queue.store.finish([Completed(claimed.fence, "1")])
        clock.advance(8 * 86_400)

        queue.prune()

        queue.submit("acme", content=bytes(200_000))
        assert queue.customer("acme").stored_bytes == 200_000 + DOCUMENT_BYTES


@pytest.mark.parametrize("value", [0, -1, 1 << 54])
def test_a_quota_out_of_range_is_refused(queue: Queue, value: int) -> None:
    with pytest.raises(ValueError, match="bytes_max is"):
        queue.set_customer("acme", bytes_max=value)
    with pytest.raises(ValueError, match="bytes_per_customer_max is"):
        queue.configure(bytes_per_customer_max=value)
    with pytest.raises(TypeError, match="bytes_max is"):
        queue.set_customer("acme", bytes_max=1.5)  # type: ignore[arg-type]


# ── Over HTTP ────────────────────────────────────────────────────────────────────────────────────


def answer_to(connection: socket.socket) -> bytes:
    answer = b""
    while b"quota_exceeded" not in answer and (part := connection.recv(65_536)):
        answer += part
    return answer


@pytest.mark.parametrize(
    ("line", "body"),
    [
        (f"Content-Length: {LIMIT}", b""),
        ("Transfer-Encoding: chunked", b"30000\r\n" + bytes(0x30000) + b"\r\n"),
    ],
    ids=["declared", "streamed"],
)
def test_an_upload_stops_at_the_quota(queue: Queue, line: str, body: bytes) -> None:
    """The service answers before the body ends: by its declared size, or at the limit."""
    key = key_for(queue, "acme")
    queue.submit("acme", content=bytes(150_000))
    kept = contents_of(queue)
    with served(queue) as url, connected(url) as connection:
        connection.sendall(head(key, line) + body)
        answer = answer_to(connection)

    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"quota_exceeded"' in answer
    assert contents_of(queue) == kept
    assert queue.customer("acme").waiting == 1


def test_a_problem_names_the_quota(queue: Queue) -> None:
    app, key = make_app(queue), bearer(key_for(queue, "acme"))
    asked(app, "POST", "/v1/documents", headers=key, content=bytes(200_000))

    answer = asked(app, "POST", "/v1/documents", headers=key, content=bytes(100_000))

    assert code_of(answer) == (413, "quota_exceeded")
    problem = answer.json()
    assert (problem["customer"], problem["maximum"]) == ("acme", LIMIT)
    assert problem["stored_bytes"] == 200_000 + DOCUMENT_BYTES
    assert "pruned, or ask the operator for more" in problem["detail"]
    assert len(contents_of(queue)) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"content": b"x" * 60_000},
        {"json": "x" * 60_000},
        {"files": {"file": bytes(100_000)}},
        {"files": {"file": bytes(500_000)}},
        {"json": "x" * 100_000},
    ],
    ids=["small", "payload", "form", "large form", "large payload"],
)
def test_the_quota_holds_for_every_way_to_submit(queue: Queue, body: dict[str, Any]) -> None:
    app, key = make_app(queue), bearer(key_for(queue, "acme"))
    queue.submit("acme", content=bytes(LIMIT - 2 * DOCUMENT_BYTES))
    kept = contents_of(queue)

    answer = asked(app, "POST", "/v1/documents", headers=key, **body)

    assert code_of(answer) == (413, "quota_exceeded")
    assert contents_of(queue) == kept
    assert queue.customer("acme").waiting == 1


def test_a_repeated_upload_is_answered_although_the_quota_is_used_up(queue: Queue) -> None:
    app, key = make_app(queue), {**bearer(key_for(queue, "acme")), "Idempotency-Key": "k"}
    first = asked(app, "POST", "/v1/documents", headers=key, content=bytes(200_000))

    again = asked(app, "POST", "/v1/documents", headers=key, content=bytes(200_000))

    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json() == first.json()
    never = asked(app, "POST", "/v1/documents", headers=key, content=bytes(LIMIT + 1))
    assert code_of(never) == (413, "quota_exceeded")


def test_the_limit_of_the_service_is_still_named_as_such(queue: Queue) -> None:
    app = make_app(queue, ServiceLimits(size_bytes_max=100_000))

    answer = asked(
        app, "POST", "/v1/documents", headers=bearer(key_for(queue, "acme")), content=bytes(100_001)
    )

    assert code_of(answer) == (413, "too_large")


def test_an_operator_sets_and_reads_a_quota(queue: Queue) -> None:
    app, key = make_app(queue), bearer(key_for(queue))
    queue.submit("acme", payload=1)

    for given, expected in ((5_000, 5_000), (None, 5_000), (0, None)):
        change = {"name": "acme"} | ({} if given is None else {"bytes_max": given})
        answer = asked(app, "POST", "/v1/customers", headers=key, json=change)
        assert answer.json()["bytes_max"] == expected
    assert answer.json()["stored_bytes"] == DOCUMENT_BYTES + 1

    changed = asked(
        app, "PATCH", "/v1/settings", headers=key, json={"bytes_per_customer_max": 7_000}
    )
    assert changed.json()["bytes_per_customer_max"] == 7_000


def test_the_client_raises_the_error_of_the_queue(queue: Queue) -> None:
    operator, acme = key_for(queue), key_for(queue, "acme")
    with served(queue) as url:
        with Client(url, operator) as client:
            assert client.set_customer("acme", bytes_max=2_000).settings.bytes_max == 2_000
        with Client(url, acme) as client:
            client.submit(payload=1)
            with pytest.raises(QuotaExceeded) as refused:
                client.submit(payload=1)
        with Client(url, operator) as client:
            assert client.set_customer("acme", bytes_max=None).settings.bytes_max is None

    assert refused.value.bytes_max == 2_000
    assert refused.value.stored_bytes == DOCUMENT_BYTES + 1


# ── On the command line and the page ─────────────────────────────────────────────────────────────


def test_a_quota_is_set_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Queue("documents.db"):
        pass

    said = fairturn("customers", "set", "acme", "--bytes-max", "2000").stdout

    assert said.startswith("acme: weight 1, no limit, at most 2,000 bytes.")
    fairturn("submit", "acme", "--payload", "1")
    refused = fairturn("submit", "acme", "--payload", "1")
    assert "more than the 2,000 allowed" in refused.stderr
    (shown,) = lines_of(fairturn("customers", "set", "acme", "--no-bytes-max", "--json"))
    assert (shown["bytes_max"], shown["stored_bytes"]) == (None, DOCUMENT_BYTES + 1)
    both = fairturn("customers", "set", "acme", "--bytes-max", "1", "--no-bytes-max")
    assert "contradict each other" in error_of(both, 2)


def test_a_quota_is_set_on_the_page(tmp_path: Path) -> None:
    with Queue(tmp_path / "page.db") as queue:
        app = make_app(queue, token=TOKEN)
        install(app)
        headers = {**SAME_ORIGIN, **entered(app)}
        form = {"name": "acme", "weight": "1", "limit": "", "bytes_max": "123456"}
        answer = asked(app, "POST", "/customer", data=form, headers=headers)
        assert answer.status_code == 303
        assert queue.customer("acme").settings.bytes_max == 123_456

        page = asked(app, "GET", "/customer?name=acme", headers=headers).text
        asked(app, "POST", "/customer", data=form | {"bytes_max": ""}, headers=headers)

        assert 'name="bytes_max"' in page
        assert 'value="123456"' in page
        assert queue.customer("acme").settings.bytes_max is None


# ── Readiness ────────────────────────────────────────────────────────────────────────────────────


def test_a_full_disk_is_reported_as_such(small_disk: Path) -> None:
    with Queue(small_disk / "documents.db") as queue:
        assert asked(make_app(queue), "GET", "/readyz").status_code == 200
        leave(small_disk, 1_048_576)

        answer = asked(make_app(queue), "GET", "/readyz")

    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["store: the disk is full"]


def test_a_full_disk_of_the_contents_is_reported_as_such(small_disk: Path, tmp_path: Path) -> None:
    with Queue(tmp_path / "documents.db", contents=Folder(small_disk / "contents")) as queue:
        assert asked(make_app(queue), "GET", "/readyz").status_code == 200
        leave(small_disk, 0)

        answer = asked(make_app(queue), "GET", "/readyz")

    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["contents: the disk is full"]


def test_a_file_that_is_locked_is_not_ready(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be read, and a submission would wait for the lock."""
    monkeypatch.setattr("fairturn.stores.sqlite.PROBE_S", 0.05)
    locked = apsw.Connection(str(tmp_path / "documents.db"))
    locked.execute("BEGIN IMMEDIATE")
    try:
        answer = asked(make_app(queue), "GET", "/readyz")
    finally:
        locked.close()

    assert answer.status_code == 503
    assert asked(make_app(queue), "GET", "/readyz").status_code == 200


FULL = """
    CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full';
    END $$;
    CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON fairturn.probes EXECUTE FUNCTION fail()"""


def test_a_full_disk_of_the_server_is_reported_as_such(url: str) -> None:
    with Queue(url) as queue:
        assert asked(make_app(queue), "GET", "/readyz").status_code == 200
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(FULL)

        answer = asked(make_app(queue), "GET", "/readyz")

    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["store: the disk is full"]


def test_a_store_without_room_raises_its_error(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairturn.stores.sqlite.connection.RESERVE_BYTES", 1 << 62)

    with pytest.raises(StoreFull):
        queue.check()
