"""Running the service: where it listens, whom it believes, and how it ends."""

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from math import ceil
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from fairturn.service.connections import protocol_with
from fairturn.service.service import Service
from fairturn.stores.contract import Interruptible

CONNECTIONS_MAX = 4_000
GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where to listen, and how it is kept from being overheard."""

    host: str = "127.0.0.1"
    port: int = 8750
    certificate: str | None = None
    private_key: str | None = None
    trusted_proxies: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return self.host == "localhost" or ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_private(self) -> bool:
        """Whether a key can come here from another machine without being overheard."""
        return self.certificate is not None or bool(self.trusted_proxies)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a record is worth a line. uvicorn logs a traceback for each request that it cancels
    when the grace period is over, beside the line that reports their number."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, asyncio.CancelledError)


class Server(uvicorn.Server):
    """A server that lets go of whoever waits for events when it is told to end."""

    def __init__(
        self,
        app: FastAPI,
        address: Address,
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
                # By h11: other parsers, if they are installed, have no limit on headers.
                http=protocol_with(app.state.service.plan.headers_s_max),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                # Headers of a proxy count only if they come from one that is trusted.
                proxy_headers=bool(address.trusted_proxies),
                forwarded_allow_ips=list(address.trusted_proxies),
                ssl_certfile=address.certificate,
                ssl_keyfile=address.private_key,
                limit_concurrency=CONNECTIONS_MAX,
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
        """Listen at the address from now on; `run` accepts the connections. Raises `OSError`."""
        self._sockets = listen_at(self._address.host, self._address.port, self.config.backlog)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until asked to stop."""
        super().run(self._sockets if sockets is None else sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then tell where."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if not self.started:
            return
        port = self.servers[0].sockets[0].getsockname()[1]
        scheme = "http" if self._address.certificate is None else "https"
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        self.url = f"{scheme}://{host}:{port}"
        self.listening.set()
        if self._on_started is not None:
            self._on_started(self.url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: finish what is being answered; a second one: end at once."""
        self.stop(now=self.should_exit)

    def stop(self, *, now: bool = False) -> None:
        """Ask the server to end, from any thread."""
        self.should_exit = True
        self.force_exit = self.force_exit or now
        store = self._service.queue.store
        if now and isinstance(store, Interruptible):
            store.interrupt()  # threads may wait for the lock of another process
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._service.watch.close)
        if self._on_stopping is not None:
            self._on_stopping(now)


def listen_at(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Sockets that listen at every address of the host, all at the same port.

    An address that this machine does not have, such as ::1 without IPv6, is left out if there is
    another one. Raises `OSError`; then nothing listens.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listening: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, (ip, _, *scope) in dict.fromkeys((family, at) for family, _, _, _, at in found):
            # If any port will do, all addresses have that of the first one.
            chosen = listening[0].getsockname()[1] if listening else port
            try:
                listening.append(_listen(family, (ip, chosen, *scope), backlog))
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                absent = error
        if absent is not None and not listening:
            raise absent
    except OSError:
        for one in listening:
            one.close()
        raise
    return listening


def _listen(family: int, address: Any, backlog: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(backlog)
    except OSError:
        made.close()
        raise
    return made
