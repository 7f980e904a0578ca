"""Bodies that are too large, too slow, cut off, broken or too deep: a clear error, nothing stored,
and the customer's count unchanged."""

import asyncio
import base64
import hashlib
import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import httpx
import pytest

from fairturn import Queue
from fairturn.contents.local import Folder, NoContents, Verify
from fairturn.model import CONTENT_BYTES_MAX, ContentRef
from fairturn.service.app import make_app
from fairturn.service.options import ServiceLimits
from fairturn.service.service import THREADS
from fairturn.wire import BATCH_BYTES_MAX, JSON_BYTES_MAX
from tests.http_server import asked, bearer, client_of, code_of, key_for, served
from tests.wait import wait_until

SMALL = ServiceLimits(size_bytes_max=200_000)
IMPATIENT = ServiceLimits(pause_s_max=0.3)
LINES = {"Content-Type": "application/x-ndjson"}


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db") as queue:
        yield queue


@pytest.fixture
def acme(queue: Queue) -> Iterator[httpx.Client]:
    with client_of(queue, SMALL, key_for(queue, "acme")) as client:
        yield client


Post = Callable[..., httpx.Response]


@pytest.fixture
def post(queue: Queue) -> Post:
    """Call the application without a server, which is much faster."""
    app = make_app(queue, SMALL)
    key = bearer(key_for(queue, "acme"))

    def ask(path: str, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return asked(app, "POST", path, headers={**key, **(headers or {})}, **more)

    return ask


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("", {"content": bytes(1_001)}),
        ("", {"json": "x" * 999}),
        ("", {"files": {"file": bytes(1_001)}}),
        ("/batch", {"content": '{"payload": "' + "x" * 999 + '"}', "headers": LINES}),
        ("/batch", {"content": '{"content": "' + "AAAA" * 334 + '"}', "headers": LINES}),
    ],
)
def test_a_size_limit_below_64_kib_holds_for_every_way_to_submit(
    queue: Queue, path: str, body: dict[str, Any]
) -> None:
    headers = {**bearer(key_for(queue, "acme")), **body.pop("headers", {})}
    app = make_app(queue, ServiceLimits(size_bytes_max=1_000))

    answer = asked(app, "POST", f"/v1/documents{path}", headers=headers, **body)

    assert code_of(answer) == (413, "too_large")
    assert list(queue.iterate()) == []
    assert queue.submit("acme", payload=1).count == 0


def nothing_was_kept(queue: Queue) -> bool:
    """Return whether there is no document, no count and no content, not even an unfinished one."""
    return (
        queue.list().documents == []
        and queue.customers().customers == []
        and not any(queue.contents.names(1 << 60))
    )


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    """Return a raw connection."""
    where = urlsplit(url)
    assert where.hostname is not None
    with socket.create_connection((where.hostname, where.port or 80), timeout=30) as connection:
        yield connection


def head(key: str, *lines: str, path: str = "/v1/documents") -> bytes:
    said = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Authorization: Bearer {key}", *lines]
    return "\r\n".join([*said, "", ""]).encode()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_body_that_is_too_large_is_refused(
    queue: Queue, acme: httpx.Client, streamed: bool
) -> None:
    body = b"x" * 300_000

    answer = acme.post(
        "/v1/documents", content=iter([body[:150_000], body[150_000:]]) if streamed else body
    )

    assert code_of(answer) == (413, "too_large")
    assert nothing_was_kept(queue)


def test_a_declared_size_is_refused_before_a_byte_of_it_comes(queue: Queue) -> None:
    key = key_for(queue, "acme")
    with served(queue, SMALL) as url, connected(url) as connection:
        connection.sendall(head(key, f"Content-Length: {10**12}"))
        answer = connection.recv(4_096)

    assert b" 413 " in answer.splitlines()[0]
    assert nothing_was_kept(queue)


@pytest.mark.parametrize("length", ["-1", "1, 2", "x", "9" * 30, "1\r\nContent-Length: 2"])
def test_a_senseless_length_is_refused(queue: Queue, length: str) -> None:
    key = key_for(queue, "acme")
    with served(queue, SMALL) as url, connected(url) as connection:
        connection.sendall(head(key, f"Content-Length: {length}") + b"xx")
        answer = connection.recv(4_096)

    assert answer.split()[1] in (b"400", b"413"), answer
    assert nothing_was_kept(queue)


@pytest.mark.parametrize("begun", [b"", b"x" * 100, b"x" * 100_000])
def test_a_body_that_stops_coming_is_too_slow(queue: Queue, begun: bytes) -> None:
    key = key_for(queue, "acme")
    with served(queue, IMPATIENT) as url, connected(url) as connection:
        connection.sendall(head(key, "Content-Length: 150000") + begun)
        answer = b""
        while b"too_slow" not in answer:
            came = connection.recv(65_536)
            assert came, answer
            answer += came

    assert b" 408 " in answer.splitlines()[0]
    assert nothing_was_kept(queue)


@pytest.mark.parametrize(
    "path, plan",
    [
        ("/v1/documents", ServiceLimits(upload_s_max=0.5)),
        ("/v1/documents/batch", ServiceLimits(upload_s_max=0.5)),
        ("/v1/customers", ServiceLimits(body_s_max=0.5)),
    ],
)
def test_a_body_that_comes_bit_by_bit_without_an_end_is_too_slow(
    queue: Queue, path: str, plan: ServiceLimits
) -> None:
    kind = "Content-Type: application/x-ndjson" if "batch" in path else "Content-Type: x/y"
    answered = threading.Event()
    with served(queue, plan) as url, connected(url) as connection:
        connection.sendall(head(key_for(queue), kind, "Transfer-Encoding: chunked", path=path))

        def send() -> None:
            with suppress(OSError):
                while not answered.wait(0.05):
                    connection.sendall(b"1\r\n \r\n")

        sending = threading.Thread(target=send)
        sending.start()
        answer = connection.recv(4_096)
        answered.set()
        sending.join()

    assert b" 408 " in answer.splitlines()[0]
    assert nothing_was_kept(queue)


LOOK = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(("asked_before", "begun"), [(0, b""), (0, LOOK[:-2]), (2, LOOK[:-2])])
def test_a_request_that_does_not_come_whole_ends_its_connection(
    queue: Queue, asked_before: int, begun: bytes
) -> None:
    with served(queue, ServiceLimits(headers_s_max=0.3)) as url, connected(url) as connection:
        for _ in range(asked_before):
            connection.sendall(LOOK)
            answered = b""
            while not answered.endswith(b'{"live":true}'):
                answered += connection.recv(4_096)
        connection.sendall(begun)

        assert connection.recv(4_096) == b""


def test_a_request_that_takes_long_to_answer_keeps_its_connection(queue: Queue) -> None:
    id = queue.submit("acme", payload=1).id
    with client_of(queue, ServiceLimits(headers_s_max=0.1)) as client:
        waited = client.get(f"/v1/documents/{id}", params={"wait_s": 0.5})
        uploaded = client.post("/v1/documents?customer=acme", content=_slowly(b"x" * 50_000, 0.2))

    assert (waited.status_code, uploaded.status_code) == (200, 201)


def _slowly(piece: bytes, pause_s: float) -> Iterator[bytes]:
    """Send the chunk twice, with a pause between."""
    yield piece
    threading.Event().wait(pause_s)
    yield piece


@pytest.mark.parametrize("begun", [b"x" * 100, b"x" * 100_000])
def test_a_body_that_is_cut_off_leaves_nothing(queue: Queue, begun: bytes) -> None:
    key = key_for(queue, "acme")
    with served(queue, ServiceLimits()) as url:
        with connected(url) as connection:
            connection.sendall(head(key, "Content-Length: 150000") + begun)
            if len(begun) > 65_536:
                wait_until(lambda: any(queue.contents.names(1 << 60)), "a content is begun")
        wait_until(lambda: nothing_was_kept(queue), "it is gone")


def digest_header(body: bytes) -> dict[str, str]:
    encoded = base64.b64encode(hashlib.sha256(body).digest()).decode()
    return {"Content-Digest": f"sha-256=:{encoded}:"}


@pytest.mark.parametrize("body", [b"right", b"x" * 100_000])
def test_a_content_that_differs_from_its_checksum_is_refused(
    queue: Queue, post: Post, body: bytes
) -> None:
    wrong = hashlib.sha256(b"another").hexdigest()
    for answer in (
        post("/v1/documents", content=body, params={"sha256": wrong}),
        post("/v1/documents", content=body, headers=digest_header(b"another")),
    ):
        assert code_of(answer) == (422, "checksum_wrong")
    assert nothing_was_kept(queue)

    right = {"sha256": hashlib.sha256(body).hexdigest()}
    answer = post("/v1/documents", content=body, params=right, headers=digest_header(body))
    assert answer.status_code == 201


def form(*parts: str, boundary: str = "b", end: str = "--b--\r\n") -> bytes:
    return "".join(f"--{boundary}\r\n{part}\r\n" for part in parts).encode() + end.encode()


def part(name: str, value: str, more: str = "") -> str:
    return f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}'


FILE = part("file", "x", '; filename="a.pdf"')


@pytest.mark.parametrize(
    "body, status",
    [
        (b"", 400),
        (b"nonsense", 400),
        (form(FILE, end=""), 400),
        (form(part("file", "x" * 100_000), end=""), 400),
        (form(part("other", "x")), 400),
        (form(FILE, FILE), 400),
        (form("X: y\r\n\r\nz"), 400),
        (form(*(part(f"n{n}", "x") for n in range(100))), 400),
        (form(FILE, part("metadata", "x" * 70_000)), 413),
        (form(part("file", "x" * 300_000)), 413),
        (form("A: " + "x" * 10_000 + "\r\n\r\ny"), 400),
        (form(FILE, part("unknown", "x")), 422),
        (form(part("file", "x" * 100_000), part("cost", "much")), 422),
        (form(FILE, part("sha256", "0" * 64)), 422),
    ],
)
def test_a_broken_form_is_refused(
    queue: Queue, post: Post, caplog: pytest.LogCaptureFixture, body: bytes, status: int
) -> None:
    answer = post(
        "/v1/documents",
        content=body,
        headers={"Content-Type": "multipart/form-data; boundary=b"},
    )

    assert code_of(answer)[0] == status, answer.text
    assert nothing_was_kept(queue)
    assert [record.message for record in caplog.records if record.name != "httpx"] == []


@pytest.mark.parametrize(
    "body, code",
    [
        (b"[" * 10_000 + b"]" * 10_000, (400, "malformed")),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, (400, "malformed")),
        (b"[" * 100 + b"]" * 100, (422, "invalid")),
        (b"{", (400, "malformed")),
        (b"\xff\xfe", (400, "malformed")),
        (b"", (400, "malformed")),
        (b"NaN", (422, "invalid")),
        (b"1" * 10_000, (400, "malformed")),
        (b" " * (JSON_BYTES_MAX + 1), (413, "too_large")),
    ],
)
def test_a_payload_that_is_no_json_or_too_deep_is_refused(
    queue: Queue, post: Post, body: bytes, code: tuple[int, str]
) -> None:
    answer = post("/v1/documents", content=body, headers={"Content-Type": "application/json"})

    assert code_of(answer) == code
    assert nothing_was_kept(queue)


@pytest.mark.parametrize(
    "body, code",
    [
        (b"", "invalid"),
        (b"1", "invalid"),
        (b'{"payload": 1, "unknown": 2}', "invalid"),
        (b'{"payload": 1, "file": "/etc/passwd"}', "invalid"),
        (b'{"payload": 1, "content": "x"}', "invalid"),
        (b'{"payload": 1, "written": ["0", 1, "x"]}', "invalid"),
        (b'{"payload": 1, "due_at": "tomorrow"}', "invalid"),
        (b'{"payload": 1, "due_at": 1e300}', "invalid"),
        (b'{"payload": 1, "cost": -1}', "invalid"),
        (b'{"payload": 1, "key": "\\u0000"}', "invalid"),
        (b'{"payload": 1, "metadata": [1]}', "invalid"),
        (b'{"payload": 1, "parent": {}}', "invalid"),
        (b'{"payload": ' + b"[" * 10_000, "malformed"),
        (b'{"payload": 1}\n{', "malformed"),
        (b'{"payload": 1}\n' * 10_001, "invalid"),
    ],
)
def test_lines_that_are_wrong_are_refused(queue: Queue, post: Post, body: bytes, code: str) -> None:
    answer = post("/v1/documents/batch", content=body, headers=LINES)

    assert code_of(answer)[1] == code, answer.text
    assert nothing_was_kept(queue)


@pytest.mark.parametrize(
    "params",
    [
        {"unknown": "1"},
        {"metadata": "[1]"},
        {"metadata": "{"},
        {"cost": "-1"},
        {"cost": "nan"},
        {"due_at": "tomorrow"},
        {"due_at": "2030-01-01T00:00"},
        {"due_at": "9" * 19},
        {"parent": "nobody"},
        {"sha256": "0"},
        {"body_type": "paper"},
        {"name": "x" * 2_000},
    ],
)
@pytest.mark.parametrize("size", [1, 100_000])
def test_what_is_said_wrongly_about_a_document_is_refused(
    queue: Queue, post: Post, params: dict[str, str], size: int
) -> None:
    answer = post("/v1/documents", content=b"x" * size, params=params)

    assert answer.status_code in (400, 422), answer.text
    assert code_of(answer)[1] in ("invalid", "malformed", "parent_unknown")
    assert nothing_was_kept(queue)


def test_lines_belong_elsewhere_and_other_bodies_do_not_belong_there(
    queue: Queue, post: Post
) -> None:
    for path, headers in (
        ("/v1/documents", LINES),
        ("/v1/documents/batch", {"Content-Type": "application/json"}),
    ):
        answer = post(path, content=b'{"payload": 1}', headers=headers)
        assert code_of(answer) == (415, "media_type_unknown")
    assert nothing_was_kept(queue)


def test_a_request_that_is_no_upload_has_a_small_body(queue: Queue) -> None:
    key = key_for(queue)
    with client_of(queue, key=key) as client:
        answer = client.post("/v1/customers", content=b" " * (JSON_BYTES_MAX + 1))
        deep = client.post("/v1/bulk", content=b'{"filter":' * 10_000)

    assert code_of(answer) == (413, "too_large")
    assert code_of(deep)[0] in (400, 422)


def test_one_key_has_only_so_many_uploads_at_once(queue: Queue) -> None:
    key, other = key_for(queue, "acme"), key_for(queue, "other")
    plan = ServiceLimits(uploads_per_key_max=2)
    with (
        served(queue, plan) as url,
        connected(url) as first,
        connected(url) as second,
        httpx.Client(base_url=url) as client,
    ):
        for connection in (first, second):
            connection.sendall(head(key, "Content-Length: 150000") + b"x" * 100_000)
        wait_until(lambda: len(list(queue.contents.names(1 << 60))) == 2, "both have begun")

        third = client.post("/v1/documents", content=b"x" * 70_000, headers=bearer(key))
        others = client.post("/v1/documents", content=b"x", headers=bearer(other))

        assert code_of(third) == (429, "too_many_at_once")
        assert third.headers["retry-after"] == "1"
        assert others.status_code == 201
        for connection in (first, second):
            connection.sendall(b"x" * 50_000)
            assert b" 201 " in connection.recv(4_096).splitlines()[0]


def test_a_queue_that_is_full_says_when_to_come_again(queue: Queue, post: Post) -> None:
    queue.configure(waiting_per_customer_max=1)
    post("/v1/documents", content=b"x" * 100_000)

    full = post("/v1/documents", content=b"x" * 100_000)

    assert code_of(full) == (429, "queue_full")
    assert int(full.headers["retry-after"]) > 0
    assert queue.customer("acme").count == 0
    assert len(list(queue.contents.names(1 << 60))) == 1


def test_a_large_upload_is_not_held_in_memory(queue: Queue) -> None:
    """Upload a quarter of a gigabyte."""
    size, piece = 256 * 1_048_576, b"x" * 1_048_576
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with client_of(queue, key=key_for(queue, "acme")) as client:
        answer = client.post(
            "/v1/documents",
            content=(piece for _ in range(size // len(piece))),
            headers={"Content-Length": str(size)},
            timeout=120,
        )
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert queue.get(answer.json()["id"]).size_bytes == size
    assert after - before < 64 * 1_024  # in KiB


class Stuck(Folder):
    """Contents that block until released."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.waiting = 0
        self.go_on = threading.Event()

    def begin(self, *, size_bytes_max: int = CONTENT_BYTES_MAX) -> Any:
        self._wait()
        return super().begin(size_bytes_max=size_bytes_max)

    def open(self, ref: ContentRef, verify: Verify | None = None) -> BinaryIO:
        self._wait()
        return super().open(ref, verify)

    def _wait(self) -> None:
        self.waiting += 1
        assert self.go_on.wait(60)


def test_a_place_for_contents_that_does_not_answer_holds_up_nothing_else(
    queue: Queue, tmp_path: Path
) -> None:
    large = b"x" * 100_000
    id = queue.submit("acme", content=large).id
    stuck = queue.contents = Stuck(tmp_path / "documents.db.contents")
    key = bearer(key_for(queue, "acme"))
    app = make_app(queue, ServiceLimits(uploads_per_key_max=1_000, downloads_per_key_max=1_000))

    def all_wait() -> bool:
        return stuck.waiting >= THREADS

    async def ask() -> tuple[list[int], list[int]]:
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 50_000))
        url = "http://127.0.0.1"
        async with httpx.AsyncClient(transport=transport, base_url=url, headers=key) as client:
            slow = [
                asyncio.create_task(client.post("/v1/documents", content=large))
                for _ in range(THREADS)
            ]
            slow += [
                asyncio.create_task(client.get(f"/v1/documents/{id}/content"))
                for _ in range(THREADS)
            ]
            await asyncio.to_thread(wait_until, all_wait, "all threads wait for contents")
            quick = [
                await client.post("/v1/documents", content=b"x"),
                await client.post("/v1/documents", json={"a": 1}),
                await client.get("/v1/documents"),
                await client.get(f"/v1/documents/{id}"),
            ]
            stuck.go_on.set()
            done = await asyncio.gather(*slow)
            return [each.status_code for each in quick], [each.status_code for each in done]

    quick, slow = asyncio.run(asyncio.wait_for(ask(), 60))

    assert quick == [201, 201, 200, 200]
    assert slow == [201] * THREADS + [200] * THREADS


def test_without_a_place_for_contents_large_documents_are_refused_and_small_ones_accepted(
    queue: Queue,
) -> None:
    queue.contents = NoContents()
    app, key = make_app(queue), bearer(key_for(queue, "acme"))

    large = asked(app, "POST", "/v1/documents", content=b"x" * 65_537, headers=key)
    small = asked(app, "POST", "/v1/documents", content=b"x" * 65_536, headers=key)
    lines = asked(
        app,
        "POST",
        "/v1/documents/batch",
        content=b'{"payload": "0123456789"}\n' * 5_000,
        headers={**key, **LINES},
    )

    payload = asked(app, "POST", "/v1/documents", json="x" * 70_000, headers=key)
    line = asked(
        app,
        "POST",
        "/v1/documents/batch",
        content=json.dumps({"payload": "x" * 70_000}),
        headers={**key, **LINES},
    )

    assert [code_of(each) for each in (large, payload, line)] == [(413, "too_large")] * 3
    assert (small.status_code, lines.status_code) == (201, 201)
    assert asked(app, "GET", "/readyz").status_code == 200


def test_a_batch_that_is_too_large_is_refused(queue: Queue, acme: httpx.Client) -> None:
    line = json.dumps({"payload": "x" * 1_000_000}).encode() + b"\n"

    answer = acme.post(
        "/v1/documents/batch",
        content=(line for _ in range(BATCH_BYTES_MAX // len(line) + 2)),
        headers=LINES,
        timeout=120,
    )

    assert code_of(answer) == (413, "too_large")
    assert nothing_was_kept(queue)
