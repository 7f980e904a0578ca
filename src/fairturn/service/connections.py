"""A timeout for request headers, so that slow or idle clients do not exhaust the connection limit.
Timeouts of request bodies are in `uploads.py` and `middleware.py`."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol_with(headers_s_max: float) -> type[H11Protocol]:
    """Return an HTTP/1.1 protocol that closes a connection whose headers take longer than this."""

    class TimeoutProtocol(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:  # the headers are incomplete
                self._start_timer()
            else:
                self._stop_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(headers_s_max, self.transport.close)

        def _stop_timer(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return TimeoutProtocol
