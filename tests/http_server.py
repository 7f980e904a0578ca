"""A real server for tests: in a thread of this process, on a free port."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from fairturn import Queue
from fairturn.access.keys import write_key
from fairturn.access.registry import KeyRegistry
from fairturn.service.app import make_app
from fairturn.service.options import ServiceLimits
from fairturn.service.server import ListenAddress, Server

STARTS_S = 30.0
# The operator's while a queue has no keys.
TOKEN = write_key(bytes(6), bytes(range(32)))


@contextmanager
def served(queue: Queue, plan: ServiceLimits | None = None, **more: Any) -> Iterator[str]:
    """Serve this queue and yield the URL."""
    with served_app(make_app(queue, plan, token=TOKEN), **more) as url:
        yield url


@contextmanager
def served_app(app: FastAPI, **more: Any) -> Iterator[str]:
    """Serve an application and yield its URL."""
    server = Server(app, ListenAddress(port=0, **more))
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        assert server.listening.wait(STARTS_S), "the server does not start"
        yield server.url
    finally:
        server.stop()
        thread.join(STARTS_S)
        assert not thread.is_alive(), "the server does not end"


@contextmanager
def client_of(
    queue: Queue, plan: ServiceLimits | None = None, key: str | None = None
) -> Iterator[httpx.Client]:
    """Serve this queue and yield a client, with the token if there is no key."""
    headers = bearer(key or TOKEN)
    with (
        served(queue, plan) as url,
        httpx.Client(base_url=url, headers=headers, timeout=60) as client,
    ):
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def key_for(queue: Queue, customer: str | None = None, role: str = "operator") -> str:
    """Create a key for a customer or another role."""
    role = role if customer is None else "customer"
    return KeyRegistry(queue.store).make(role, customer=customer).shown


def asked(
    app: FastAPI,
    method: str,
    path: str,
    *,
    address: str = "127.0.0.1",
    base: str = "http://127.0.0.1:8750",
    **more: Any,
) -> httpx.Response:
    """Return the application's response to a client at this address."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, client=(address, 50_000))
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            return await client.request(method, path, **more)

    return asyncio.run(ask())


def entered(app: FastAPI) -> dict[str, str]:
    """Return the cookie of a session that began with the token, as in the URL of the command."""
    response = asked(app, "GET", "/login", params={"token": TOKEN})
    assert response.status_code == 303, response.text
    return {"Cookie": response.headers["set-cookie"].partition(";")[0]}


def code_of(response: httpx.Response) -> tuple[int, str]:
    """Return the status and the code of a problem response."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["type"] == f"urn:fairturn:problem:{problem['code']}"
    return response.status_code, problem["code"]
