"""One attacker does not take the service from a victim: each attack that once did, on both stores.

The 99th percentile of the victim's latency stays below ten times its undisturbed value. The limits
that achieve it are tested as counts in `test_service_limits.py`.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from fairturn import Queue, Submission
from fairturn.contents.local import Folder
from tests.http_server import key_for
from tests.load import (
    FACTOR_MAX,
    FLOOR_S,
    Attack,
    Target,
    answer,
    repeat,
    request,
    service_process,
    victim_beside,
)
from tests.servers.queues import Databases

CONTENT_BYTES = 64 * 1_048_576
POLLS = 800  # below the connections of one address
DOCUMENTS = 60_000

pytestmark = pytest.mark.long


@pytest.fixture(params=["file", "postgres"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    with ExitStack() as stack:
        if request.param == "file":
            place = str(tmp_path / "documents.db")
        else:
            place = stack.enter_context(Databases()).new()
        folder = tmp_path / "contents"
        with Queue(place, contents=Folder(folder)) as queue:
            queue.configure(waiting_per_customer_max=100_000)
            for n in range(3):
                queue.submit("attacker", content=bytes([n]) * CONTENT_BYTES, name=f"large-{n}")
            for first in range(0, DOCUMENTS, 10_000):
                queue.submit_many(
                    Submission(customer="attacker", payload=n, name=f"letter-{n}")
                    for n in range(first, first + 10_000)
                )
            queue.submit("victim", payload=1)
            keys = key_for(queue, "attacker"), key_for(queue, "victim")
        url, pid = stack.enter_context(service_process(place, str(folder)))
        yield Target(url, pid, *keys)


async def large_cookies(target: Target, ended: asyncio.Event) -> None:
    """Send quoted cookies, which take seconds to parse: whole heads, and those below the limit."""
    cookies = ['Cookie: a="' + "\\" * size + '"' for size in (62_000, 15_000)]
    await asyncio.gather(
        *(repeat(target, ended, request("GET", "/login", None, each), 4) for each in cookies)
    )


async def hung_up_polls(target: Target, ended: asyncio.Event) -> None:
    """Begin long polls and hang up, again and again."""
    ids = await _ids(target)
    paths = [f"/v1/documents/{ids[0]}?wait_s=60", "/v1/room?wait_s=60&n=50000"]
    while not ended.is_set():
        writers = []
        for n in range(POLLS):
            if ended.is_set():
                break
            with suppress(OSError):
                _, writer = await target.connect()
                writer.write(request("GET", paths[n % 2], target.attacker))
                writers.append(writer)
        for writer in writers:
            writer.close()


async def downloads(target: Target, ended: asyncio.Event) -> None:
    """Begin downloads of large contents and hang up at once."""
    ids = await _ids(target, "large")
    while not ended.is_set():
        for id in ids * 8:
            with suppress(OSError):
                _, writer = await target.connect()
                writer.write(request("GET", f"/v1/documents/{id}/content", target.attacker))
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 0.005)
                writer.close()


async def expensive_lines(target: Target, ended: asyncio.Event) -> None:
    """Submit batches of 32 MiB whose values would take twenty times that in memory."""
    line = b'{"payload":[' + b"[]," * 5_000_000 + b"1]}"
    body = line + b"\n" + line
    kind = "Content-Type: application/x-ndjson"
    asked = request("POST", "/v1/documents/batch", target.attacker, kind, body=body)
    await repeat(target, ended, asked, 4)


async def anonymous_pages(target: Target, ended: asyncio.Event) -> None:
    """Request what needs no key and takes long to make, and guess keys."""
    paths = ("/openapi.json", "/priorities?documents=10000&apart_s=0.5", "/docs", "/v1/rule")
    await asyncio.gather(
        *(repeat(target, ended, request("GET", path), 2) for path in paths),
        repeat(target, ended, request("GET", "/v1/me", f"ft_{'0' * 12}_{'0' * 64}"), 2),
    )


async def slow_reads(target: Target, ended: asyncio.Event) -> None:
    """Scan all names, without a result, over many connections."""
    asked = request("GET", "/v1/documents?name_part=nothing", target.attacker)
    await repeat(target, ended, asked, 100)


async def idle_connections(target: Target, ended: asyncio.Event) -> None:
    """Open as many connections as possible and send nothing."""
    writers: list[asyncio.StreamWriter] = []
    with suppress(OSError):
        while not ended.is_set() and len(writers) < 5_500:
            writers.append((await target.connect())[1])
    await ended.wait()
    for writer in writers:
        writer.close()


async def _ids(target: Target, name_part: str | None = None) -> list[str]:
    query = "size=3" if name_part is None else f"size=3&name_part={name_part}"
    reader, writer = await target.connect()
    after = ""
    while True:
        writer.write(request("GET", f"/v1/documents?{query}{after}", target.attacker))
        _, body = await answer(reader)
        page = json.loads(body)
        if page["documents"] or page["next"] is None:
            writer.close()
            return [document["id"] for document in page["documents"]]
        after = f"&after={page['next']}"


@pytest.mark.parametrize(
    "attack",
    [
        large_cookies,
        hung_up_polls,
        downloads,
        expensive_lines,
        anonymous_pages,
        slow_reads,
        idle_connections,
    ],
)
def test_a_victim_is_answered_beside_an_attacker(target: Target, attack: Attack) -> None:
    asked = request("GET", "/v1/me", target.victim)

    undisturbed_s, beside_s = victim_beside(target, attack, asked)

    figures = f"{1_000 * undisturbed_s:.1f} ms undisturbed, {1_000 * beside_s:.1f} ms beside it"
    figures += f", {target.memory_bytes() / 1e6:.0f} MB"
    sys.stdout.write(f"{figures}\n")
    assert beside_s <= FACTOR_MAX * max(undisturbed_s, FLOOR_S), figures
    assert target.memory_bytes() < 500_000_000
