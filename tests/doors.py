"""The queue through three interfaces: itself, a client, and an async client with blocking calls."""

import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import isasyncgen, isawaitable
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from fairturn import AsyncClient, Client, Queue
from tests.commands import SCRIPT
from tests.http_server import TOKEN, served

DOORS = ("queue", "client", "async client")
ELSEWHERE = "client of a process"


class Awaited:
    """An async client with blocking calls: an event loop in a thread runs them."""

    def __init__(self, portal: BlockingPortal, client: Any) -> None:
        self._portal = portal
        self._client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name == "keys":
            return Awaited(self._portal, found)
        if name in ("settings", "rule"):
            return self._call(found)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Any, *args: Any, **more: Any) -> Any:
        async def call() -> Any:
            given = method(*args, **more)
            if isasyncgen(given):
                return await _all(given)
            return await given if isawaitable(given) else given

        return self._portal.call(call)


async def _all(given: AsyncIterator[Any]) -> list[Any]:
    return [each async for each in given]


@contextmanager
def awaited(url: str, key: str | None = None, **more: Any) -> Iterator[Any]:
    """An async client of the service at a URL."""
    with start_blocking_portal() as portal:
        client = Awaited(portal, AsyncClient(url, key, **more))
        yield client
        client.close()


@contextmanager
def door_to(name: str, queue: Queue, key: str | None = None) -> Iterator[Any]:
    """One of the three interfaces to this queue."""
    if name == "queue":
        yield queue
        return
    with served_elsewhere(queue) if name == ELSEWHERE else served_here(queue) as (url, token):
        if name == "async client":
            with awaited(url, key or token) as client:
                yield client
        else:
            with Client(url, key or token) as client:
                yield client


@contextmanager
def served_here(queue: Queue) -> Iterator[tuple[str, str]]:
    """Serve this queue in a thread and yield the URL and the token."""
    with served(queue) as url:
        yield url, TOKEN


@contextmanager
def served_elsewhere(queue: Queue) -> Iterator[tuple[str, str]]:
    """Run `fairturn serve` on the file of this queue and yield its URL and the token."""
    file = str(getattr(queue.store, "path", ""))
    with subprocess.Popen(
        [SCRIPT, "serve", "--port", "0", "--database", file], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            found = re.search(r"Serving at (\S+)/login\?token=(\S+)", said)
            assert found is not None, said
            yield found[1], found[2]
        finally:
            process.terminate()
