"""One queue in a contest: the same work for all queues, each in its own processes.

`python -m benchmarks.contest MODULE NAME URL VERB …` runs such a process. MODULE has a table
CONTESTANTS and imports only the standard library and the queue, so that it runs in an environment
without fairturn. Workers record their progress in a small shared file, the board, because querying
the database would add to the measured load. All processes of a machine share the monotonic clock.
"""

import asyncio
import importlib
import json
import logging
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

PAYLOAD = {  # 200 bytes as JSON
    "file": "invoices/2026/11/invoice-0017.pdf",
    "language": "de",
    "pages": 3,
    "kind": "invoice",
    "callback": "orders/18273645/received",
    "note": "scanned at the front desk, second copy, page two is upside down!!",
}
CUSTOMERS = 100
BATCH = 1_000  # documents per bulk submission
WORKERS_MAX = 2
WARM_UP = 20

Handle = Callable[[], None]


class Submitter(Protocol):
    """Submits documents over open connections."""

    async def one(self, customer: str) -> None: ...
    async def many(self, customers: list[str]) -> None: ...


class Contestant(Protocol):
    """A queue, used as its documentation recommends for throughput."""

    async def install(self) -> None:
        """Create the queue in an empty database."""
        ...

    def submitter(self) -> AbstractAsyncContextManager[Submitter]: ...

    async def work(self, handle: Handle, ready: Callable[[], None], *, idle: bool) -> None:
        """Connect, call `ready`, which blocks until the start, then work forever and call `handle`
        for each document. With `idle`, use the settings with the lowest latency."""
        ...


class Board:
    """The number of documents that each worker has started, and the time of the last start."""

    SIZE_BYTES = 16 * WORKERS_MAX

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), self.SIZE_BYTES)).cast("q")

    @staticmethod
    def make(path: Path) -> "Board":
        path.write_bytes(bytes(Board.SIZE_BYTES))
        return Board(path)

    def handler(self, place: int) -> Handle:
        """Return a thread-safe handler that only records its call."""
        cells, lock = self._cells, threading.Lock()

        def handle() -> None:
            with lock:
                cells[2 * place + 1] = time.monotonic_ns()
                cells[2 * place] += 1

        return handle

    @property
    def started(self) -> int:
        return sum(self._cells[0::2].tolist())

    @property
    def last_at_ns(self) -> int:
        return max(self._cells[1::2].tolist())


def customer(number: int) -> str:
    return f"customer-{number % CUSTOMERS}"


async def fill(contestant: Contestant, many: int) -> None:
    """Install the queue and submit `many` documents in bulk."""
    await contestant.install()
    async with contestant.submitter() as submitter:
        await submit_many(submitter, 0, many)


async def submit_many(submitter: Submitter, first: int, n: int) -> None:
    for begin in range(first, first + n, BATCH):
        end = min(begin + BATCH, first + n)
        await submitter.many([customer(i) for i in range(begin, end)])


async def submit_one_by_one(submitter: Submitter, first: int, n: int) -> None:
    for i in range(first, first + n):
        await submitter.one(customer(i))


async def take_turns(contestant: Contestant) -> None:
    """Install the queue, then submit for each line of input, `one FIRST N` or `many FIRST N`, and
    print the seconds of each turn."""
    ways = {"one": submit_one_by_one, "many": submit_many}
    await contestant.install()
    async with contestant.submitter() as submitter:
        await submit_one_by_one(submitter, 0, WARM_UP)
        print("ready", flush=True)
        # Between turns the event loop keeps running, as in an application.
        while line := await asyncio.to_thread(sys.stdin.readline):
            way, first, n = line.split()
            begun = time.perf_counter()
            await ways[way](submitter, int(first), int(n))
            print(time.perf_counter() - begun, flush=True)


async def look(contestant: Contestant, board: Board, looks: int) -> list[float]:
    """Return the seconds from each submission to the start of its handler in another process."""
    chance = random.Random(1)
    found = []
    async with contestant.submitter() as submitter:
        for n in range(WARM_UP + looks):
            await asyncio.sleep(chance.uniform(0.01, 0.03))
            before = board.started
            begun = time.monotonic_ns()
            await submitter.one(customer(n))
            while board.started == before:
                await asyncio.sleep(0.000_5)  # the handler records the time
            found.append((board.last_at_ns - begun) / 1e9)
    return found[WARM_UP:]


def wait_for_start() -> None:
    """Report readiness, wait for the start, and exit when the parent exits."""
    print("ready", flush=True)
    sys.stdin.readline()
    threading.Thread(target=_end_with_the_input, daemon=True).start()


def _end_with_the_input() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """MODULE NAME URL fill MANY | submit | work BOARD PLACE | idle BOARD PLACE | look BOARD LOOKS.

    Prints JSON, or the readiness line."""
    module, name, url, verb, *arguments = sys.argv[1:]
    logging.disable(logging.WARNING)  # peers log every document
    contestant: Contestant = importlib.import_module(module).CONTESTANTS[name](url)
    if verb == "fill":
        run(fill(contestant, int(arguments[0])))
        return
    if verb == "submit":
        run(take_turns(contestant))
        return
    board, number = Board(Path(arguments[0])), int(arguments[1])
    if verb == "look":
        print(json.dumps(run(look(contestant, board, number))))
    else:
        handle = board.handler(number)
        run(contestant.work(handle, wait_for_start, idle=verb == "idle"))


def run(work: Any) -> Any:
    """Run on uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


class Calls:
    """A submitter with blocking calls."""

    def __init__(self, one: Callable[[str], object], many: Callable[[list[str]], object]) -> None:
        self._one, self._many = one, many

    async def one(self, customer: str) -> None:
        self._one(customer)

    async def many(self, customers: list[str]) -> None:
        self._many(customers)


@asynccontextmanager
async def calls(
    one: Callable[[str], object],
    many: Callable[[list[str]], object],
    close: Callable[[], object],
) -> AsyncIterator[Submitter]:
    try:
        yield Calls(one, many)
    finally:
        close()


if __name__ == "__main__":
    main()
