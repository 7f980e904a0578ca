"""Other queues on SQLite, used as their own documentation shows.

It runs in an environment of its own, as `python peers.py NAME drain|latency N FOLDER`, and prints a
JSON list of seconds. Each peer has its default settings.
"""

import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

PAYLOAD = {"document": "invoice-17.pdf", "pages": 3, "language": "de"}
# litequeue cannot wait for a message. Polling every 10 ms takes about 1 % of a core.
POLL_S = 0.01


class Peer(Protocol):
    """Take messages from the queue and pass each to a function, until stopped."""

    def put(self, message: Any) -> None: ...
    def start(self, handle: Callable[[], None]) -> None: ...
    def stop(self) -> None: ...


class Looping:
    """A queue without workers: one thread takes, handles and acknowledges."""

    def __init__(self) -> None:
        self._stopping = threading.Event()

    def start(self, handle: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._serve, args=(handle,))
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _serve(self, handle: Callable[[], None]) -> None:
        raise NotImplementedError


class LiteQueue(Looping):
    def __init__(self, folder: str) -> None:
        super().__init__()
        import litequeue

        self._open: Callable[[], Any] = lambda: litequeue.LiteQueue(f"{folder}/lite.db")
        self._queue = self._open()

    def put(self, message: Any) -> None:
        self._queue.put(json.dumps(message))

    def _serve(self, handle: Callable[[], None]) -> None:
        queue = self._open()
        while not self._stopping.is_set():
            message = queue.pop()
            if message is None:
                time.sleep(POLL_S)
                continue
            json.loads(message.data)
            handle()
            queue.done(message.message_id)


class PersistQueue(Looping):
    def __init__(self, folder: str) -> None:
        super().__init__()
        import persistqueue
        from persistqueue.serializers import json as as_json

        self._queue = persistqueue.SQLiteAckQueue(
            f"{folder}/persist", multithreading=True, auto_commit=True, serializer=as_json
        )

    def put(self, message: Any) -> None:
        self._queue.put(message)

    def stop(self) -> None:
        self._stopping.set()
        self._queue.put(None)
        self._thread.join()

    def _serve(self, handle: Callable[[], None]) -> None:
        while True:
            message = self._queue.get(block=True, raw=True)
            if message["data"] is None:
                return
            handle()
            self._queue.ack(id=message["pqid"])


class Huey:
    def __init__(self, folder: str) -> None:
        import logging

        from huey import SqliteHuey

        logging.getLogger("huey").setLevel(logging.ERROR)
        self._huey = SqliteHuey("bench", filename=f"{folder}/huey.db", results=False)
        self._handle: Callable[[], None] = lambda: None
        self._task = self._huey.task()(lambda message: self._handle())
        self._consumer: Any = None

    def put(self, message: Any) -> None:
        self._task(message)

    def start(self, handle: Callable[[], None]) -> None:
        self._handle = handle
        self._consumer = self._huey.create_consumer(workers=4, periodic=False)
        self._consumer.start()

    def stop(self) -> None:
        self._consumer.stop(graceful=True)


PEERS: dict[str, Callable[[str], Peer]] = {
    "huey": Huey,
    "litequeue": LiteQueue,
    "persist-queue": PersistQueue,
}


def drain(peer: Peer, n: int) -> float:
    """Return the seconds for n waiting messages."""
    for _ in range(n):
        peer.put(PAYLOAD)
    done = threading.Event()
    left = n
    lock = threading.Lock()

    def handle() -> None:
        nonlocal left
        with lock:
            left -= 1
            if not left:
                done.set()

    begun = time.perf_counter()
    peer.start(handle)
    done.wait()
    took = time.perf_counter() - begun
    peer.stop()
    return took


def latencies(peer: Peer, n: int) -> list[float]:
    """Return the seconds from each submission to the start of its handler, in an idle system."""
    started = threading.Event()
    at = 0.0

    def handle() -> None:
        nonlocal at
        at = time.perf_counter()
        started.set()

    peer.start(handle)
    chance = random.Random(1)
    found = []
    for _ in range(n):
        time.sleep(chance.uniform(0.01, 0.03))
        started.clear()
        begun = time.perf_counter()
        peer.put(PAYLOAD)
        started.wait()
        found.append(at - begun)
    peer.stop()
    return found


def main() -> None:
    name, what, n, parent = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        peer = PEERS[name](folder)
        if what == "drain":
            print(json.dumps([drain(peer, n)]))
        else:
            print(json.dumps(latencies(peer, n)))


if __name__ == "__main__":
    main()
