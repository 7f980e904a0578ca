"""A proxy that adds latency to a server.

`python -m benchmarks.distance PORT DELAY_US` listens on a new port, prints its number, and forwards
everything to PORT, each direction delayed by half of DELAY_US. One thread suffices; select() has a
timeout in microseconds, epoll only in milliseconds.
"""

import select
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

ROOT = Path(__file__).parent.parent
_PIECE_BYTES = 65_536


@contextmanager
def further_away(url: str, added_us: int) -> Iterator[str]:
    """Return the URL of the same server behind a proxy that adds latency."""
    parts = urlsplit(url)
    proxy = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.distance", str(parts.port), str(added_us)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert proxy.stdin is not None
    assert proxy.stdout is not None
    try:
        port = int(proxy.stdout.readline())
        yield parts._replace(netloc=f"{parts.username}@{parts.hostname}:{port}").geturl()
    finally:
        proxy.stdin.close()
        proxy.wait()


def round_trip_ms(url: str) -> float:
    took = []
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(100):
            begun = time.perf_counter()
            connection.execute("SELECT 1", prepare=True).fetchone()
            took.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(took)


class Proxy:
    """Pairs of sockets; data received on one is sent to the other after the delay."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._port = port
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._other: dict[socket.socket, socket.socket] = {}  # the peer of each socket
        self._silent: set[socket.socket] = set()  # sockets whose end of stream was forwarded
        # All delays are equal, so the queue is in the order of arrival.
        self._passing: deque[tuple[float, socket.socket, socket.socket, bytes]] = deque()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def serve(self, until: socket.socket | int) -> None:
        """Forward until `until` is readable or no connection is left."""
        with self._listener:
            while True:
                wait_s = None
                if self._passing:
                    wait_s = max(0.0, self._passing[0][0] - time.monotonic())
                ready, _, _ = select.select([until, self._listener, *self._other], [], [], wait_s)
                if until in ready:
                    break
                for one in ready:
                    if one is self._listener:
                        self._accept()
                    elif one in self._other:
                        self._take(one)
                self._pass_on()
        for one, other in self._other.items():
            one.close()
            other.close()

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._port))
        for one, other in ((near, far), (far, near)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._other[one] = other

    def _take(self, one: socket.socket) -> None:
        other = self._other[one]
        try:
            piece = one.recv(_PIECE_BYTES)
        except ConnectionResetError:
            piece = b""
        self._passing.append((time.monotonic() + self._delay_s, one, other, piece))
        if not piece:
            del self._other[one]

    def _pass_on(self) -> None:
        while self._passing and self._passing[0][0] <= time.monotonic():
            _, one, other, piece = self._passing.popleft()
            with suppress(OSError):  # the peer has closed; its own end of stream follows
                if piece:
                    other.sendall(piece)
                else:
                    other.shutdown(socket.SHUT_WR)
            if not piece:
                self._part(one, other)

    def _part(self, one: socket.socket, other: socket.socket) -> None:
        """Record the end of one direction; close both sockets after both."""
        if other not in self._silent:
            self._silent.add(one)
            return
        self._silent.discard(other)
        one.close()
        other.close()


def main() -> None:
    proxy = Proxy(int(sys.argv[1]), int(sys.argv[2]) / 2e6)
    print(proxy.port, flush=True)
    proxy.serve(sys.stdin.fileno())


if __name__ == "__main__":
    main()
