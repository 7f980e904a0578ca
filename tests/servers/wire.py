"""A TCP proxy that understands PostgreSQL's protocol and injects one fault at a chosen exchange.

An exchange is a group of client messages that ends with Sync, Flush, a simple Query or CopyDone,
and the server's reply to it, as a rule up to ReadyForQuery. `watch` numbers the exchanges of all
connections from 1, so that a test first counts the exchanges of an operation and then repeats the
operation with a fault at each of them:

    wire.watch()                                  # count
    operation()
    exchanges = wire.exchanges
    wire.watch(Fault(2, Moment.AFTER))            # lose the reply to the second exchange

A fault happens once. `Moment.BEFORE` means that the server has not received the exchange;
`Moment.AFTER` means that the server has answered and the client has not received the reply. There
`Action.CUT` breaks the connection; `Action.OUTAGE` breaks all connections and accepts none until
`release`; `Action.HOLD` freezes the connection, in both directions, until `release`. The server
never receives a later exchange of that connection before the fault is over.
"""

import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import urlsplit, urlunsplit

HOLD_S_MAX = 60.0  # so that a test that does not release it cannot hang
_CHUNK_BYTES = 65_536
_PLAIN = "sslmode=disable&gssencmode=disable"


class Moment(Enum):
    """When in an exchange a fault happens."""

    BEFORE = "before"
    AFTER = "after"


class Action(Enum):
    """The effect of a fault on the connection."""

    CUT = "cut"
    OUTAGE = "outage"
    HOLD = "hold"


class Fault(NamedTuple):
    """A fault at an exchange, counted from 1."""

    exchange: int
    moment: Moment
    action: Action = Action.CUT

    def __str__(self) -> str:
        return f"{self.action.value}-{self.moment.value}-{self.exchange}"


class Wire:
    """The proxy in front of one server. `url` replaces the server's own URL."""

    def __init__(self, server_url: str) -> None:
        parts = urlsplit(server_url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._server = (parts.hostname, parts.port)
        self._lock = threading.Lock()
        self._links: list[_Link] = []
        self._fault: Fault | None = None
        self._exchanges: list[str] = []
        self._closed = False
        self._is_down = False
        self.happened = False  # whether the fault has happened or its hold has begun
        self.reached = threading.Event()  # set at the same time
        self.released = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.url = urlunsplit(
            parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}", query=_PLAIN)
        )
        threading.Thread(target=self._accept, daemon=True, name="wire").start()

    def watch(self, fault: Fault | None = None) -> None:
        """Number the exchanges from 1 again and inject this fault once."""
        with self._lock:
            self._exchanges = []
            self._fault = fault
            self.happened = False
            self.reached.clear()
            self.released.clear()

    @property
    def exchanges(self) -> list[str]:
        """The exchanges since the last `watch`, each as the beginnings of its statements."""
        with self._lock:
            return list(self._exchanges)

    def release(self) -> None:
        """Resume a held connection, end an outage, and inject no later fault."""
        with self._lock:
            self._fault = None
            self._is_down = False
        self.released.set()

    def close(self) -> None:
        """Break all connections and accept none."""
        self.release()
        with self._lock:
            self._closed = True
            links, self._links = self._links, []
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise its thread would block forever
        self._listener.close()
        for link in links:
            link.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._is_down:
                    client.close()
                    continue
                try:
                    link = _Link(self, client, socket.create_connection(self._server))
                except OSError:
                    client.close()
                    continue
                with self._lock:
                    self._links.append(link)
                link.start()
                if self._closed:
                    link.cut()

    def break_down(self) -> None:
        """Break all connections and accept none until the fault is released."""
        with self._lock:
            self._is_down = True
            links, self._links = self._links, []
        for link in links:
            link.cut()

    def tell(self) -> None:
        """Report that the fault has happened."""
        self.happened = True
        self.reached.set()

    def number(self, statements: str) -> Fault | None:
        """Count an exchange that a client has sent; return the fault if it is at this one."""
        with self._lock:
            self._exchanges.append(statements)
            fault = self._fault
            if fault is None or fault.exchange != len(self._exchanges):
                return None
            self._fault = None
            return fault


@dataclass(slots=True)
class _Pending:
    """An exchange that the server has not answered yet."""

    fault: Fault | None
    answers: int | None  # messages that answer one that ends with Flush


class _Link:
    """One client's connection: a thread for each direction."""

    def __init__(self, wire: Wire, client: socket.socket, server: socket.socket) -> None:
        self._wire = wire
        self._client = client
        self._server = server
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._pending: deque[_Pending] = deque()  # exchanges without a reply, oldest first
        self._open = threading.Event()  # cleared while the link is held
        self._open.set()
        self._answered = threading.Event()  # the reply that a fault waits for is complete
        self._statements: dict[bytes, str] = {}  # by the name under which each was prepared

    def start(self) -> None:
        for target in (self._upstream, self._downstream):
            threading.Thread(target=target, daemon=True, name=f"wire{target.__name__}").start()

    def cut(self) -> None:
        """Break the connection for both sides."""
        self._open.set()
        self._answered.set()
        for end in (self._client, self._server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    # ── From the client to the server ────────────────────────────────────────────────────────────

    def _upstream(self) -> None:
        with suppress(OSError):
            self._server.sendall(_startup(self._client))
            group, simple, answers = b"", False, 0
            statements: list[str] = []
            for kind, message in _messages(self._client):
                group += message
                statements += self._statement(kind, message)
                answers += kind in b"PBCE"
                if kind in b"Xp" or (kind == b"H" and not answers):  # not part of an exchange
                    self._server.sendall(group)
                    group = b""
                elif kind in b"SQH" or (kind in b"cf" and simple):
                    simple = kind == b"Q"
                    expected = answers if kind == b"H" else None
                    self._exchange(group, " | ".join(statements), expected)
                    group, statements, answers = b"", [], 0
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_WR)

    def _exchange(self, group: bytes, statements: str, answers: int | None) -> None:
        fault = self._wire.number(statements)
        if fault is None or fault.moment is Moment.BEFORE:
            if fault is not None:
                self._happen(fault)
            with self._lock:
                self._pending.append(_Pending(None, answers))
            self._server.sendall(group)
            return
        self._answered.clear()
        with self._lock:
            self._pending.append(_Pending(fault, answers))
        self._server.sendall(group)
        self._answered.wait()

    def _happen(self, fault: Fault) -> None:
        """Cut the connection, or hold it until the test releases it."""
        if fault.action is Action.CUT:
            self._wire.tell()
            self.cut()
            raise ConnectionAbortedError(str(fault))
        if fault.action is Action.OUTAGE:
            self._wire.tell()
            self._wire.break_down()
            raise ConnectionAbortedError(str(fault))
        self._open.clear()
        self._wire.tell()
        self._wire.released.wait(HOLD_S_MAX)
        self._open.set()

    def _statement(self, kind: bytes, message: bytes) -> Iterator[str]:
        if kind == b"Q":
            yield _brief(message[5:-1])
        elif kind == b"P":
            name, text, _ = message[5:].split(b"\0", 2)
            self._statements[name] = _brief(text)
        elif kind == b"B":
            _, name, _ = message[5:].split(b"\0", 2)
            yield self._statements.get(name, "?")

    # ── From the server to the client ────────────────────────────────────────────────────────────

    def _downstream(self) -> None:
        ready = False  # the server has accepted the connection
        kept = b""  # part of a reply that the client must not receive yet
        with suppress(OSError):
            for kind, message in _messages(self._server):
                kept += message
                if not ready:
                    ready = kind == b"Z"
                elif (done := self._completed(kind)) is not None:
                    self._happen(done)
                    self._deliver(kept)
                    kept = b""
                    self._answered.set()
                if not self._fault_pending():
                    self._deliver(kept)
                    kept = b""
        # Forward the last bytes of the server and the end of the stream.
        with suppress(OSError):
            self._deliver(kept)
        self.cut()

    def _completed(self, kind: bytes) -> Fault | None:
        """Return the fault of the exchange whose reply a message of this type completes."""
        with self._lock:
            if not self._pending:
                return None
            first = self._pending[0]
            if kind in b"ZG":
                # After an error the server answers nothing up to the Sync.
                while self._pending[0].answers is not None and len(self._pending) > 1:
                    self._pending.popleft()
                return self._pending.popleft().fault
            if first.answers is not None and kind in b"123CIsE":
                first.answers -= 1
                if first.answers == 0 or kind == b"E":
                    return self._pending.popleft().fault
            return None

    def _fault_pending(self) -> bool:
        with self._lock:
            return bool(self._pending) and self._pending[0].fault is not None

    def _deliver(self, message: bytes) -> None:
        self._open.wait()
        self._client.sendall(message)


def _startup(client: socket.socket) -> bytes:
    """Return the first message, which has no type. TLS and GSS are switched off in the URL."""
    head = _exactly(client, 4)
    return head + _exactly(client, struct.unpack("!i", head)[0] - 4)


def _messages(source: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    """Yield complete messages with their types until the other side closes."""
    buffer = b""
    while chunk := source.recv(_CHUNK_BYTES):
        buffer += chunk
        start = 0
        while len(buffer) - start >= 5:
            end = start + 1 + struct.unpack_from("!i", buffer, start + 1)[0]
            if len(buffer) < end:
                break
            yield buffer[start : start + 1], buffer[start:end]
            start = end
        buffer = buffer[start:]


def _exactly(source: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = source.recv(size - len(received))
        if not chunk:
            raise ConnectionAbortedError("the client hung up before it was connected")
        received += chunk
    return received


def _brief(statement: bytes) -> str:
    return " ".join(statement.decode(errors="replace").split())[:60]
