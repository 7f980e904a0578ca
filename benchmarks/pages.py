"""How long each page takes: `make bench-pages`.

A file with 100,000 customers and a million documents: most are completed, some are dead, 100,000
wait. Each page is requested repeatedly over HTTP. The benchmark fails if the median of a page is
over 300 ms. Then Chromium shows three pages while documents are processed and reports its long
tasks: those over 50 ms are perceptible.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
from playwright.sync_api import Browser

from fairturn import Queue, Submission
from fairturn.clock import SECOND_US
from fairturn.dashboard.routes import install
from fairturn.model import Completed, Failed, Outcome
from fairturn.service.app import make_app
from fairturn.service.server import ListenAddress, Server
from tests.browser import browser, chromium_path
from tests.http_server import TOKEN

BAR_MS = 300
BATCH = 10_000
CLAIM = 1_000
WAITING = 0.1  # share of the documents
LEASE_US = 3_600 * SECOND_US
LOOK_MS = 10_000.0
DUMPER = "customer 000000"


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        file = Path(folder) / "documents.db"
        with Queue(file, synchronous="NORMAL") as queue:
            _fill(queue, arguments.customers, arguments.documents)
        with Queue(file) as queue, _served(queue) as url, httpx.Client(base_url=url) as client:
            over = _ask_all(client, queue, arguments.asks)
            if chromium_path() is None:
                print("there is no Chromium: not looked at in a browser")
            else:
                with _worked_off(queue), browser() as chromium:
                    _look(chromium, url)
    sys.exit(bool(over))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--customers", type=int, default=100_000)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--asks", type=int, default=20, help="of each page")
    parser.add_argument("--folder", help="where the file is made")
    return parser.parse_args()


def _fill(queue: Queue, customers: int, documents: int) -> None:
    """Submit for every customer, a tenth of all documents for the first; then complete most of
    them."""
    random = Random(1)
    sent = 0
    while sent < documents:
        batch = []
        for _ in range(min(BATCH, documents - sent)):
            number = sent % customers if random.random() > 0.1 else 0
            batch.append(
                Submission(
                    customer=f"customer {number:06}", payload={"n": sent}, name=f"file-{sent}.pdf"
                )
            )
            sent += 1
        queue.submit_many(batch)
    outcomes: list[Outcome] = []
    left = round(documents * (1 - WAITING))
    while left > 0:
        claimed = queue.store.claim(
            min(CLAIM, left), worker="w", lease_us=LEASE_US, outcomes=outcomes
        ).claims
        if not claimed:
            break
        left -= len(claimed)
        outcomes = [
            Failed(claim.fence, "unreadable")
            if number % 100 == 7
            else Completed(claim.fence, json.dumps({"pages": 3}), real_cost=SECOND_US)
            for number, claim in enumerate(claimed)
        ]
    queue.store.finish(outcomes[8:])  # the others stay in flight


@contextmanager
def _served(queue: Queue) -> Iterator[str]:
    app = make_app(queue, token=TOKEN)
    install(app)
    server = Server(app, ListenAddress(port=0))
    thread = threading.Thread(target=server.run)
    thread.start()
    server.listening.wait(30)
    try:
        yield server.url
    finally:
        server.stop()
        thread.join()


def _ask_all(client: httpx.Client, queue: Queue, asks: int) -> list[str]:
    waiting = next(lane[0] for lane in queue.store.lanes(size=1).upcoming if lane).id
    newest = queue.list(size=1).documents[0].id
    pages = {
        "how priorities work": "/priorities",
        "now": "/",
        "a waiting document": f"/documents/{waiting}",
        "the newest document": f"/documents/{newest}",
        "search by part of a name": "/search?q=FILE-5.p",
        "customers by waiting": "/customers",
        "customers by share": "/customers?sort=share&page=40",
        "customers that match": "/customers?q=99",
        "a customer": f"/customer?name={DUMPER}",
        "documents": "/documents",
        "documents, few match": "/documents?state=dead&priority=3",
        "documents, none match": "/documents?name=nothing",
        "kinds of work": "/kinds",
        "lanes of one kind": "/?kind=default",
        "what if": "/what-if",
    }
    client.get("/login", params={"token": TOKEN})
    client.get("/customers")
    _wait_for_the_list(client)
    over = []
    for name, path in pages.items():
        times = []
        for _ in range(asks):
            begun = time.perf_counter()
            response = client.get(path, follow_redirects=True)
            times.append((time.perf_counter() - begun) * 1_000)
            assert response.status_code == 200, (path, response.status_code)
        times.sort()
        p50, longest = times[len(times) // 2], times[-1]
        print(f"{name:25} p50 {p50:6.0f} ms   longest {longest:6.0f} ms   (bar {BAR_MS} ms)")
        if p50 > BAR_MS:
            over.append(name)
    return over


@contextmanager
def _worked_off(queue: Queue) -> Iterator[None]:
    """Process 100 documents per second, so that every lane changes."""
    stopping = threading.Event()

    def work() -> None:
        outcomes: list[Outcome] = []
        queue.store.sign_on("w", 5)
        while not stopping.wait(0.05):
            claims = queue.store.claim(5, worker="w", lease_us=LEASE_US, outcomes=outcomes).claims
            outcomes = [Completed(claim.fence) for claim in claims]
        queue.store.finish(outcomes)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _look(chromium: Browser, url: str) -> None:
    for path in ("/", "/customers", "/documents"):
        page = chromium.new_page(base_url=url, viewport={"width": 1440, "height": 900})
        page.context.request.get(f"{url}/login?token={TOKEN}", max_redirects=0)
        page.goto(path)
        page.wait_for_timeout(1_000)  # exclude the first load
        page.evaluate(WATCH)
        page.wait_for_timeout(LOOK_MS)
        longest, frames = page.evaluate("[Math.max(0, ...window.busy), window.drawn]")
        per_s = frames / LOOK_MS * 1_000
        print(f"{path:24} {per_s:4.0f} frames/s, busy for {longest:.0f} ms at most, live")
        page.close()


WATCH = """() => {
  window.busy = [];
  window.drawn = 0;
  new PerformanceObserver((list) => {
    for (const each of list.getEntries()) window.busy.push(each.duration);
  }).observe({ entryTypes: ["longtask"] });
  const draw = () => { window.drawn += 1; requestAnimationFrame(draw); };
  requestAnimationFrame(draw);
}"""


def _wait_for_the_list(client: httpx.Client) -> None:
    """Wait until the list of customers, which is read in the background, is complete."""
    begun = time.perf_counter()
    while "while all are being read" in client.get("/customers").text:
        if time.perf_counter() - begun > 120:
            raise SystemExit("the list of customers was not made")
        time.sleep(0.1)
    print(f"the list of customers was made in {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
