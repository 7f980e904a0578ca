"""A TCP proxy that loses one reply: the server has done the work, and the client gets no reply."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK_BYTES = 65_536


class Lossy:
    """Forwards bytes in both directions. After `lose_reply_to`, the next request with the marker is
    delivered; its connection is cut when the server begins to reply."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._marker: bytes | None = None
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_reply_to(self, marker: bytes) -> None:
        with self._lock:
            self._marker = marker

    @property
    def has_lost_it(self) -> bool:
        """Whether the request with the marker has arrived."""
        return self._marker is None

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            _cut(end)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._ends += [client, server]
                doomed = threading.Event()
                for run in (self._pass_requests, self._pass_replies):
                    threading.Thread(target=run, args=(client, server, doomed), daemon=True).start()

    def _pass_requests(
        self, client: socket.socket, server: socket.socket, doomed: threading.Event
    ) -> None:
        with suppress(OSError):
            while data := client.recv(_CHUNK_BYTES):
                with self._lock:
                    if self._marker is not None and self._marker in data:
                        self._marker = None
                        doomed.set()
                server.sendall(data)
        _cut(client, server)

    def _pass_replies(
        self, client: socket.socket, server: socket.socket, doomed: threading.Event
    ) -> None:
        with suppress(OSError):
            while (data := server.recv(_CHUNK_BYTES)) and not doomed.is_set():
                client.sendall(data)
        _cut(client, server)


def _cut(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def before(host: str, port: int) -> Iterator[Lossy]:
    """Start a proxy in front of a server."""
    proxy = Lossy(host, port)
    try:
        yield proxy
    finally:
        proxy.close()
