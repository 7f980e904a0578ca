"""The client under failures: cut connections, a busy service, a wrong URL or key. A submission is
stored once, whatever happens to its connection; every error states what to do."""

import hashlib
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fairturn import Client, NotAllowed, Queue, State, Submission, WrongState
from fairturn.access.registry import KeyRegistry
from fairturn.client import RetryPolicy
from fairturn.client.request import IN_MEMORY_BYTES
from fairturn.errors import ContentDamaged, Refused, StoreRefused, StoreUnavailable
from fairturn.service.options import ServiceLimits
from fairturn.wire import DOCUMENT, to_json
from fairturn.worker.backoff import Backoff
from tests.commands import SCRIPT, complete, kill
from tests.doors import awaited
from tests.http_server import TOKEN, key_for, served
from tests.servers.rude import Manner, Rude, before
from tests.wait import wait_until

LARGE = bytes(range(256)) * 8_192  # 2 MiB
RETRIES = RetryPolicy(attempts_max=4, backoff=Backoff(1.0, 2.0, 10.0), random=lambda: 0.5)
KINDS = ("client", "async client")


class Way(NamedTuple):
    """A client behind a rude proxy, and the pauses that it made."""

    client: Any
    rude: Rude
    pauses: list[float]


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db") as queue:
        yield queue


@contextmanager
def client_for(kind: str, url: str, key: str | None = TOKEN, **more: Any) -> Iterator[Any]:
    """Return a client that records its pauses instead of sleeping."""
    pauses: list[float] = more.pop("pauses", [])
    more = {"retry_policy": RETRIES, **more}
    if kind == "client":
        with Client(url, key, sleep=pauses.append, **more) as client:
            yield client
        return

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    with awaited(url, key, sleep=pause, **more) as client:
        yield client


@pytest.fixture(params=KINDS)
def way(request: pytest.FixtureRequest, queue: Queue) -> Iterator[Way]:
    pauses: list[float] = []
    with (
        served(queue) as url,
        before(url) as rude,
        client_for(request.param, rude.url, pauses=pauses, timeout_s=20) as client,
    ):
        yield Way(client, rude, pauses)


# ── Asking again ─────────────────────────────────────────────────────────────────────────────────

SUBMISSIONS: dict[str, Callable[[Any], Any]] = {
    "payload": lambda client: client.submit("acme", payload={"n": 1}),
    "bytes": lambda client: client.submit("acme", content=LARGE),
    "stream": lambda client: client.submit("acme", content=io.BytesIO(LARGE)),
    "form": lambda client: client.submit("acme", content=LARGE, metadata={"a": "b" * 9_000}),
    "many": lambda client: client.submit_many([Submission("acme", payload=n) for n in range(3)]),
    "with a key": lambda client: client.submit("acme", payload=1, key="k"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_client_s_own_keys_are_made_of_the_names_that_were_handed_in(
    queue: Queue, kind: str
) -> None:
    names = iter(["first", "first", "second"])
    with served(queue) as url, client_for(kind, url, new_id=names.__next__) as client:
        ids = [client.submit("acme", payload=1).id for _ in range(3)]

    assert ids[0] == ids[1] != ids[2]
    assert queue.submit("acme", payload=1, key="client-second").id == ids[2]


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_a_submission_is_stored_once_wherever_the_connection_breaks(
    queue: Queue, way: Way, name: str
) -> None:
    stored = 0
    for manner in (
        Manner.CUT_BEFORE,
        Manner.CUT_AFTER,
        Manner.CUT_INSIDE,
        Manner.CUT_UPLOAD,
        Manner.BUSY,
        Manner.BUSY_AFTER,
        Manner.LIMITED,
        Manner.GATEWAY,
    ):
        way.rude.manners.extend([manner, manner])
        receipt = SUBMISSIONS[name](way.client)
        assert not way.rude.manners, manner
        receipts = receipt if name == "many" else [receipt]
        stored = 1 if name == "with a key" else stored + len(receipts)
        assert queue.summary().waiting == stored, manner
        if name != "with a key":
            assert not any(each.replayed for each in receipts)
        if name in ("bytes", "stream", "form"):
            assert queue.read(receipt.id) == LARGE


def test_it_waits_longer_each_time_and_as_long_as_the_service_says(queue: Queue, way: Way) -> None:
    way.rude.manners.extend([Manner.CUT_BEFORE] * 3)
    way.client.submit("acme", payload=1)
    assert way.pauses == [1.25, 2.5, 5.0]

    way.pauses.clear()
    way.rude.manners.extend([Manner.BUSY, Manner.LIMITED])
    way.client.submit("acme", payload=1)
    assert way.pauses == [8.75, 3.75]  # 7 s and 3 s, and up to a quarter more as jitter


def test_it_gives_up_after_so_many_tries_and_says_why(queue: Queue, way: Way) -> None:
    way.rude.manners.extend([Manner.BUSY] * 4)
    with pytest.raises(StoreUnavailable, match=f"the service at {way.rude.url} reports: Not now."):
        way.client.submit("acme", payload=1)
    assert len(way.rude.seen) == 4

    way.rude.manners.extend([Manner.CUT_BEFORE] * 4)
    with pytest.raises(StoreUnavailable, match="was closed before the response was complete"):
        way.client.get("0123456789abcde")

    way.rude.manners.extend([Manner.GATEWAY] * 4)
    with pytest.raises(StoreUnavailable, match="cannot reach it .status 502, text/html"):
        way.client.summary()
    assert queue.summary().waiting == 0


def test_what_would_do_more_the_second_time_is_not_sent_again(queue: Queue, way: Way) -> None:
    queue.submit("acme", payload=1)
    (dead,) = kill(queue)
    way.rude.manners.append(Manner.CUT_AFTER)
    with pytest.raises(StoreUnavailable):
        way.client.retry(dead)
    assert way.rude.seen == [f"POST /v1/documents/{dead}/retry"]
    assert queue.get(dead).state is State.WAITING

    way.rude.manners.append(Manner.CUT_AFTER)
    with pytest.raises(StoreUnavailable):
        way.client.purge("acme")
    assert queue.summary().waiting == 0
    way.rude.manners.append(Manner.LIMITED)  # the service rejects it without effect
    assert way.client.keys.make("operator").shown.startswith("ft_")
    assert len(KeyRegistry(queue.store).list()) == 1


def test_a_stream_that_cannot_be_read_again_is_sent_once(queue: Queue, way: Way) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    way.rude.manners.append(Manner.CUT_BEFORE)
    with pytest.raises(StoreUnavailable):
        way.client.submit("acme", content=Pipe(LARGE))
    assert len(way.rude.seen) == 1


def test_a_download_that_breaks_off_is_begun_anew_and_comes_whole(queue: Queue, way: Way) -> None:
    id = queue.submit("acme", content=LARGE).id
    assert len(LARGE) > IN_MEMORY_BYTES

    way.rude.manners.extend([Manner.GOOD, Manner.CUT_INSIDE, Manner.CUT_INSIDE])
    with way.client.open(id) as stream:
        assert hashlib.sha256(stream.read()).digest() == queue.get(id).sha256
    assert not way.rude.manners


def test_a_service_that_does_not_answer_in_time_is_told_so(queue: Queue) -> None:
    for kind in KINDS:
        with (
            served(queue) as url,
            before(url) as rude,
            client_for(
                kind, rude.url, timeout_s=1.5, retry_policy=RetryPolicy(attempts_max=1)
            ) as client,
        ):
            rude.manners.append(Manner.STALLED)
            with pytest.raises(StoreUnavailable, match="did not respond in time"):
                client.summary()


def test_a_wait_outlives_connections_that_are_cut(queue: Queue, way: Way) -> None:
    id = queue.submit("acme", payload=1).id
    way.rude.manners.extend([Manner.CUT_BEFORE, Manner.CUT_AFTER, Manner.BUSY])
    finishing = threading.Thread(target=complete, args=(queue,))
    finishing.start()
    finishing.join()

    assert way.client.wait(id, timeout_s=30).state == "completed"


# ── Uploads ──────────────────────────────────────────────────────────────────────────────────────


def test_an_upload_tells_how_far_it_is(queue: Queue, way: Way, tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(LARGE)
    told: list[tuple[int, int | None]] = []

    way.client.submit("acme", file=tmp_path / "a.pdf", progress=lambda *each: told.append(each))

    assert [sent for sent, _ in told] == list(range(262_144, len(LARGE) + 1, 262_144))
    assert {total for _, total in told} == {len(LARGE)}


def test_a_file_that_changes_while_it_is_sent_is_not_stored(
    queue: Queue, way: Way, tmp_path: Path
) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(LARGE)

    def shorten(sent: int, total: int | None) -> None:
        os.truncate(path, 1_000_000)

    with pytest.raises(ValueError, match="the content changed while it was sent"):
        way.client.submit("acme", file=path, progress=shorten)

    path.write_bytes(LARGE)

    def change(sent: int, total: int | None) -> None:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\0")

    with pytest.raises(Refused, match="the SHA-256 of the received body is"):
        way.client.submit("acme", file=path, progress=change)
    assert queue.summary().waiting == 0


def test_a_large_file_is_never_in_memory(queue: Queue, tmp_path: Path) -> None:
    """A process submits and reads 100 MB twice, and grows by less than 40 MB."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    program = f"""
import asyncio, resource, sys
from fairturn import AsyncClient, Client
async def main():
    async with AsyncClient(*sys.argv[1:]) as client:
        await client.summary()
        await go(client.submit, client.open)
async def go(submit, open_):
    receipt = await submit("acme", file={str(path)!r})
    with await open_(receipt.id) as stream:
        stream.seek(0, 2)
        print(stream.tell())
with Client(*sys.argv[1:]) as client:
    receipt = client.submit("acme", payload=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    receipt = client.submit("acme", file={str(path)!r})
    with client.open(receipt.id) as stream:
        stream.seek(0, 2)
        print(stream.tell())
    asyncio.run(main())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    with served(queue) as url:
        done = subprocess.run(
            [sys.executable, "-c", program, url, TOKEN],
            capture_output=True,
            text=True,
            check=False,
        )

    assert done.returncode == 0, done.stderr
    first, second, grown_kib = done.stdout.split()
    assert first == second == "100000000"
    assert int(grown_kib) < 40_000


def test_too_much_for_one_call_is_refused_before_anything_is_sent(queue: Queue, way: Way) -> None:
    part = b"x" * 9_000_000

    with pytest.raises(ValueError, match="submission 2: over HTTP one call takes 33,554,432 bytes"):
        way.client.submit_many([Submission("acme", content=part) for _ in range(4)])
    assert way.rude.seen == []


# ── Errors that say what to do ───────────────────────────────────────────────────────────────────


class _Stranger(BaseHTTPRequestHandler):
    """A server that is not a fairturn service."""

    answer: tuple[int, dict[str, str], bytes] = (200, {}, b"")

    def do_GET(self) -> None:
        status, headers, body = self.answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def stranger(status: int, headers: dict[str, str], body: bytes) -> Iterator[str]:
    with serving(type("Handler", (_Stranger,), {"answer": (status, headers, body)})) as url:
        yield url


@contextmanager
def serving(handler: type[_Stranger]) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


HTML, JSON = {"Content-Type": "text/html; charset=utf-8"}, {"Content-Type": "application/json"}
ME: dict[str, Any] = {"role": "operator", "key": None, "key_name": None, "customer": None}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_service_is_told_so(kind: str) -> None:
    for status, headers, body, said in [
        (
            404,
            HTML,
            b"<h1>Nothing</h1>",
            "is not a fairturn service .status 404, text/html",
        ),
        (200, HTML, b"<h1>Hello</h1>", "is not a fairturn service .status 200, text/html"),
        (200, JSON, b"[1]", "is not a fairturn service"),
        (
            301,
            {"Location": "https://elsewhere.example/"},
            b"",
            "redirects to https://elsewhere.exa",
        ),
        (
            200,
            JSON,
            json.dumps(ME).encode(),
            "runs fairturn of an unknown version; this client needs",
        ),
        (200, JSON, json.dumps({**ME, "version": "0.0.9"}).encode(), "runs fairturn 0.0.9; this"),
    ]:
        with (
            stranger(status, headers, body) as url,
            client_for(kind, url) as client,
            pytest.raises(StoreRefused, match=said),
        ):
            client.summary()


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_between_and_meddles_is_told_so(kind: str) -> None:
    me = json.dumps({**ME, "version": "0.1.0"}).encode()

    class Meddling(_Stranger):
        def do_GET(self) -> None:
            known = self.path == "/v1/me"
            self.answer = (200, JSON, me) if known else (200, HTML, b"<h1>Please log in</h1>")
            super().do_GET()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer = (413, HTML, b"<h1>Too large</h1>")
            super().do_GET()

    with serving(Meddling) as url, client_for(kind, url) as client:
        with pytest.raises(
            StoreRefused, match="the service returned an unexpected response .JSONDecodeError"
        ):
            client.summary()
        with pytest.raises(Refused, match="rejects a body of this size"):
            client.submit("acme", content=LARGE)


@pytest.mark.parametrize("kind", KINDS)
def test_where_nobody_answers_is_told_with_what_to_do(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    pauses: list[float] = []
    with (
        client_for(kind, f"http://127.0.0.1:{port}", pauses=pauses) as client,
        pytest.raises(StoreUnavailable, match=f"no service responds at http://127.0.0.1:{port} "),
    ):
        client.summary()
    assert len(pauses) == 3
    with (
        client_for(kind, "http://nowhere.invalid", None) as client,
        pytest.raises(
            StoreUnavailable, match="the host name in http://nowhere.invalid does not resolve"
        ),
    ):
        client.summary()


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_keys_are_told_without_the_key(queue: Queue, kind: str) -> None:
    good, customers, reader = key_for(queue), key_for(queue, "acme"), key_for(queue, role="reader")
    wrong = good[:-8] + "00000000"
    with served(queue, ServiceLimits(rate="1000/second")) as url:
        with (
            client_for(kind, url, None) as client,
            pytest.raises(NotAllowed, match="requires an access"),
        ):
            client.summary()
        with client_for(kind, url, wrong) as client:
            with pytest.raises(NotAllowed, match=f"{wrong[:15]}_… is unknown at {url}") as told:
                client.summary()
            assert wrong[-20:] not in f"{told.value} {client!r} {vars(client)!r}"
        with client_for(kind, url, customers) as client:
            for call in (client.summary, client.customers, client.keys.list):
                with pytest.raises(NotAllowed, match="does not permit this at"):
                    call()
            with pytest.raises(NotAllowed, match="belongs to customer 'acme', not to 'other'"):
                client.submit("other", payload=1)
            with pytest.raises(NotAllowed, match="belongs to customer 'acme', not to 'other'"):
                client.list(customer="other")
        with client_for(kind, url, reader) as client:
            assert client.summary().waiting == 0
            with pytest.raises(NotAllowed):
                client.submit("acme", payload=1)
        with client_for(kind, url, good) as client, pytest.raises(TypeError, match="name the cus"):
            client.submit(payload=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_customers_key_says_who_the_customer_is(queue: Queue, kind: str) -> None:
    theirs = queue.submit("other", payload=1).id
    with served(queue) as url, client_for(kind, url, key_for(queue, "acme")) as client:
        receipts = [client.submit(payload=1), client.submit("acme", content=LARGE)]
        receipts += client.submit_many([Submission("acme", payload=n) for n in range(2)])

        assert [receipt.customer for receipt in receipts] == ["acme"] * 4
        assert len(client.list(customer="acme").documents) == len(list(client.iterate())) == 4
        assert client.has_room()
        assert client.wait_for_room("acme")
        assert client.cancel([receipts[0].id, theirs]) == ["cancelled", None]
        me = client.me()
        assert (me.role, me.customer.name, me.customer.count) == ("customer", "acme", -3)
        assert (me.customer.waiting, me.customer.priority_of_next) == (3, 2)
        assert client.explain(receipts[3].id).reasons
        assert client.rule == queue.rule if kind == "client" else True


def certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """A certificate that is trusted only if it is given."""
    certificate, private_key = folder / "server.pem", folder / "server.key"
    making = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    names = ["-subj", f"/CN={host}", "-addext", f"subjectAltName=IP:{host}"]
    subprocess.run(
        [*making, *names, "-keyout", str(private_key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )
    return certificate, private_key


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_is_trusted_only_if_one_says_so(
    queue: Queue, tmp_path: Path, kind: str
) -> None:
    file, private_key = certificate(tmp_path, "127.0.0.1")
    key = key_for(queue)
    with served(queue, certificate=str(file), private_key=str(private_key)) as url:
        assert url.startswith("https://")
        with client_for(kind, url, key, ca=str(file)) as client:
            assert client.submit("acme", payload=1).priority == 1
        with (
            client_for(kind, url, key) as client,
            pytest.raises(StoreRefused, match="the TLS connection to .* failed .*ertificate"),
        ):
            client.summary()
        plain = url.replace("https:", "http:")
        with (
            client_for(kind, plain, key) as client,
            pytest.raises(StoreUnavailable, match="whether it needs https"),
        ):
            client.summary()
    with (
        served(queue) as url,
        client_for(kind, url.replace("http:", "https:"), key) as client,
        pytest.raises(StoreRefused, match="for a service without TLS, use an http:// url"),
    ):
        client.summary()


@pytest.mark.parametrize(
    "url, key, said",
    [
        ("localhost:8750", None, "url is 'localhost:8750'; it must have the form http://localhost"),
        ("ftp://localhost", None, "it must have the form http://localhost:8750"),
        ("http://", None, "it must have the form"),
        ("http://localhost:port", None, "which is not a valid url"),
        ("http://me:secret@localhost", None, "the url contains a user name or password"),
        ("http://localhost/?a=1", None, "must not contain . or #"),
        ("http://localhost", "ft_nonsense", "the access key does not have the form ft_ID_SECRET"),
        ("http://example.com", f"ft_{'0' * 12}_{'1' * 64}", "must not be sent unencrypted to http"),
    ],
)
def test_a_client_that_cannot_be_meant_is_not_made(url: str, key: str | None, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        Client(url, key)

    for secret in ("secret", "nonsense", "1" * 64):
        assert secret not in str(refused.value)


def test_a_key_may_travel_unencrypted_where_one_says_so() -> None:
    key = f"ft_{'0' * 12}_{'1' * 64}"
    with Client("http://queue.internal/", key, allow_http=True) as client:
        assert client.url == "http://queue.internal"
    with Client("http://[::1]:8750", key) as client:
        assert client.url == "http://[::1]:8750"


def test_no_key_is_logged(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    key = key_for(queue)
    with caplog.at_level(logging.DEBUG), served(queue) as url, Client(url, key) as client:
        client.submit("acme", payload=1)

    assert key.rpartition("_")[2] not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_content_that_is_damaged_on_the_way_is_not_handed_out(queue: Queue, kind: str) -> None:
    id = queue.submit("acme", content=b"Invoice 17").id
    document = {**_shown(queue, id), "explanation": None, "result_file_bytes": None}
    answers = {
        "/v1/me": (JSON, json.dumps({**ME, "version": "0.1.0"}).encode()),
        f"/v1/documents/{id}": (JSON, json.dumps(document).encode()),
        f"/v1/documents/{id}/content": ({"ETag": f'"{document["sha256"]}"'}, b"Invoice 18"),
    }

    class Damaging(_Stranger):
        def do_GET(self) -> None:
            headers, body = answers[self.path.partition("?")[0]]
            self.answer = (200, headers, body)
            super().do_GET()

    with (
        serving(Damaging) as url,
        client_for(kind, url) as client,
        pytest.raises(ContentDamaged, match="SHA-256"),
    ):
        client.open(id)


def _shown(queue: Queue, id: str) -> dict[str, Any]:
    return to_json(DOCUMENT, queue.get(id))


# ── A real process ───────────────────────────────────────────────────────────────────────────────


def started(folder: Path, port: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [SCRIPT, "serve", "--port", str(port)], cwd=folder, stderr=subprocess.DEVNULL
    )


def _wait_for_more(receipts: list[Any]) -> None:
    enough = len(receipts) + 5
    wait_until(lambda: len(receipts) >= enough, "documents are accepted", patience_s=90)


def test_documents_are_stored_once_although_the_service_is_killed(tmp_path: Path) -> None:
    """Two clients submit and one waits while the service is killed and restarted three times."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    retries = RetryPolicy(attempts_max=2_000, backoff=Backoff(0.05, 1.0, 0.05))
    receipts: list[Any] = []
    stopping = threading.Event()
    with Queue(tmp_path / "documents.db") as made:
        key = key_for(made)

    def submitting(n: int) -> None:
        with Client(f"http://127.0.0.1:{port}", key, retry_policy=retries) as client:
            while not stopping.is_set():
                number = len(receipts)
                content = b"%d %d " % (n, number) + LARGE[:100_000]
                receipts.append((client.submit(f"customer {n}", content=content), content))

    ended: list[Any] = []

    def waiting() -> None:
        with Client(f"http://127.0.0.1:{port}", key, retry_policy=retries) as client:
            id = client.submit("waits", payload=1).id
            ended.append(client.wait(id))

    process = started(tmp_path, port)
    threads = [threading.Thread(target=submitting, args=(n,)) for n in range(2)]
    threads.append(threading.Thread(target=waiting))
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            _wait_for_more(receipts)
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = started(tmp_path, port)
        _wait_for_more(receipts)
        with Queue(tmp_path / "documents.db") as queue:
            (waits,) = queue.list(customer="waits").documents
            queue.cancel(waits.id)
        wait_until(lambda: ended, "the wait has ended")
    finally:
        stopping.set()
        for thread in threads:
            thread.join()
        process.terminate()
        process.wait()

    assert [document.state for document in ended] == ["cancelled"]
    with Queue(tmp_path / "documents.db") as queue:
        assert queue.summary().waiting == len(receipts)
        for receipt, content in receipts:
            assert queue.read(receipt.id) == content
        with pytest.raises(WrongState):
            queue.result(receipts[0][0].id)


def test_what_stays_on_this_machine_goes_through_no_proxy(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with (
        served(queue) as url,
        Client(url, key_for(queue), retry_policy=RetryPolicy(attempts_max=1)) as client,
    ):
        assert client.summary().waiting == 0


def test_without_its_extra_a_client_says_what_to_install() -> None:
    program = """
import sys
sys.modules["httpx"] = None
from fairturn import AsyncClient, Client
from fairturn.errors import StoreRefused
for kind in (Client, AsyncClient):
    try:
        kind("http://localhost:8750")
    except StoreRefused as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    sentence = "a client needs the package httpx; install it with: pip install 'fairturn[client]'"
    assert done.stdout.splitlines() == [sentence, sentence]
