"""An HTTP proxy that cuts, stalls and refuses requests in a chosen manner."""

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import httpx

_HOP = {"connection", "transfer-encoding", "content-length", "host", "keep-alive"}


class Manner(StrEnum):
    """The fate of a request."""

    GOOD = "good"
    CUT_BEFORE = "cut_before"  # the service does not receive it
    CUT_AFTER = "cut_after"  # the service has processed it, and the response is lost
    CUT_INSIDE = "cut_inside"  # half of the response arrives
    CUT_UPLOAD = "cut_upload"  # half of the body is read
    BUSY = "busy"  # 503 in the service's format, with Retry-After
    BUSY_AFTER = "busy_after"  # the same, although the service has processed it
    LIMITED = "limited"  # 429 in the service's format, with Retry-After
    GATEWAY = "gateway"  # 502 that is not from the service
    STALLED = "stalled"  # no response until it is released


_PROBLEMS = {
    Manner.BUSY: (503, "unavailable", 7),
    Manner.BUSY_AFTER: (503, "unavailable", 7),
    Manner.LIMITED: (429, "rate_limited", 3),
}


class Rude(ThreadingHTTPServer):
    """Forwards requests to the service at a URL, each in the next manner of a list."""

    daemon_threads = True

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.manners: deque[Manner] = deque()
        self.seen: list[str] = []  # methods and paths, except requests for the identity
        self.let_go = threading.Event()
        self.service = httpx.Client(base_url=target, timeout=60)

    def server_close(self) -> None:
        super().server_close()
        self.service.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections that were cut on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _serve(self) -> None:
        server = cast(Rude, self.server)
        path = self.path.partition("?")[0]
        manner = Manner.GOOD
        if path != "/v1/me":
            server.seen.append(f"{self.command} {path}")
            manner = server.manners.popleft() if server.manners else Manner.GOOD
        if manner is Manner.CUT_UPLOAD:
            self.rfile.read(int(self.headers["Content-Length"]) // 2)
            self._cut()
            return
        body = self._body()
        if manner is Manner.CUT_BEFORE:
            self._cut()
        elif manner is Manner.STALLED:
            server.let_go.wait()
            self._cut()
        elif manner is Manner.GATEWAY:
            self._respond(502, {"Content-Type": "text/html"}, b"<h1>Bad gateway</h1>")
        elif manner in (Manner.BUSY, Manner.LIMITED):
            self._problem(manner)
        else:
            self._hand_on(manner, body)

    do_GET = do_POST = do_PATCH = _serve  # noqa: N815  # the names that http.server looks for

    def _hand_on(self, manner: Manner, body: bytes) -> None:
        server = cast(Rude, self.server)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP}
        answer = server.service.request(self.command, self.path, headers=headers, content=body)
        if manner is Manner.CUT_AFTER:
            self._cut()
        elif manner is Manner.BUSY_AFTER:
            self._problem(manner)
        elif manner is Manner.CUT_INSIDE:
            self._respond(answer.status_code, answer.headers, answer.content, half=True)
            self._cut()
        else:
            self._respond(answer.status_code, answer.headers, answer.content)

    def _problem(self, manner: Manner) -> None:
        status, code, after = _PROBLEMS[manner]
        problem = json.dumps({"code": code, "status": status, "title": "Not now."}).encode()
        headers = {"Content-Type": "application/problem+json", "Retry-After": str(after)}
        self._respond(status, headers, problem)

    def _respond(self, status: int, headers: Any, body: bytes, *, half: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP | {"content-encoding", "date", "server"}:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if half else body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(2)


@contextmanager
def before(target: str) -> Iterator[Rude]:
    """Start such a proxy in front of the service at this URL."""
    with Rude(target) as rude:
        thread = threading.Thread(target=rude.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield rude
        finally:
            rude.let_go.set()
            rude.shutdown()
            thread.join()
