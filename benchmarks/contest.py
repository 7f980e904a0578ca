"""One queue in a contest: the same work for all of them, each in processes of its own.

`python -m benchmarks.contest MODULE NAME URL VERB …` is the program of such a process. MODULE has a
table CONTESTANTS and needs nothing but the standard library and what it measures, so that it runs
in an environment without fairturn. What workers have done stands on a board, a small file that all
processes see: to ask the database would cost what is measured. All processes of a machine share the
monotonic clock.
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
BATCH = 1_000  # documents of one call that submits in bulk
WORKERS_MAX = 2
WARM_UP = 20

Handle = Callable[[], None]


class Submitter(Protocol):
    """What submits, with its connections open."""

    async def one(self, customer: str) -> None: ...
    async def many(self, customers: list[str]) -> None: ...


class Contestant(Protocol):
    """A queue, used as its documentation says for throughput."""

    async def install(self) -> None:
        """Make what it needs in an empty database."""
        ...

    def submitter(self) -> AbstractAsyncContextManager[Submitter]: ...

    async def work(self, handle: Handle, ready: Callable[[], None], *, idle: bool) -> None:
        """Open what a worker needs, say ready, which waits for the start, and then work for ever,
        calling `handle` for each document. `idle` asks for what starts a document soonest."""
        ...


class Board:
    """How many documents each worker has started, and when the last one."""

    SIZE_BYTES = 16 * WORKERS_MAX

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._cells = memoryview(mmap.mmap(file.fileno(), self.SIZE_BYTES)).cast("q")

    @staticmethod
    def make(path: Path) -> "Board":
        path.write_bytes(bytes(Board.SIZE_BYTES))
        return Board(path)

    def handler(self, place: int) -> Handle:
        """A handler that does nothing but note that it was called, from any thread."""
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
    """Install, and submit so many in bulk."""
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
    """Install, and submit when it is asked to: `one FIRST N` or `many FIRST N`, a line for each
    turn. What it prints is the seconds that a turn took."""
    ways = {"one": submit_one_by_one, "many": submit_many}
    await contestant.install()
    async with contestant.submitter() as submitter:
        await submit_one_by_one(submitter, 0, WARM_UP)
        print("ready", flush=True)
        # Between its turns its loop goes on, as it would in an application.
        while line := await asyncio.to_thread(sys.stdin.readline):
            way, first, n = line.split()
            begun = time.perf_counter()
            await ways[way](submitter, int(first), int(n))
            print(time.perf_counter() - begun, flush=True)


async def look(contestant: Contestant, board: Board, looks: int) -> list[float]:
    """From the call that submits to the start of the handler in another process, in seconds."""
    chance = random.Random(1)
    found = []
    async with contestant.submitter() as submitter:
        for n in range(WARM_UP + looks):
            await asyncio.sleep(chance.uniform(0.01, 0.03))
            before = board.started
            begun = time.monotonic_ns()
            await submitter.one(customer(n))
            while board.started == before:
                await asyncio.sleep(0.000_5)  # it is the handler that reads the clock
            found.append((board.last_at_ns - begun) / 1e9)
    return found[WARM_UP:]


def wait_for_start() -> None:
    """Say that everything is ready, wait for the start, and end when whoever asked is gone."""
    print("ready", flush=True)
    sys.stdin.readline()
    threading.Thread(target=_end_with_the_input, daemon=True).start()


def _end_with_the_input() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """MODULE NAME URL fill MANY | submit | work BOARD PLACE | idle BOARD PLACE | look BOARD LOOKS.

    What it prints is JSON, or the word that it is ready."""
    module, name, url, verb, *arguments = sys.argv[1:]
    logging.disable(logging.WARNING)  # of the peers, which tell of each document
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
    """Run it on the fastest loop there is: uvloop, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


class Calls:
    """A submitter whose calls wait instead of being awaited."""

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
