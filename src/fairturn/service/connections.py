"""Limits on connections: a timeout for request headers, and a number per client address, so that
slow, idle or many clients do not exhaust the connections of the server. Timeouts of request bodies
are in `uploads.py` and `middleware.py`."""

import asyncio
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from fairturn.service.concurrency import ConcurrencyLimit, Permit, network_of

_REFUSAL = (
    b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 5\r\nContent-Length: 0\r\n"
    b"Connection: close\r\n\r\n"
)


def protocol_with(
    headers_s_max: float, addresses: ConcurrencyLimit, is_trusted: Callable[[str], bool]
) -> type[H11Protocol]:
    """Return an HTTP/1.1 protocol that closes a connection whose headers take longer than this, and
    those above the limit of an address; `is_trusted` excepts proxies."""

    class LimitedProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        _permit: Permit | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            host = self.client[0] if self.client else ""
            if not is_trusted(host):
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
                self._deadline = self.loop.call_later(headers_s_max, self.transport.close)

        def _stop_timer(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return LimitedProtocol
