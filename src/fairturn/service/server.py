"""The HTTP server: sockets, limits on connections, trusted proxies, graceful shutdown.

The limits are a timeout for request headers, and a number of connections per client address, so
that slow, idle or numerous clients do not exhaust the server's connections. Timeouts of request
bodies are in `uploads.py` and `middleware.py`."""

import asyncio
import errno
import gc
import logging
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from math import ceil
from types import FrameType
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

from fairturn.service.concurrency import ConcurrencyLimit, Permit, network_of
from fairturn.service.service import Service

CONNECTIONS_MAX = 4_000
BACKLOG = 2_048  # connections that the kernel queues
# Connections that the event loop accepts before it serves the others: a burst of new ones must not
# delay the requests of open ones. In a burst, one iteration of the loop takes 2 ms; with 8, 16 ms.
ACCEPTED_AT_ONCE = 1
GRACE_S = 30.0
_SWITCH_INTERVAL_S = 0.0005
_REFUSAL = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 5\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


def tune_interpreter() -> None:
    """Set the garbage collector and the switch interval for a service: in a process of its own, as
    `fairturn serve` and `up` start it.

    The objects of all modules stay until the end: each full garbage collection would traverse them
    and block the event loop for about 0.1 s, and clients can trigger many. And a request changes
    threads several times: with the default of 5 ms, a thread that checks another client's batch
    delays it by that much each time."""
    gc.freeze()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """A host and a port, with TLS or trusted proxies."""

    host: str = "127.0.0.1"
    port: int = 8750
    certificate: str | None = None
    private_key: str | None = None
    trusted_proxies: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_private(self) -> bool:
        """Whether keys from other machines arrive encrypted: by TLS here, or at a proxy."""
        return self.certificate is not None or bool(self.trusted_proxies)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Return whether to log a record. uvicorn logs a traceback for each request that it cancels
    after the grace period, in addition to a line with their number."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, asyncio.CancelledError)


class Server(uvicorn.Server):
    """A uvicorn server that ends event streams and long polls when it shuts down."""

    def __init__(
        self,
        app: FastAPI,
        address: ListenAddress,
        *,
        grace_s: float = GRACE_S,
        on_started: Callable[[str], None] | None = None,
        on_stopping: Callable[[bool], None] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=address.host,
                port=address.port,
                # h11: uvicorn's other parsers have no limit on the size of headers.
                http=_protocol(app.state.service, address),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=bool(address.trusted_proxies),
                forwarded_allow_ips=list(address.trusted_proxies),
                ssl_certfile=address.certificate,
                ssl_keyfile=address.private_key,
                limit_concurrency=CONNECTIONS_MAX,
                backlog=ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=ceil(grace_s),
            )
        )
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
        self._service: Service = app.state.service
        self._address = address
        self._on_started = on_started
        self._on_stopping = on_stopping
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sockets: list[socket.socket] | None = None
        self.listening = threading.Event()
        self.url = ""

    def listen(self) -> None:
        """Bind and listen now; `run` accepts the connections. Raises `OSError`."""
        self._sockets = listen_at(self._address.host, self._address.port, BACKLOG)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`."""
        if self._sockets is None:
            self.listen()
        super().run(self._sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and call `on_started` with the URL."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if not self.started:
            return
        for each in sockets or ():
            each.listen(BACKLOG)  # asyncio has set it to the number that it accepts at once
        port = self.servers[0].sockets[0].getsockname()[1]
        scheme = "http" if self._address.certificate is None else "https"
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        self.url = f"{scheme}://{host}:{port}"
        self.listening.set()
        if self._on_started is not None:
            self._on_started(self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down gracefully on the first signal, at once on the second."""
        self.stop(now=self.should_exit)

    def stop(self, *, now: bool = False) -> None:
        """Shut down. This is thread-safe."""
        self.should_exit = True
        self.force_exit = self.force_exit or now
        if now:
            self._service.queue.interrupt()  # threads may wait for another process's lock
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._service.watch.close)
        if self._on_stopping is not None:
            self._on_stopping(now)


def _protocol(service: Service, address: ListenAddress) -> type[H11Protocol]:
    """Return an HTTP/1.1 protocol that closes a connection whose headers take too long, and those
    above the limit of an address. `Guard` limits the requests of each address that a trusted proxy
    forwards."""
    proxies = ProxyHeadersMiddleware(_no_app, list(address.trusted_proxies)).trusted_hosts
    addresses = ConcurrencyLimit(service.plan.connections_per_address_max)

    class LimitedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _permit: Permit | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            host = self.client[0] if self.client else ""
            if host not in proxies:
                network = network_of(host)
                if not addresses.has_permit(network):
                    transport.write(_REFUSAL)
                    transport.close()
                    return
                self._permit = addresses.take(network)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:  # the headers are incomplete
                self._start_timer()
            else:
                self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            if self._permit is not None:
                self._permit.release()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(
                    service.plan.headers_s_max, self.transport.close
                )

        def _stop_timer(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return LimitedProtocol


async def _no_app(*_: Any) -> None:
    """The application of a middleware of which only the list of proxies is used."""


def listen_at(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Return listening sockets for every address of the host, all on the same port.

    An address that this machine does not have, such as ::1 without IPv6, is skipped unless it is
    the only one. Raises `OSError` and then leaves no socket open.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listening: list[socket.socket] = []
    absent: OSError | None = None
    with ExitStack() as opened:
        for family, (ip, _, *scope) in dict.fromkeys((family, at) for family, _, _, _, at in found):
            # With port 0, all addresses share the port of the first one.
            chosen = listening[0].getsockname()[1] if listening else port
            try:
                one = socket.create_server((ip, chosen, *scope), family=family, backlog=backlog)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error
            else:
                # With the protocol: asyncio sets TCP_NODELAY only on connections that name it, and
                # without it responses wait for delayed acknowledgements, up to 40 ms.
                named = socket.socket(family, one.type, socket.IPPROTO_TCP, fileno=one.detach())
                listening.append(opened.enter_context(named))
        if absent is not None and not listening:
            raise absent
        opened.pop_all()
    return listening
