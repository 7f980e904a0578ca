"""Running the service: where it listens, whom it believes, and how it ends."""

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from socket import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from fairturn.service.connections import protocol_with
from fairturn.service.service import Service

CONNECTIONS_MAX = 4_000
GRACE_S = 30
# How long the event loop may keep the interpreter while a thread wants it. A thread gives it away
# at each call of the database, some dozens in a submission; at the 5 ms of Python each of these
# could take as long.
SWITCH_S = 0.0005


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


class Server(uvicorn.Server):
    """A server that lets go of whoever waits for events when it is told to end."""

    def __init__(
        self,
        app: FastAPI,
        address: Address,
        *,
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
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._service: Service = app.state.service
        self._address = address
        self._on_started = on_started
        self._on_stopping = on_stopping
        self._loop: asyncio.AbstractEventLoop | None = None
        self.listening = threading.Event()
        self.url = ""

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Listen, then tell where."""
        sys.setswitchinterval(SWITCH_S)
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
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._service.watch.close)
        if self._on_stopping is not None:
            self._on_stopping(now)
