"""No client takes the service from the others: limits per key and per address, as counts. The same
attacks, with the latency of a victim beside them, are in `test_service_load.py`."""

import asyncio
import base64
import json
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from fairturn import Queue
from fairturn.access.keys import AccessKey
from fairturn.access.registry import KeyRegistry
from fairturn.clock import ManualClock, stopwatch
from fairturn.contents.local import Folder, Verify
from fairturn.dashboard.routes import install
from fairturn.dashboard.visitors import PageSessions
from fairturn.model import ContentRef, Settings
from fairturn.service import scan
from fairturn.service.app import make_app
from fairturn.service.concurrency import ConcurrencyLimit
from fairturn.service.ndjson import refuse_expensive
from fairturn.service.options import (
    BATCHES_AT_ONCE,
    CORES,
    HEAD_BYTES_MAX,
    LOGINS_PER_MINUTE,
    SESSIONS_PER_KEY_MAX,
    VALUES_MAX,
    ServiceLimits,
)
from fairturn.service.problems import Problem
from fairturn.service.server import ACCEPTED_AT_ONCE, ListenAddress, Server, listen_at
from fairturn.stores.memory import MemoryStore
from fairturn.validation.submission import JSON_DEPTH_MAX
from tests.http_server import asked, bearer, code_of, key_for, served_app
from tests.wait import wait_until

LARGE = bytes(range(256)) * 1_024  # too large for a row
LINES = {"Content-Type": "application/x-ndjson"}


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db", waiting_per_customer_max=5) as queue:
        yield queue


@contextmanager
def connected(url: str, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    with socket.create_connection(
        (where.hostname, where.port), timeout=30, source_address=(source, 0)
    ) as connection:
        yield connection


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]).encode()


def whole_answer(connection: socket.socket) -> bytes:
    """Return what arrives until the server closes the connection."""
    answer = b""
    while came := connection.recv(65_536):
        answer += came
    return answer


# ── Concurrency ──────────────────────────────────────────────────────────────────────────────────


def test_a_limit_counts_each_holder_and_all_of_them() -> None:
    limit = ConcurrencyLimit(2, total_max=3, retry_after_s=7)
    first, second = limit.take("a"), limit.take("a")
    limit.take("b")

    with pytest.raises(Problem) as refused:
        limit.take("a")
    assert refused.value.retry_after_s == 7
    assert not limit.has_permit("c")  # three in all

    first.release()
    first.release()  # counted once
    assert limit.total() == 2
    with second, limit.take("c"):
        assert limit.total() == 3
    assert limit.total() == 1


def test_requests_above_a_limit_wait_in_order_and_above_that_are_refused() -> None:
    async def run() -> list[str]:
        limit = ConcurrencyLimit(1, waiting_max=2)
        order: list[str] = []
        held = await limit.wait("a")
        assert not held.has_waited

        async def one(name: str) -> None:
            with await limit.wait("a") as permit:
                assert permit.has_waited
                order.append(name)

        tasks = [asyncio.create_task(one(name)) for name in ("first", "cancelled")]
        await asyncio.to_thread(wait_until, lambda: len(limit._waiting["a"]) == 2, "both wait")
        with pytest.raises(Problem):
            await limit.wait("a")
        (await limit.wait("b")).release()
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        tasks.append(asyncio.create_task(one("second")))
        held.release()
        await asyncio.gather(tasks[0], tasks[2])
        assert limit.total() == 0
        return order

    assert asyncio.run(run()) == ["first", "second"]


@pytest.mark.parametrize("path", ["/v1/me", "/v1/documents"])
def test_one_key_has_only_so_many_requests_in_progress(queue: Queue, path: str) -> None:
    acme, other = key_for(queue, "acme"), key_for(queue, "other")
    plan = ServiceLimits(requests_per_key_max=1, requests_waiting_per_key_max=1)
    app = make_app(queue, plan)

    async def run() -> None:
        requests = app.state.service.requests
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for key in (acme, other):  # a key is known after its first request
                assert (await client.get(path, headers=bearer(key))).status_code == 200
            permit = requests.take(acme.split("_")[1])
            waiting = asyncio.create_task(client.get(path, headers=bearer(acme)))
            await asyncio.to_thread(wait_until, lambda: requests._waiting, "it waits")
            refused = await client.get(path, headers=bearer(acme))
            others = await client.get(path, headers=bearer(other))
            permit.release()

            assert code_of(refused) == (429, "too_many_at_once")
            assert int(refused.headers["retry-after"]) > 0
            assert others.status_code == 200
            assert (await waiting).status_code == 200
            assert requests.total() == 0

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_throttled_request_releases_its_permit_before_the_delay(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_for(queue, "acme")
    app = make_app(queue, ServiceLimits(rate="1/hour", requests_per_key_max=1))

    async def run() -> None:
        requests = app.state.service.requests
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert (await client.get("/v1/me", headers=bearer(key))).status_code == 200
            monkeypatch.setattr("fairturn.service.middleware.THROTTLED_S", 3_600.0)
            permit = requests.take(key.split("_")[1])
            throttled = asyncio.create_task(client.get("/v1/me", headers=bearer(key)))
            await asyncio.to_thread(wait_until, lambda: requests._waiting, "it waits")
            permit.release()  # passes on to the request
            assert requests.total() == 1
            await asyncio.to_thread(wait_until, lambda: requests.total() == 0, "it is released")

            assert not throttled.done()
            throttled.cancel()
            await asyncio.gather(throttled, return_exceptions=True)
            assert requests.total() == 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_throttled_request_is_answered_after_the_delay(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = key_for(queue, "acme")
    app = make_app(queue, ServiceLimits(rate="1/hour"))
    monkeypatch.setattr("fairturn.service.middleware.THROTTLED_S", 0.05)

    asked(app, "GET", "/v1/me", headers=bearer(key))
    begun = stopwatch()
    throttled = asked(app, "GET", "/v1/me", headers=bearer(key))

    assert stopwatch() - begun >= 0.05
    assert code_of(throttled) == (429, "rate_limited")


def test_requests_with_unknown_keys_are_counted_by_address_before_a_key_is_read(
    queue: Queue,
) -> None:
    key = key_for(queue, "acme")
    app = make_app(queue, ServiceLimits(requests_per_key_max=1))

    async def run() -> None:
        newcomers = app.state.service.newcomers
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            known = await client.get("/v1/me", headers=bearer(key))
            permit = newcomers.take("127.0.0.1")
            guess = bearer(f"ft_{'0' * 12}_{'0' * 64}")
            waiting = [
                asyncio.create_task(client.get("/v1/me", headers=each)) for each in (guess, {})
            ]
            await asyncio.to_thread(
                wait_until, lambda: len(newcomers._waiting["127.0.0.1"]) == 2, "both wait"
            )
            still = await client.get("/v1/me", headers=bearer(key))
            permit.release()
            answers = await asyncio.gather(*waiting)

            assert known.status_code == still.status_code == 200
            assert [code_of(each)[0] for each in answers] == [401, 401]
            assert newcomers.total() == 0

    asyncio.run(asyncio.wait_for(run(), 30))


# ── Heads ────────────────────────────────────────────────────────────────────────────────────────


def cookies_of(queue: Queue) -> FastAPI:
    """Return an application that responds with the cookies that it parsed."""
    app = make_app(queue)

    async def show(request: Request) -> dict[str, str]:
        return dict(request.cookies)

    app.add_api_route("/cookies", show)
    return app


def test_a_cookie_that_is_too_large_is_refused_before_it_is_parsed(queue: Queue) -> None:
    quoted = '"' + "\\" * 62_000 + '"'  # takes 4 s before Python 3.11.10 and 3.12.6
    with served_app(cookies_of(queue)) as url, connected(url) as connection:
        connection.sendall(get("/cookies", f"Cookie: a={quoted}"))
        answer = whole_answer(connection)  # it closes the connection

    # The server refuses it first if it arrives in several pieces.
    assert answer.split()[1] in (b"400", b"431"), answer


@pytest.mark.parametrize("where", ["query", "header", "cookie", "many headers"])
def test_the_whole_head_of_a_request_has_a_limit(queue: Queue, where: str) -> None:
    app, over = make_app(queue), "x" * HEAD_BYTES_MAX
    query = f"?name={over}" if where == "query" else ""
    headers = {
        "query": {},
        "header": {"X-Any": over},
        "cookie": {"Cookie": f'a="{over}"'},
        "many headers": {f"X-{n}": "x" for n in range(HEAD_BYTES_MAX // 8)},
    }[where]

    answer = asked(app, "GET", f"/v1/documents{query}", headers=headers)

    assert code_of(answer) == (431, "headers_too_large")
    assert answer.headers["connection"] == "close"


def test_quoted_cookies_are_not_parsed_and_others_are(queue: Queue) -> None:
    cookies = f'a="{chr(92) * 8_000}"; fairturn_language=de; b="x"'

    parsed = asked(cookies_of(queue), "GET", "/cookies", headers={"Cookie": cookies}).json()

    assert parsed == {"fairturn_language": "de"}


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(queue: Queue) -> None:
    smuggled = get("/livez")
    with served_app(make_app(queue)) as url, connected(url) as connection:
        head = get("/v1/documents", "Transfer-Encoding: chunked", "Content-Length: 5")
        connection.sendall(head.replace(b"GET", b"POST") + b"0\r\n\r\n" + smuggled)
        answer = whole_answer(connection)

    assert b" 400 " in answer.splitlines()[0]
    assert b"Content-Length and Transfer-Encoding" in answer
    assert answer.count(b"HTTP/1.1") == 1


# ── Long polls ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", ["/v1/documents/{id}?wait_s=60", "/v1/room?wait_s=60"])
def test_one_key_has_only_so_many_long_polls_and_they_end_when_the_client_hangs_up(
    queue: Queue, path: str
) -> None:
    for _ in range(5):
        id = queue.submit("acme", payload=1).id
    acme, other = key_for(queue, "acme"), key_for(queue, "other")
    path = path.replace("{id}", id)
    app = make_app(queue, ServiceLimits(polls_per_key_max=2))
    polls = app.state.service.polls
    with served_app(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        with ExitStack() as stack:
            for _ in range(2):
                connection = stack.enter_context(connected(url))
                connection.sendall(get(path, f"Authorization: Bearer {acme}"))
            wait_until(lambda: polls.total() == 2, "both wait")

            third = client.get(path, headers=bearer(acme))
            at_once = client.get(path.partition("?")[0], headers=bearer(acme))
            others = client.get("/v1/room?wait_s=1", headers=bearer(other))

        wait_until(lambda: polls.total() == 0, "the polls of closed connections end")

    assert code_of(third) == (429, "too_many_at_once")
    assert int(third.headers["retry-after"]) > 0
    assert at_once.status_code == 200
    assert others.json() == {"room": True}


class CountsKeyReads(MemoryStore):
    """A store that counts how often an access key is read."""

    key_reads = 0

    def access_key(self, id: str) -> AccessKey | None:
        self.key_reads += 1
        return super().access_key(id)


def test_a_long_poll_above_the_limit_costs_no_read_of_the_store() -> None:
    store = CountsKeyReads(settings=Settings(waiting_per_customer_max=1))
    with Queue(store) as queue:
        queue.submit("acme", payload=1)
        key = key_for(queue, "acme")
        app = make_app(queue, ServiceLimits(polls_per_key_max=1))
        with served_app(app) as url, httpx.Client(base_url=url, timeout=30) as client:
            assert client.get("/v1/me", headers=bearer(key)).status_code == 200
            with connected(url) as connection:
                connection.sendall(get("/v1/room?wait_s=60", f"Authorization: Bearer {key}"))
                wait_until(lambda: app.state.service.polls.total() == 1, "it waits")
                wait_until(lambda: store.key_reads >= 3, "the key watch has read the key")
                before = store.key_reads

                refused = [client.get("/v1/room?wait_s=1", headers=bearer(key)) for _ in range(3)]

    assert [code_of(each) for each in refused] == [(429, "too_many_at_once")] * 3
    assert store.key_reads == before


@pytest.mark.parametrize("path", ["/v1/documents/{id}?wait_s=60", "/v1/room?wait_s=60"])
def test_a_long_poll_ends_with_its_key(queue: Queue, path: str) -> None:
    for _ in range(5):
        id = queue.submit("acme", payload=1).id
    key = key_for(queue, "acme")
    app = make_app(queue)
    answers: list[httpx.Response] = []
    with served_app(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        polling = threading.Thread(
            target=lambda: answers.append(client.get(path.replace("{id}", id), headers=bearer(key)))
        )
        polling.start()
        wait_until(lambda: app.state.service.polls.total() == 1, "it waits")
        KeyRegistry(queue.store).revoke(key.split("_")[1])
        polling.join(30)

    assert [code_of(answer) for answer in answers] == [(401, "key_unknown")]


def test_polls_for_room_read_the_store_once_per_change_for_all_of_them(queue: Queue) -> None:
    ids = [queue.submit("acme", payload=n).id for n in range(5)]
    key = key_for(queue, "acme")
    app = make_app(queue)
    polls, rooms = app.state.service.polls, app.state.rooms
    with ExitStack() as stack:
        url = stack.enter_context(served_app(app))
        connections = [stack.enter_context(connected(url)) for _ in range(20)]
        for n, connection in enumerate(connections):
            asked_for = get(
                f"/v1/room?wait_s=60&n={1 + n % 3}",
                f"Authorization: Bearer {key}",
                "Connection: close",
            )
            connection.sendall(asked_for)
        wait_until(lambda: polls.total() == 20, "all of them wait")
        queue.set_customer("unconcerned")
        wait_until(lambda: rooms.count >= 1, "a change is noticed")
        queue.cancel(ids[:3])
        answers = [whole_answer(connection) for connection in connections]

    assert all(answer.endswith(b'{"room":true}') for answer in answers)
    assert rooms.count <= 3  # the two changes, and one that was seen as two


# ── Downloads ────────────────────────────────────────────────────────────────────────────────────


def test_a_content_is_verified_once_until_its_file_changes(queue: Queue) -> None:
    id = queue.submit("acme", content=LARGE).id
    app, key = make_app(queue), bearer(key_for(queue, "acme"))

    answers = [asked(app, "GET", f"/v1/documents/{id}/content", headers=key) for _ in range(4)]
    verified = app.state.verified.count
    name = queue.get(id).content_name
    assert name is not None
    with Path(queue.contents.locate(name)).open("r+b") as file:
        file.write(b"damage")
    damaged = asked(app, "GET", f"/v1/documents/{id}/content", headers=key)

    assert [answer.content for answer in answers] == [LARGE] * 4
    assert verified == 1
    assert code_of(damaged) == (500, "content_damaged")


class Endless:
    """A file whose reads do not end until 60 s have passed."""

    def __init__(self, file: BinaryIO, reads: list[int]) -> None:
        self._file = file
        self._reads = reads
        self._never = threading.Event()

    def fileno(self) -> int:
        return self._file.fileno()

    def read(self, size: int) -> bytes:
        self._reads.append(size)
        self._never.wait(0.01)
        return b"x" if len(self._reads) < 6_000 else b""


class SlowFolder(Folder):
    """Contents whose verification does not end by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: list[int] = []

    def open(self, ref: ContentRef, verify: Verify | None = None) -> BinaryIO:
        assert verify is not None
        check = verify

        def slowly(file: BinaryIO, ref: ContentRef) -> None:
            endless: Any = Endless(file, self.reads)
            check(endless, ref)

        return super().open(ref, slowly)


def test_a_verification_stops_when_the_client_hangs_up(queue: Queue, tmp_path: Path) -> None:
    id = queue.submit("acme", content=LARGE).id
    folder = queue.contents = SlowFolder(tmp_path / "documents.db.contents")
    key = key_for(queue, "acme")
    app = make_app(queue)
    with served_app(app) as url:
        with connected(url) as connection:
            path = f"/v1/documents/{id}/content"
            connection.sendall(get(path, f"Authorization: Bearer {key}"))
            wait_until(lambda: folder.reads, "the content is being verified")
        wait_until(lambda: app.state.service.downloads.total() == 0, "it stops")

    assert len(folder.reads) < 6_000


class CountingFolder(Folder):
    """Contents that record how many are opened or stored at the same time."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.now = 0
        self.most = 0
        self._lock = threading.Lock()

    def open(self, ref: ContentRef, verify: Verify | None = None) -> BinaryIO:
        with self._counted():
            return super().open(ref, verify)

    def put(self, *arguments: Any, **options: Any) -> ContentRef:
        with self._counted():
            return super().put(*arguments, **options)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        threading.Event().wait(0.02)
        try:
            yield
        finally:
            with self._lock:
                self.now -= 1


@pytest.mark.parametrize("customers, most", [(1, 1), (4, CORES)])
def test_a_key_verifies_one_content_at_a_time_and_all_keys_one_for_each_core(
    queue: Queue, tmp_path: Path, customers: int, most: int
) -> None:
    names = [f"customer-{n}" for n in range(customers)]
    ids = [
        (name, queue.submit(name, content=LARGE + bytes([n])).id)
        for name in names
        for n in range(4)
    ]
    folder = queue.contents = CountingFolder(tmp_path / "documents.db.contents")
    keys = {name: bearer(key_for(queue, name)) for name in names}
    app = make_app(queue)

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answers = await asyncio.gather(
                *(client.get(f"/v1/documents/{id}/content", headers=keys[name]) for name, id in ids)
            )
        return [answer.status_code for answer in answers]

    assert asyncio.run(run()) == [200] * len(ids)
    assert 1 <= folder.most <= most


def test_one_key_has_only_so_many_downloads_and_one_ends_when_the_client_hangs_up(
    queue: Queue,
) -> None:
    id = queue.submit("acme", content=bytes(64 * 1_048_576)).id
    acme = key_for(queue, "acme")
    path = f"/v1/documents/{id}/content"
    app = make_app(queue, ServiceLimits(downloads_per_key_max=1))
    with served_app(app) as url, httpx.Client(base_url=url, timeout=30) as client:
        with connected(url) as connection:
            connection.sendall(get(path, f"Authorization: Bearer {acme}"))
            assert b" 200 " in connection.recv(1_024)  # and it reads no more
            second = client.get(path, headers=bearer(acme))
            others = client.get("/v1/me", headers=bearer(acme))
        wait_until(lambda: app.state.service.downloads.total() == 0, "the download ends")
        third = client.get(path, headers=bearer(acme))

    assert code_of(second) == (429, "too_many_at_once")
    assert others.status_code == 200
    assert len(third.content) == 64 * 1_048_576


# ── Lines ────────────────────────────────────────────────────────────────────────────────────────


def nested(depth: int) -> bytes:
    return b'{"payload":' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    "line, refused",
    [
        (nested(JSON_DEPTH_MAX), False),
        (nested(JSON_DEPTH_MAX + 1), True),
        (b'{"payload":' + b"[" * 100_000, True),
        (b'{"payload":["' + b"[" * 100_000 + b'"]}', False),
        (b'{"payload":["\\"' + b"[" * 1_000 + b'\\\\"]}', False),
        (b'{"payload":["\\\\",' + b"[" * 1_000 + b"]" * 1_000 + b"]}", True),
        (b'{"payload":[' + b"[]," * 1_000 + b"1]}", False),
        (b'{"payload":[' + b"1," * VALUES_MAX + b"1]}", True),
        (b'{"payload":"' + b"," * VALUES_MAX + b'"}', False),
        (b'{"payload":[' + b"{}," * (VALUES_MAX // 2) + b"1]}", True),
    ],
)
def test_a_line_is_refused_by_its_depth_and_number_of_values_before_it_is_parsed(
    line: bytes, refused: bool
) -> None:
    if refused:
        with pytest.raises(Problem):
            refuse_expensive(line)
    else:
        refuse_expensive(line)


@pytest.mark.parametrize("text", [rb"\\\\", rb"\"", rb"\\\"", rb"[\u0022["])
@pytest.mark.parametrize("before", range(6))
def test_a_text_that_spans_two_pieces_of_a_line_is_not_read_as_brackets(
    text: bytes, before: int
) -> None:
    begin = b'{"payload":["'
    padding = b"x" * (65_536 - len(begin) - before)

    refuse_expensive(begin + padding + text + b"[" * 1_000 + b'"]}')
    with pytest.raises(Problem):
        refuse_expensive(begin + padding + text + b'",' + b"[" * 1_000)


VALUES = st.recursive(
    st.none() | st.text() | st.sampled_from(['"', "\\", '\\"', "[[[", "}}}", '",[']),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_no_valid_line_is_refused_for_its_texts(value: Any) -> None:
    refuse_expensive(json.dumps({"payload": [value] + [[]] * 100}).encode())
    refuse_expensive(json.dumps({"payload": [value] + [[]] * 100}, ensure_ascii=False).encode())


def test_only_one_line_of_a_batch_is_parsed_at_a_time(queue: Queue) -> None:
    queue.configure(waiting_per_customer_max=1_000)
    value = b"[" + b"[]," * 10_000 + b"1]"  # 0.6 MB when it is parsed
    body = b"\n".join([b'{"payload":' + value + b"}"] * 20)
    app, key = make_app(queue), bearer(key_for(queue, "acme"))

    tracemalloc.start()
    try:
        answer = asked(app, "POST", "/v1/documents/batch", content=body, headers={**key, **LINES})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert answer.status_code == 201, answer.text
    assert peak_bytes < 6_000_000  # one line takes 3 MB, all of them 15 MB


@pytest.mark.parametrize("customers, most", [(1, 1), (4, BATCHES_AT_ONCE)])
def test_a_key_submits_one_batch_at_a_time_and_all_keys_only_so_many(
    queue: Queue, tmp_path: Path, customers: int, most: int
) -> None:
    folder = queue.contents = CountingFolder(tmp_path / "documents.db.contents")
    keys = [bearer(key_for(queue, f"customer-{n}")) for n in range(customers)]
    app = make_app(queue)
    line = json.dumps({"content": base64.b64encode(LARGE).decode()})

    async def run() -> list[int]:
        transport = httpx.ASGITransport(app=app, client=("127.0.0.1", 50_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            posts = [
                client.post("/v1/documents/batch", content=line, headers={**key, **LINES})
                for key in keys * 4
            ]
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    assert asyncio.run(run()) == [201] * 4 * customers
    assert 1 <= folder.most <= most


def test_a_batch_whose_last_line_is_wrong_leaves_nothing(queue: Queue) -> None:
    app, key = make_app(queue), bearer(key_for(queue, "acme"))
    lines = [json.dumps({"payload": "x" * 100_000})] * 3 + ['{"payload": [}']

    answer = asked(
        app, "POST", "/v1/documents/batch", content="\n".join(lines), headers={**key, **LINES}
    )

    assert code_of(answer) == (400, "malformed")
    assert answer.json()["detail"].startswith("line 4: ")
    assert list(queue.iterate()) == []
    assert not any(queue.contents.names(1 << 60))


# ── Addresses ────────────────────────────────────────────────────────────────────────────────────


def test_one_address_has_only_so_many_connections(queue: Queue) -> None:
    app = make_app(queue, ServiceLimits(connections_per_address_max=3))
    look = get("/livez", "Connection: close")
    with served_app(app) as url, ExitStack() as stack:
        idle = [stack.enter_context(connected(url)) for _ in range(3)]
        for connection in idle:
            connection.sendall(get("/livez"))
            connection.recv(4_096)
        with connected(url) as fourth:
            refused = whole_answer(fourth)
        with connected(url, "127.0.0.2") as elsewhere:
            elsewhere.sendall(look)
            others = whole_answer(elsewhere)

        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"Retry-After: " in refused
        assert others.startswith(b"HTTP/1.1 200 ")
        idle[0].close()

        def opens() -> bool:
            with connected(url) as again:
                try:
                    again.sendall(look)
                    return whole_answer(again).startswith(b"HTTP/1.1 200 ")
                except ConnectionError:
                    return False

        wait_until(opens, "a connection that ended makes room")


def test_a_server_accepts_a_few_connections_at_a_time_and_sends_without_delay(
    queue: Queue,
) -> None:
    """asyncio accepts as many as `backlog` before it serves others, and sets TCP_NODELAY only on
    sockets that name their protocol."""
    server = Server(make_app(queue), ListenAddress(port=0))
    (listening,) = listen_at("127.0.0.1", 0, 1)

    with listening:
        assert listening.proto == socket.IPPROTO_TCP
    assert server.config.backlog == ACCEPTED_AT_ONCE < 10


def test_behind_a_trusted_proxy_the_requests_of_each_address_are_limited(queue: Queue) -> None:
    for _ in range(5):
        queue.submit("acme", payload=1)
    key = key_for(queue, "acme")
    app = make_app(queue, ServiceLimits(connections_per_address_max=1))
    polls = app.state.service.polls

    def forwarded(address: str) -> dict[str, str]:
        return {
            **bearer(key),
            "X-Forwarded-For": address,
            "X-Forwarded-Proto": "https",
        }

    with (
        served_app(app, trusted_proxies=("127.0.0.1",)) as url,
        connected(url) as polling,
        httpx.Client(base_url=url) as client,
    ):
        lines = [f"{name}: {value}" for name, value in forwarded("203.0.113.9").items()]
        polling.sendall(get("/v1/room?wait_s=60", *lines))
        wait_until(lambda: polls.total() == 1, "it waits")

        same = client.get("/v1/me", headers=forwarded("203.0.113.9"))
        another = client.get("/v1/me", headers=forwarded("203.0.113.10"))

    assert code_of(same) == (429, "too_many_at_once")
    assert another.status_code == 200


# ── Pages ────────────────────────────────────────────────────────────────────────────────────────


def with_pages(queue: Queue, clock: ManualClock, plan: ServiceLimits | None = None) -> FastAPI:
    app = make_app(queue, plan, clock=clock)
    install(app)
    return app


def test_what_needs_no_key_is_made_once(queue: Queue) -> None:
    clock = ManualClock(1_800_000_000_000_000)
    key_for(queue)
    app = with_pages(queue, clock)

    def pages() -> list[bytes]:
        paths = ("/openapi.json", "/priorities", "/priorities?documents=9000")
        return [asked(app, "GET", path).content for path in paths]

    first = pages()
    clock.advance(1)  # a page has the time of its making
    second = pages()
    queue.configure(reset_interval_s=77)
    third = pages()

    assert second == first
    assert json.loads(first[0]) == app.openapi()
    assert third[0] == first[0]
    assert (third[1] != first[1], third[2] != first[2]) == (True, True)
    german = asked(app, "GET", "/priorities", headers={"Accept-Language": "de"})
    assert 'lang="de"' in german.text
    assert len(app.state.page.rule_pages) <= 100


def test_a_junk_cookie_does_not_evade_the_limit_of_anonymous_requests(queue: Queue) -> None:
    key_for(queue)
    clock = ManualClock(1_800_000_000_000_000)
    app = with_pages(queue, clock, ServiceLimits(anonymous_per_minute=3))

    answers = [
        asked(app, "GET", "/login", headers={"Cookie": f"fairturn_session={n}"}) for n in range(4)
    ]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]


def test_logins_are_limited_by_key_and_wrong_keys_lock_out_only_wrong_keys(queue: Queue) -> None:
    clock = ManualClock(1_800_000_000_000_000)
    app = with_pages(queue, clock, ServiceLimits(anonymous_per_minute=1_000))
    key, other = key_for(queue, "acme"), key_for(queue, "other")

    def log_in(key: str) -> int:
        headers = {"Sec-Fetch-Site": "same-origin"}
        return asked(app, "POST", "/login", data={"key": key}, headers=headers).status_code

    assert [log_in("ft_x") for _ in range(61)] == [401] * 60 + [429]
    assert [log_in(key) for _ in range(LOGINS_PER_MINUTE + 1)] == [303] * LOGINS_PER_MINUTE + [429]
    assert log_in(other) == 303
    clock.advance(60)
    assert log_in(key) == 303


def test_a_key_that_logs_in_again_and_again_ends_only_its_own_sessions() -> None:
    sessions = PageSessions()
    others = sessions.begin("other", 0)
    own = [sessions.begin("acme", 0) for _ in range(SESSIONS_PER_KEY_MAX + 1)]

    assert sessions.find(others, 1) is not None
    assert sessions.find(own[0], 1) is None
    assert all(sessions.find(token, 1) is not None for token in own[1:])


# ── Search ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("customer", ["acme", None])
def test_a_search_by_a_part_of_a_name_goes_on_page_by_page_and_names_no_foreign_document(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, customer: str | None
) -> None:
    queue.configure(waiting_per_customer_max=1_000)
    own, wanted = [], []
    for n in range(40):
        name = "invoice" if n % 5 == 0 else "letter"
        own.append(queue.submit("acme", payload=n, name=name).id)
        for _ in range(n % 4):
            queue.submit("other", payload=n, name="letter")
        if name == "invoice":
            wanted.append(own[-1])
    monkeypatch.setattr(scan, "STEP", 3)
    monkeypatch.setattr(scan, "SCAN_S", 0.0)
    app, key = make_app(queue), bearer(key_for(queue, customer))

    found: list[str] = []
    cursors: list[str] = []
    after: dict[str, str] = {}
    while True:
        params = {"name_part": "voic", "size": "2", **after}
        page = asked(app, "GET", "/v1/documents", headers=key, params=params).json()
        found += [document["id"] for document in page["documents"]]
        if page["next"] is None:
            break
        cursors.append(page["next"])
        after = {"after": page["next"]}

    assert found == wanted[::-1]
    assert len(cursors) > 10  # each request looked at a few only
    if customer is not None:
        assert set(cursors) <= set(own)
