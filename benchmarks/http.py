"""The service over HTTP: `make bench-http`.

One server process on a file with full durability, one client process with persistent connections.
The baseline is the same server with an empty POST, measured in turns with the rest.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from benchmarks.figures import Figure, report
from fairturn import Queue
from fairturn.access.registry import KeyRegistry

ROOT = Path(__file__).parent.parent
CONNECTIONS = 32
BODY = os.urandom(2_048)
CUSTOMERS = 100
LINES = 10_000
MEBIBYTE = 1_048_576


class Served:
    """A server on a new file, with an operator key."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "documents.db"
        with Queue(self.file) as queue:
            self.key = KeyRegistry(queue.store).make("operator").shown
            self.customers = [
                KeyRegistry(queue.store).make("customer", customer=f"customer-{n}").shown
                for n in range(CUSTOMERS)
            ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.http_server", str(self.file)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def memory_bytes(self) -> int:
        """Return the resident memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) * 1024

    def cpu_s(self) -> float:
        """Return the CPU time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="fairturn-bench-") as folder:
        server = Served(Path(folder))
        try:
            yield server
        finally:
            server.end()


# ── Requests, as cheap for the client as they can be ─────────────────────────────────────────────


def request(
    path: str, key: str, body: bytes = b"", kind: str = "application/octet-stream"
) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytes) -> int:
    """Send one request, read the response and return its status."""
    writer.write(asked)
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            await reader.readexactly(int(value))
    return int(head[9:12])


async def _load(url: str, requests: list[bytes], seconds: float, wanted: int) -> float:
    """Return requests per second over all connections."""
    where = urlsplit(url)
    until = time.perf_counter() + seconds
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        asked = number
        while time.perf_counter() < until:
            status = await _ask(reader, writer, requests[asked % len(requests)])
            assert status == wanted, status
            asked += CONNECTIONS
            done += 1
        writer.close()

    begun = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(CONNECTIONS)))
    return done / (time.perf_counter() - begun)


class Bench:
    """The four measurements."""

    def __init__(self, *, quick: bool) -> None:
        self._rounds = 3 if quick else 5
        self._seconds = 2.0 if quick else 5.0
        self._upload_bytes = 1024 * MEBIBYTE
        self._streams = 1_000
        self.figures: list[Figure] = []

    def submissions(self) -> None:
        """Measure durable submissions of 2 kB against an empty POST."""
        ours, empty = [], []
        with served() as server:
            empties = [request("/empty", server.key)]
            bodies = [request("/v1/documents", key, BODY) for key in server.customers]
            for _ in range(self._rounds):
                empty.append(asyncio.run(_load(server.url, empties, self._seconds, 204)))
                ours.append(asyncio.run(_load(server.url, bodies, self._seconds, 201)))
        our, yardstick = statistics.median(ours), statistics.median(empty)
        self.figures.append(
            Figure(
                name=f"submit 2 kB over {CONNECTIONS} connections, against an empty POST",
                value=our / yardstick,
                bar=0.4,
                ours=f"{our:,.0f}/s",
                theirs=f"{yardstick:,.0f}/s",
            )
        )

    def lines(self) -> None:
        """Measure documents per second by NDJSON, one batch after the other."""
        line = json.dumps({"payload": {"pages": 3, "name": "invoice"}}).encode() + b"\n"
        rates = []
        with served() as server, httpx.Client(base_url=server.url, timeout=120) as client:
            for key in server.customers[: 2 * self._rounds]:
                headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/x-ndjson"}
                begun = time.perf_counter()
                answer = client.post("/v1/documents/batch", content=line * LINES, headers=headers)
                assert answer.status_code == 201, answer.text
                rates.append(LINES / (time.perf_counter() - begun))
        rate = statistics.median(rates)
        self.figures.append(
            Figure(
                name=f"lines, {LINES:,} at once: documents a second",
                value=rate,
                bar=10_000,
                ours=f"{rate:,.0f}/s",
            )
        )

    def upload(self) -> None:
        """Measure the peak memory of the server during an upload of a gigabyte."""
        piece = os.urandom(MEBIBYTE)
        pieces = self._upload_bytes // MEBIBYTE
        expected = hashlib.sha256()
        for _ in range(pieces):
            expected.update(piece)
        highest = 0
        with served() as server:
            ended = threading.Event()

            def watch() -> None:
                nonlocal highest
                while not ended.wait(0.02):
                    highest = max(highest, server.memory_bytes())

            watching = threading.Thread(target=watch)
            watching.start()
            begun = time.perf_counter()
            answer = httpx.post(
                f"{server.url}/v1/documents",
                content=(piece for _ in range(pieces)),
                params={"sha256": expected.hexdigest()},
                headers={
                    "Authorization": f"Bearer {server.customers[0]}",
                    "Content-Length": str(self._upload_bytes),
                },
                timeout=600,
            )
            took = time.perf_counter() - begun
            ended.set()
            watching.join()
            assert answer.status_code == 201, answer.text
        self.figures.append(
            Figure(
                name="upload 1 GiB: memory of the server, MB",
                value=highest / 1e6,
                bar=100,
                at_most=True,
                ours=f"{highest / 1e6:.0f} MB",
                theirs=f"{self._upload_bytes / took / 1e6:,.0f} MB/s",
            )
        )

    def streams(self) -> None:
        """Measure 1,000 event streams at once: whether each receives a change, and their idle
        cost."""
        with served() as server:
            opened, heard_s, busy = asyncio.run(self._stream(server))
            memory = server.memory_bytes()
        self.figures.append(
            Figure(
                name="event streams that are open and hear of a change",
                value=opened,
                bar=self._streams,
                ours=f"{opened:,}",
                theirs=f"{memory / 1e6:.0f} MB",
            )
        )
        self.figures.append(
            Figure(
                name="the same: until the last one has heard, s",
                value=heard_s,
                bar=None,
                ours=f"{heard_s:.2f} s",
            )
        )
        self.figures.append(
            Figure(
                name="the same: of one core while nothing happens",
                value=busy,
                bar=None,
                ours=f"{100 * busy:.1f} %",
            )
        )

    async def _stream(self, server: Served) -> tuple[int, float, float]:
        where = urlsplit(server.url)
        connections = []
        for number in range(self._streams):
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            key = server.customers[number % CUSTOMERS]
            writer.write(
                f"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Authorization: Bearer {key}\r\n\r\n".encode()
            )
            connections.append((reader, writer))
        await asyncio.gather(*(_event(reader) for reader, _ in connections))
        await asyncio.sleep(2)
        before, began = server.cpu_s(), time.perf_counter()
        await asyncio.sleep(5)
        busy = (server.cpu_s() - before) / (time.perf_counter() - began)
        begun = time.perf_counter()
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for key in server.customers:
                headers = {"Authorization": f"Bearer {key}"}
                answer = await client.post("/v1/documents", content=b"x", headers=headers)
                assert answer.status_code == 201, answer.text
        heard = await asyncio.gather(*(_event(reader) for reader, _ in connections))
        took = time.perf_counter() - begun
        for _, writer in connections:
            writer.close()
        return sum(heard), took, busy


async def _event(reader: asyncio.StreamReader) -> bool:
    """Return whether an event arrives."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter and fewer rounds")
    parser.add_argument("--json", action="store_true", help="a JSON line for each row")
    parser.add_argument("--only", choices=("submissions", "lines", "upload", "streams"))
    arguments = parser.parse_args()
    bench = Bench(quick=arguments.quick)
    for name in ("submissions", "lines", "upload", "streams"):
        if arguments.only in (None, name):
            getattr(bench, name)()
    return report("The service over HTTP", bench.figures, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
