"""A real server for tests: in a thread of this process, on a free port."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from fairturn import Queue
from fairturn.access.registry import KeyRegistry
from fairturn.service.app import make_app
from fairturn.service.options import ServiceLimits
from fairturn.service.server import ListenAddress, Server

STARTS_S = 30.0


@contextmanager
def served(queue: Queue, plan: ServiceLimits | None = None, **more: Any) -> Iterator[str]:
    """Serve this queue and yield the URL."""
    with served_app(make_app(queue, plan), **more) as url:
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
    """Serve this queue and yield a client."""
    headers = {} if key is None else bearer(key)
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


def code_of(response: httpx.Response) -> tuple[int, str]:
    """Return the status and the code of a problem response."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    problem = response.json()
    assert problem["status"] == response.status_code
    assert problem["type"] == f"urn:fairturn:problem:{problem['code']}"
    return response.status_code, problem["code"]
