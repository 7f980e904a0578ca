"""The screenshots in docs/page/ (`make screenshots`).

They show half an hour of a queue on a simulated clock: nine customers, four workers, and an upload
of 2,000 documents.
"""

import heapq
import json
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI
from playwright.sync_api import Browser, BrowserContext

from fairturn import Queue, Submission
from fairturn.access.registry import KeyRegistry
from fairturn.clock import SECOND_US, ManualClock, SystemClock
from fairturn.model import (
    Advanced,
    Completed,
    Failed,
    Fence,
    Filter,
    Outcome,
    Progress,
    State,
)
from tests.browser import browser, page_app, page_served
from tests.commands import hold
from tests.http_server import TOKEN, served_app

FOLDER = Path(__file__).parent.parent / "docs" / "page"
MINUTES = 28
DUMP_AT_MINUTE = 18
WORKERS = 4
LEASE_US = 3_600 * SECOND_US
DEMO_MS = 28_000.0
HEIGHTS = {"documents": 1_000, "search": 640}  # of long lists, only the top
PHONE = {"width": 360, "height": 740}
DUMPER, SECOND = "Acme Logistics", "Elmira Foods"
# Approximate seconds between two documents.
QUIET = {
    SECOND: 9, "Czarny Las": 14, "Brauer GmbH": 21, "Frota Sul": 17, "Holm & Sons": 24,
    "Oak & Partners": 30, "Iglesias e Hijos": 26,
}  # fmt: skip
FILES = ("rechnung-{}.pdf", "po-{}.pdf", "scan-{}.pdf", "faktura-{}.xml", "invoice-{}.pdf")


class History:
    """Runs a queue for half an hour."""

    def __init__(self, queue: Queue, clock: ManualClock, app: FastAPI) -> None:
        self.queue, self.clock, self.app = queue, clock, app
        self.random = Random(4)
        self.busy: list[tuple[int, Fence, float]] = []
        self.ends = SystemClock().now()

    def live(self) -> None:
        self.clock.set(self.ends - MINUTES * 60 * SECOND_US)
        due = {name: self.random.uniform(0, every) for name, every in QUIET.items()}
        for second in range(MINUTES * 60):
            if second == DUMP_AT_MINUTE * 60:
                for begin in range(0, 2_000, 500):
                    names = (f"scan-{n:04}.pdf" for n in range(begin, begin + 500))
                    self.queue.submit_many([self.submission(DUMPER, name) for name in names])
            for name, every in QUIET.items():
                if second >= due[name]:
                    due[name] = second + self.random.uniform(0.5, 1.5) * every
                    self.queue.submit_many([self.submission(name)])
            self.work()
            if second % 5 == 0:
                self.app.state.page.trail.sample()
            self.clock.advance(1)
        self.end()

    def submission(self, customer: str, name: str | None = None) -> Submission:
        file = self.random.choice(FILES).format(self.random.randint(100, 9_999))
        return Submission(
            customer=customer,
            payload={"pages": 3},
            name=name or file,
            metadata={"source": "mail", "pages": self.random.randint(1, 9)},
        )

    def work(self) -> None:
        now, outcomes = self.clock.now(), list[Outcome]()
        while self.busy and self.busy[0][0] <= now:
            _, fence, took_s = heapq.heappop(self.busy)
            if self.random.random() < 0.01:
                outcomes.append(Failed(fence, "the third page cannot be read"))
            else:
                result = json.dumps({"total": "1,204.50 EUR", "supplier": "Brauer GmbH"})
                outcomes.append(Completed(fence, result, real_cost=round(took_s * SECOND_US)))
        self.queue.store.sign_on("worker-1", WORKERS)
        free = WORKERS - len(self.busy)
        claimed = self.queue.store.claim(
            free, worker="worker-1", lease_us=LEASE_US, outcomes=outcomes
        )
        for claim in claimed.claims:
            took_s = self.random.uniform(1.2, 2.8)
            ends_at = now + round(took_s * SECOND_US)
            heapq.heappush(self.busy, (ends_at, claim.fence, took_s))

    def end(self) -> None:
        """Leave new documents in every lane, and documents in flight."""
        for name, n in (("Gebrüder Winter", 3), ("Dupont SA", 7), ("Nordwind AG", 12)):
            self.queue.submit_many([self.submission(name) for _ in range(n)])
        self.clock.advance(1)
        self.queue.submit_many([self.submission("Pine Software") for _ in range(17)])
        self.queue.submit_many([self.submission(SECOND) for _ in range(9)])
        for share, (_, fence, _) in zip((0.72, 0.35, 0.88, 0.1), self.busy, strict=False):
            done = Progress(round(share * 100), 100)
            self.queue.store.renew([fence], lease_us=LEASE_US, progress={fence: done})
        self.app.state.page.trail.sample()


def take(context: BrowserContext, name: str, path: str, height: int | None = None) -> None:
    """Take one screenshot after everything has been drawn."""
    page = context.new_page()
    page.emulate_media(reduced_motion="reduce")
    page.goto(path)
    page.wait_for_load_state("load")
    if height is not None and page.viewport_size is not None:
        page.set_viewport_size({"width": page.viewport_size["width"], "height": height})
    page.screenshot(path=FOLDER / f"{name}.png", full_page=height is None)
    page.close()


def opened(found: Browser, url: str, *, language: str = "en", **more: Any) -> BrowserContext:
    more.setdefault("viewport", {"width": 1440, "height": 900})
    context = found.new_context(base_url=url, timezone_id="UTC", **more)
    context.add_cookies([{"name": "fairturn_language", "value": language, "url": url}])
    context.request.get(f"/login?token={TOKEN}", max_redirects=0)
    return context


def main() -> None:
    """Take all screenshots; with an argument, into another folder and in more variants."""
    global FOLDER  # noqa: PLW0603  # the one thing that a developer chooses
    everything = len(sys.argv) > 1
    FOLDER = Path(sys.argv[1]) if everything else FOLDER
    FOLDER.mkdir(parents=True, exist_ok=True)
    clock = ManualClock()
    with (
        tempfile.TemporaryDirectory() as folder,
        Queue(Path(folder) / "queue.db", clock=clock, synchronous="NORMAL") as queue,
        browser() as found,
    ):
        app = page_app(queue, clock)
        History(queue, clock, app).live()
        with served_app(app) as url:
            pictures(found, url, queue, everything=everything)
        with Queue(":memory:") as empty, page_served(empty) as url:
            first_steps(found, url, everything=everything)
        with Queue(":memory:") as several, page_served(several) as url:
            kinds_of_work(found, url, several, everything=everything)
        with Queue(":memory:", kinds="open") as held, page_served(held) as url:
            outage(found, url, held, everything=everything)


def pictures(found: Browser, url: str, queue: Queue, *, everything: bool) -> None:
    waiting = queue.store.lanes(size=30).upcoming[8][11].id
    done = next(iter(queue.iterate(customer=DUMPER, states=State.COMPLETED))).id
    dead = queue.store.find(Filter(states=(State.DEAD,)), size=1).documents[0].id
    pages = {
        "now": "/",
        "priorities": "/priorities",
        "document": f"/documents/{waiting}",
        "customers": "/customers",
        "customer": f"/customer?name={quote(SECOND)}",
        "documents": "/documents",
        "search": "/search?q=scan-04",
        "what-if": "/what-if",
    }
    light = opened(found, url)
    run = light.request.post(
        "/what-if",
        form={"mode": "fifo", "workers": "4", "reset": "idle", "reset_interval_s": "1500"},
        headers={"Sec-Fetch-Site": "same-origin"},
    )
    pages["what-if"] = run.url.removeprefix(url)
    waiting_for_run = light.new_page()
    waiting_for_run.goto(pages["what-if"])
    waiting_for_run.locator("#outcome table").wait_for(timeout=60_000)
    for name, path in pages.items():
        take(light, name, path, height=HEIGHTS.get(name))
    dark = opened(found, url, color_scheme="dark")
    take(dark, "now-dark", "/")
    take(opened(found, url, viewport=PHONE, device_scale_factor=2), "now-phone", "/", height=1_400)
    if everything:
        pages.update(completed=f"/documents/{done}", dead=f"/documents/{dead}")
        for name, path in pages.items():
            take(dark, f"{name}-dark", path)
            take(opened(found, url, language="de"), f"{name}-de", path)
            take(opened(found, url, language="pl"), f"{name}-pl", path)
            take(opened(found, url, viewport=PHONE, language="de"), f"{name}-phone", path)
    own = KeyRegistry(queue.store).make("customer", customer=SECOND).shown
    theirs = opened(found, url)
    entered = theirs.request.post(
        "/login", form={"key": own}, headers={"Sec-Fetch-Site": "same-origin"}
    )
    assert entered.ok
    take(theirs, "own", "/mine", height=1_000)
    if everything:
        own_phone = opened(
            found, url, viewport=PHONE, language="de", storage_state=theirs.storage_state()
        )
        take(own_phone, "own-phone", "/mine")


def kinds_of_work(found: Browser, url: str, queue: Queue, *, everything: bool) -> None:
    """Show a queue with kinds of work: one limited, one paused, one that no worker serves."""
    random = Random(4)
    queue.set_kind("ocr", limit=2, attempts_max=3)
    queue.set_kind("export", paused=True)
    for kind in ("text", "classify"):
        queue.set_kind(kind)
    kinds = ("text", "text", "ocr", "classify", "export")
    for number in range(260):
        name = f"scan-{number:04}.pdf"
        queue.submit(random.choice([DUMPER, *QUIET]), name=name, kind=random.choice(kinds))
    for worker, slots, served in (("gpu-1", 2, ["ocr"]), ("cpu-1", 4, ["text", "export"])):
        queue.sign_on(worker, slots, served)
        queue.claim(slots, worker=worker, lease_s=3_600, kinds=served)
    light = opened(found, url)
    take(light, "kinds", "/kinds", height=720)
    if everything:
        take(light, "lanes-of-a-kind", "/?kind=ocr")
        take(opened(found, url, color_scheme="dark", language="es"), "kinds-dark", "/kinds")
        for name, path in {"kinds": "/kinds", "lanes-of-a-kind": "/?kind=text"}.items():
            take(opened(found, url, viewport=PHONE, language="pl"), f"{name}-phone", path)


def outage(found: Browser, url: str, queue: Queue, *, everything: bool) -> None:
    """Show a held service, and a document with attempts and steps."""
    id = queue.submit(DUMPER, name="scan-0412.pdf", kind="text").id
    queue.sign_on("cpu-1", 1, ["text"])
    trace = 'Traceback (most recent call last):\n  File "pipeline.py", line 12, in text\nOSError'
    for outcome in (
        lambda fence: Failed(fence, "OSError: the file is locked", 0, trace),
        lambda fence: Advanced(fence, "ocr", "[1,2]"),
    ):
        (claim,) = queue.claim(1, worker="cpu-1", lease_s=30, kinds=["text"]).claims
        queue.finish([outcome(claim.fence)])
    hold(queue)
    light = opened(found, url)
    take(light, "outage", "/", height=520)
    take(light, "attempts", f"/documents/{id}", height=760)
    if everything:
        for name, path in {"outage": "/", "attempts": f"/documents/{id}"}.items():
            dark = opened(found, url, color_scheme="dark", language="de")
            take(dark, f"{name}-dark", path)
            take(opened(found, url, viewport=PHONE, language="pl"), f"{name}-phone", path)


def first_steps(found: Browser, url: str, *, everything: bool) -> None:
    """Show an empty queue, and the demo after half a minute."""
    light = opened(found, url)
    take(light, "first-steps", "/", height=480)
    page = light.new_page()
    page.goto("/")
    page.get_by_role("button", name="Load the demo").click()
    page.wait_for_timeout(DEMO_MS)
    take(light, "demo", "/demo", height=900)
    if everything:
        take(opened(found, url, color_scheme="dark", language="de"), "demo-dark", "/demo")
        take(opened(found, url, viewport=PHONE, language="de"), "demo-phone", "/demo")
        take(light, "login", "/login", height=600)
        take(light, "nowhere", "/nowhere", height=600)
    page.get_by_role("button", name="Remove the demo").click()
    if everything:
        take(opened(found, url, viewport=PHONE, language="pl"), "first-steps-phone", "/")


if __name__ == "__main__":
    main()
