"""A server that is killed during submissions: each accepted document is stored exactly once."""

import hashlib
import os
import random
import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from fairturn import Queue
from fairturn.clock import SystemClock
from fairturn.contents.local import SWEEP_AGE_US, sweep
from tests.commands import SCRIPT
from tests.http_server import bearer

SENDERS = 4
SIZES = (50, 2_000, 100_000, 1_500_000)


class Sent(NamedTuple):
    """A document to send."""

    key: str
    body: bytes


class Senders:
    """Clients that submit, and submit again with the same key if no response arrives."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._unanswered: list[list[Sent]] = [[] for _ in range(SENDERS)]
        self.accepted: dict[str, tuple[str, str]] = {}  # by key: the id, and the SHA-256
        self._made = 0
        self._lock = threading.Lock()

    def send(
        self, url: str, token: str, process: "subprocess.Popen[str]", acknowledged: int
    ) -> None:
        """Send until `acknowledged` more documents are accepted, then kill the server."""
        enough = threading.Event()
        until = len(self.accepted) + acknowledged
        threads = [
            threading.Thread(target=self._submit, args=(url, token, number, until, enough))
            for number in range(SENDERS)
        ]
        for thread in threads:
            thread.start()
        assert enough.wait(60)
        process.kill()
        for thread in threads:
            thread.join()

    def _submit(
        self, url: str, token: str, number: int, until: int, enough: threading.Event
    ) -> None:
        with httpx.Client(base_url=url, headers=bearer(token), timeout=30) as client:
            while True:
                document = self._next(number)
                try:
                    answer = client.post(
                        "/v1/documents",
                        params={"customer": f"c{number}", "name": document.key},
                        content=document.body,
                        headers={"Idempotency-Key": document.key},
                    )
                except httpx.TransportError:
                    self._unanswered[number].append(document)
                    return  # the server was killed
                assert answer.status_code in (200, 201), answer.text
                with self._lock:
                    digest = hashlib.sha256(document.body).hexdigest()
                    self.accepted[document.key] = (answer.json()["id"], digest)
                    if len(self.accepted) >= until:
                        enough.set()

    def _next(self, number: int) -> Sent:
        with self._lock:
            if self._unanswered[number]:
                return self._unanswered[number].pop()
            self._made += 1
            size = self._random.choice(SIZES)
            return Sent(f"k{self._made}", self._random.randbytes(size))


@contextmanager
def server(folder: Path) -> "Iterator[tuple[str, str, subprocess.Popen[str]]]":
    """Start the installed program and yield its URL and the token."""
    with subprocess.Popen(
        [SCRIPT, "serve", "--port", "0", "--rate", "1000000/second"],
        cwd=folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            match = re.search(r"Serving at (\S+)/login\?token=(\S+)", said)
            assert match is not None, said
            yield match[1], match[2], process
        finally:
            process.kill()


def killed(folder: Path, kills: int, seed: int) -> None:
    senders, moments = Senders(seed), random.Random(seed)
    for _ in range(kills):
        with server(folder) as (url, token, process):
            senders.send(url, token, process, acknowledged=moments.randint(5, 40))

    with Queue(folder / "documents.db") as queue:
        documents = {document.id: document for document in queue.iterate()}
        for id, digest in senders.accepted.values():
            assert hashlib.sha256(queue.read(id)).hexdigest() == digest
        names = [document.name for document in documents.values()]
        assert len(names) == len(set(names)), "two documents of one key"
        assert set(senders.accepted) <= set(names)
        sweep(queue.contents, queue.store.unreferenced, SystemClock().now() + 2 * SWEEP_AGE_US)
        kept = set(queue.contents.names(1 << 60))
        assert kept == {d.content_name for d in documents.values() if d.content_name is not None}


def test_what_a_killed_server_has_accepted_is_there_once_and_nothing_else_is_left(
    tmp_path: Path,
) -> None:
    killed(tmp_path, kills=2, seed=7)


@pytest.mark.long
def test_50_kills_under_load(tmp_path: Path) -> None:
    killed(tmp_path, kills=50, seed=50)
