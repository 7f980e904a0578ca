"""Connections that say nothing, or their request bit by bit, end: they must not take the place of
others. How fast a body has to come is the matter of `uploads.py`."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol_with(headers_s_max: float) -> type[H11Protocol]:
    """How a server speaks with whoever connects, if a request has to begin within this time."""

    class Hasty(H11Protocol):
        _late: asyncio.TimerHandle | None = None  # from when on nothing more is waited for

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:  # its headers are not complete
                self._expect()
            else:
                self._expect_no_more()

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect_no_more()
            super().connection_lost(exc)

        def _expect(self) -> None:
            if self._late is None:
                self._late = self.loop.call_later(headers_s_max, self.transport.close)

        def _expect_no_more(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Hasty
