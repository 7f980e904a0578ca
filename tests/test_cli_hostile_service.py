"""Commands against a hostile service: nothing that it sends controls the terminal."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

from fairturn import Queue
from tests.commands import (
    complete,
    error_of,
    fairturn,
    hold,
    kill,
    shown_on_a_terminal,
)
from tests.http_server import TOKEN, bearer, served

# A title, a cleared screen by a two-byte and by a one-byte sequence, a forged line, reversed text.
ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b2J\r\nforged\u202e"
Tampering = Callable[[Any], Any]
# Values that the client compares with a list of its own.
_CHOICES = ("role", "state", "code", "body_type", "mode", "costs", "reset", "kinds", "outcome")


def in_every_text(value: Any) -> Any:
    """Add the attack to every text."""
    if isinstance(value, str):
        return value + ATTACK
    return _inside(value, in_every_text)


def in_free_texts(value: Any) -> Any:
    """Add the attack to every text that the client does not compare with a list of its own."""
    return _in_texts_except(value, _CHOICES)


def in_free_texts_but_kinds(value: Any) -> Any:
    """The same without the kinds of documents, which a trace must be able to hold."""
    return _in_texts_except(value, (*_CHOICES, "kind"))


def _in_texts_except(value: Any, kept: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {
            name: each if name in kept and isinstance(each, str) else _in_texts_except(each, kept)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_in_texts_except(each, kept) for each in value]
    return in_every_text(value) if isinstance(value, str) else value


def instead_of_numbers(value: Any) -> Any:
    """Replace every number by the attack."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ATTACK
    return _inside(value, instead_of_numbers)


def as_a_problem(value: Any) -> Any:
    """Replace the response by a problem with the attack in its values."""
    return {
        "code": "invalid",
        "status": 422,
        "title": ATTACK,
        "detail": ATTACK,
        "errors": [{"where": ATTACK, "what": ATTACK}],
    }


def as_a_problem_without_detail(value: Any) -> Any:
    problem = as_a_problem(value)
    del problem["detail"]
    return problem


def as_a_strange_problem(value: Any) -> Any:
    return {"code": ATTACK, "status": ATTACK, "title": ATTACK, "errors": [ATTACK]}


def _inside(value: Any, tampering: Tampering) -> Any:
    if isinstance(value, dict):
        return {name: tampering(each) for name, each in value.items()}
    return [tampering(each) for each in value] if isinstance(value, list) else value


PROBLEMS = (as_a_problem, as_a_problem_without_detail, as_a_strange_problem)


@contextmanager
def hostile(target: str, tampering: Tampering) -> Iterator[str]:
    """Serve the responses of a service with tampered values, and yield the URL."""
    service = httpx.Client(base_url=target, headers=bearer(TOKEN), timeout=60)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kind = {"Content-Type": self.headers.get("Content-Type", "text/plain")}
            answer = service.request(self.command, self.path, content=body, headers=kind)
            content, status, media_type = answer.content, answer.status_code, "text/html"
            if "json" in answer.headers.get("content-type", ""):
                media_type = answer.headers["content-type"]
                value = answer.json()
                if tampering not in PROBLEMS:
                    value = tampering(value)
                elif self.path != "/v1/me":
                    value, status = tampering(value), 422
                    media_type = "application/problem+json"
                content = json.dumps(value).encode()
            self.send_response(status, "\x1b[2J")
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = serve  # noqa: N815  # the names of http.server

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that hang up."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        service.close()


def commands_for(ids: list[str]) -> list[tuple[str, ...]]:
    return [
        *(("show", id) for id in ids),
        *(("explain", id) for id in ids),
        ("show", ids[1], "--details"),
        ("show", ids[0], "--result"),
        ("outages",),
        ("outages", "resume", "azure-ocr"),
        ("list",),
        ("list", "--limit", "1"),
        ("wait", ids[0]),
        ("wait", *ids[:2], "--timeout", "0.01"),
        ("cancel", ids[2], "0123456789abcde"),
        ("cancel", "--customer", "acme", "--yes"),
        ("retry", ids[1]),
        ("submit", "acme", "--payload", "1"),
        ("submit", "acme", "--payload", "1", "--key", "k"),
        ("submit", "acme", "--payload", "1", "--key", "k"),
        ("submit", "--ndjson", "lines"),
        ("customers",),
        ("customers", "--limit", "1"),
        ("customers", "set", "acme", "--weight", "2"),
        ("customers", "pause", "acme"),
        ("kinds",),
        ("kinds", "set", "ocr", "--limit", "2"),
        ("rule",),
        ("rule", "--documents", "3"),
        ("config",),
        ("config", "set", "attempts_max=3"),
        ("export", "--output", "history.csv", "--force"),
        ("purge", "acme", "--dry-run"),
        ("purge", "other", "--yes"),
        ("keys",),
        ("keys", "revoke", "0123456789ab"),
        ("keys", "make", "--role", "operator"),
    ]


@pytest.mark.parametrize(
    "tampering",
    [in_every_text, in_free_texts, instead_of_numbers, *PROBLEMS],
    ids=lambda tampering: str(tampering.__name__),
)
def test_nothing_that_a_service_sends_controls_the_terminal(
    tmp_path: Path, tampering: Tampering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAIRTURN_KEY", TOKEN)
    Path("lines").write_text('{"customer": "acme", "payload": 1}\n')
    with Queue(tmp_path / "documents.db", attempts_max=1) as queue, served(queue) as url:
        for n in range(6):
            queue.submit("acme" if n % 2 else "other", payload=1, name=f"n{n}", metadata={"a": "b"})
        ids = [
            *complete(queue),
            *kill(queue),
            *(d.id for d in queue.list(states="waiting", size=1).documents),
        ]
        hold(queue)
        with hostile(url, tampering) as attacker:
            for command in commands_for(ids):
                result = fairturn(*command, "--url", attacker)
                for text in (result.stdout, result.stderr):
                    assert raw_in(text) == [], command


@pytest.mark.parametrize(
    "command",
    [
        ("keys",),
        ("list", "--all"),
        ("customers", "--all"),
        ("export",),
        ("cancel", "--customer", "acme", "--yes"),
    ],
    ids=" ".join,
)
def test_a_page_that_repeats_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("FAIRTURN_KEY", TOKEN)
    with Queue(tmp_path / "documents.db") as queue, served(queue) as url:
        queue.submit("acme", payload=1)
        complete(queue)
        with hostile(url, PageThatRepeats()) as attacker:
            result = fairturn(*command, "--url", attacker)

    assert "unexpected response (ValueError: the page after " in error_of(result, 1)


class PageThatRepeats:
    """Returns the same page for every cursor, but ends after many, so that the test ends."""

    def __init__(self) -> None:
        self._pages = 0

    def __call__(self, value: Any) -> Any:
        key = {
            "id": "0" * 12,
            "role": "operator",
            "customer": None,
            "name": "",
            "made_at": 0,
            "used_at": None,
            "ends_at": None,
        }
        self._pages += 1
        if self._pages > 20:
            return {**value, "keys": []} if "keys" in value else value
        return {**value, "keys": [key]} if "keys" in value else {**value, "next": "0" * 28}


@pytest.mark.parametrize(
    ("command", "tampering", "shown_name"),
    [
        ("list", in_free_texts, "acme"),
        ("customers", in_free_texts, "acme"),
        ("export", in_free_texts_but_kinds, "acme"),
        ("kinds", in_free_texts, "default"),
        ("outages", in_free_texts, "ocr"),
    ],
)
def test_a_table_on_a_terminal_has_no_sequence_of_the_service(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    tampering: Tampering,
    shown_name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with Queue(tmp_path / "documents.db") as queue, served(queue) as url:
        queue.submit("acme", payload=1, name="a")
        complete(queue)
        hold(queue)
        with hostile(url, tampering) as attacker:
            shown = shown_on_a_terminal(
                "stdout", command, "--url", attacker, FAIRTURN_KEY=TOKEN, NO_COLOR="1"
            )

    assert f"{shown_name}\\x1" in shown
    assert raw_in(shown.replace("\r\n", "\n")) == []


def raw_in(text: str) -> list[str]:
    """Return the lines of an output that control the terminal or that the service has forged."""
    return [
        line
        for line in text.split("\n")
        if line.startswith("forged") or not line.replace("\t", "").isprintable()
    ]
