"""The latency of a victim beside an attacker, over real connections on 127.0.0.1.

The service runs in a process of its own, so that the load of clients does not slow it down by the
GIL. A victim sends the same request again and again over one connection; an attacker, a process
too, does what one access key, or no key at all, can do. Both end after a given time.
"""

import asyncio
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fairturn.clock import stopwatch

ROOT = Path(__file__).parent.parent
VICTIM_S = 6.0
FACTOR_MAX = 10.0
# Below this a latency is a matter of the scheduler of the machine, and not of the service.
FLOOR_S = 0.005

Attack = Callable[["Target", asyncio.Event], Coroutine[Any, Any, None]]


class Target:
    """Where the service is, and the keys of its two customers."""

    def __init__(self, url: str, pid: int, attacker: str, victim: str) -> None:
        where = urlsplit(url)
        self.host, self.port = where.hostname or "", where.port or 0
        self.pid, self.attacker, self.victim = pid, attacker, victim
        self.source = "127.0.0.1"  # of connections; the attacker has another one

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port, local_addr=(self.source, 0))

    def memory_bytes(self) -> int:
        """Return the peak of the resident memory of the service."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1_024


def request(
    method: str, path: str, key: str | None = None, *lines: str, body: bytes = b""
) -> bytes:
    head = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *lines]
    if key is not None:
        head.append(f"Authorization: Bearer {key}")
    if body:
        head.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the status and the body of the next response."""
    head = await reader.readuntil(b"\r\n\r\n")
    size_bytes = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            size_bytes = int(value)
    return int(head[9:12]), await reader.readexactly(size_bytes)


async def repeat(target: Target, ended: asyncio.Event, asked: bytes, connections: int = 8) -> None:
    """Send a request again and again over several connections, whatever is answered."""

    async def one() -> None:
        while not ended.is_set():
            with suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await target.connect()
                try:
                    while not ended.is_set():
                        writer.write(asked)
                        async with asyncio.timeout(30):
                            await answer(reader)
                finally:
                    writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))


async def _victim(target: Target, asked: bytes, seconds: float) -> list[float]:
    latencies_s = []
    until = stopwatch() + seconds
    reader, writer = await target.connect()
    while stopwatch() < until:
        begun = stopwatch()
        writer.write(asked)
        async with asyncio.timeout(60):
            status, _ = await answer(reader)
        assert status < 300, f"the victim was answered with {status}"
        latencies_s.append(stopwatch() - begun)
    writer.close()
    return latencies_s


def p99(latencies_s: list[float]) -> float:
    return sorted(latencies_s)[math.ceil(len(latencies_s) * 0.99) - 1]


def victim_beside(target: Target, attack: Attack, asked: bytes) -> tuple[float, float]:
    """Return the 99th percentile of the victim's latency, undisturbed and beside the attack."""
    undisturbed = p99(asyncio.run(_victim(target, asked, VICTIM_S)))
    spawning = multiprocessing.get_context("spawn")
    ended = spawning.Event()
    begun = spawning.Event()
    attacker = spawning.Process(target=_attack, args=(target, attack, begun, ended), daemon=True)
    attacker.start()
    try:
        assert begun.wait(60), "the attacker does not begin"
        beside = p99(asyncio.run(_victim(target, asked, VICTIM_S)))
    finally:
        ended.set()
        attacker.join(30)
        attacker.kill()
        attacker.join()
    return undisturbed, beside


def _attack(target: Target, attack: Attack, begun: Event, ended: Event) -> None:
    """Attack until `ended`, in a process with a low priority: an attacker would not use the
    processors of the service."""
    os.nice(15)
    target.source = "127.0.0.2"

    async def attacking() -> None:
        stop = asyncio.Event()
        work = asyncio.create_task(attack(target, stop))
        begun.set()
        await asyncio.to_thread(ended.wait, 60)
        stop.set()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(attacking())


@contextmanager
def service_process(database: str, contents: str) -> Iterator[tuple[str, int]]:
    """Run the service in a process; yield its URL and process id."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.load_server", database, contents],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()
