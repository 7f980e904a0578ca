"""The page in a real Chromium: every page and action, in every language, for every reader."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, BrowserContext, JSHandle, Page, Route, expect

from fairturn import ClaimedDocument, Queue, Submission, Worker
from fairturn.access.registry import KeyRegistry
from fairturn.dashboard.visitors import LANGUAGE_COOKIE
from fairturn.i18n import languages
from fairturn.model import Completed, KindSettings, Progress, State
from tests.browser import PSEUDO, browser, page_app, page_served, texts_of, watched
from tests.http_server import TOKEN, key_for, served_app
from tests.page_contents import HOSTILE, LEASE_US, fill
from tests.wait import wait_until

WAIT_MS = 10_000
NARROW = {"width": 360, "height": 740}
WIDE = {"width": 1280, "height": 900}


class Shown(NamedTuple):
    """A service with content."""

    queue: Queue
    url: str
    ids: dict[str, str]

    def pages(self) -> dict[str, str]:
        """Return every page by name."""
        hostile = quote(HOSTILE[0], safe="")
        return {
            "rules": "/priorities?documents=40&apart_s=3",
            "now": "/",
            "lanes_of_one_kind": "/?kind=ocr",
            "kinds": "/kinds",
            "waiting": f"/documents/{self.ids['waiting']}",
            "dead": f"/documents/{self.ids['dead']}",
            "search": f"/search?q={hostile}",
            "customers": "/customers?sort=name",
            "customer": f"/customer?name={hostile}",
            "documents": "/documents",
            "bulk": f"/documents-bulk?action=cancel&customer={hostile}",
            "what_if": "/what-if",
            "login": "/login",
            "problem": "/documents/000000000000000",
        }

    def more_pages(self) -> dict[str, str]:
        """Return pages of documents in other states."""
        return {name: f"/documents/{self.ids[name]}" for name in ("running", "completed")}


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    with Queue(":memory:") as queue:
        ids = fill(queue)
        with page_served(queue) as url:
            yield Shown(queue, url, ids)


class Mine(NamedTuple):
    """A service in which a customer has logged in."""

    url: str
    cookies: list[Any]


@pytest.fixture(scope="module")
def mine(chromium: Browser) -> Iterator[Mine]:
    with Queue(":memory:") as queue:
        fill(queue)
        with page_served(queue) as url, looking(chromium, url) as page:
            log_in(page, key_for(queue, HOSTILE[0]))
            kept = ("name", "value", "domain", "path")
            cookies = [
                {key: cookie[key] for key in kept}  # type: ignore[literal-required]
                for cookie in page.context.cookies()
                if cookie["name"].startswith("fairturn_session")
            ]
            yield Mine(url, cookies)


@pytest.fixture
def queue() -> Iterator[Queue]:
    """An empty queue, for tests that change it."""
    with Queue(":memory:") as found:
        yield found


@pytest.fixture
def address(queue: Queue) -> Iterator[str]:
    with page_served(queue) as url:
        yield url


def context_of(chromium: Browser, url: str, language: str = "en", **more: Any) -> BrowserContext:
    more.setdefault("viewport", WIDE)
    context = chromium.new_context(base_url=url, locale="en-GB", **more)
    context.set_default_timeout(WAIT_MS)
    choose(context, url, language)
    # As the URL that the command prints; without effect once there are keys.
    context.request.get(f"/login?token={TOKEN}", max_redirects=0)
    return context


def choose(context: BrowserContext, url: str, language: str) -> None:
    """Set the language, as the menu does."""
    context.add_cookies([{"name": LANGUAGE_COOKIE, "value": language, "url": url}])


@pytest.fixture
def page(chromium: Browser, address: str) -> Iterator[Page]:
    context = context_of(chromium, address)
    found = context.new_page()
    wrong = watched(found)
    yield found
    context.close()
    assert wrong == []


@contextmanager
def looking(
    chromium: Browser,
    url: str,
    language: str = "en",
    *,
    cookies: list[Any] | None = None,
    **more: Any,
) -> Iterator[Page]:
    """Open a page in a new browser context."""
    context = context_of(chromium, url, language, **more)
    context.add_cookies(cookies or [])
    try:
        yield context.new_page()
    finally:
        context.close()


def goto(page: Page, path: str) -> int:
    """Open a page and return the status; later changes by scripts are awaited by name."""
    response = page.goto(path, wait_until="domcontentloaded")
    assert response is not None
    return response.status


def untranslated(page: Page) -> list[str]:
    """Return texts that the pseudo-language did not touch."""
    return [
        text
        for text in texts_of(page)
        if "⟦" not in text and "⟧" not in text and re.search(r"[^\W\d_]{2}", text)
    ]


def _submission(customer: str) -> Submission:
    return Submission(customer=customer, payload=1)


def log_in(page: Page, key: str) -> None:
    page.goto("/login")
    page.get_by_role("textbox", name="Access key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(lambda url: "/login" not in url)


# ── Every page ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("language", languages())
def test_every_page_is_there_in_every_language_and_complains_of_nothing(
    chromium: Browser, shown: Shown, language: str
) -> None:
    # The longest language on the narrowest screen.
    viewport = NARROW if language == "de" else WIDE
    with looking(chromium, shown.url, language, viewport=viewport) as page:
        wrong = watched(page)
        for name, path in shown.pages().items():
            wrong.clear()
            status = goto(page, path)
            assert status == (404 if name == "problem" else 200), (name, status)
            assert page.locator("html").get_attribute("lang") == language
            assert page.locator("h1").count() == 1, name
            assert_nothing_is_wider_than_the_screen(page, name)
            if name != "problem":  # the browser itself reports a 404
                assert wrong == [], name


def test_the_first_steps_and_the_own_view_are_there_in_every_language_and_on_a_phone(
    chromium: Browser, address: str, mine: Mine
) -> None:
    for url, cookies in ((address, []), (mine.url, mine.cookies)):
        with looking(chromium, url, viewport=NARROW, cookies=cookies) as page:
            wrong = watched(page)
            for language in (*languages(), PSEUDO):
                choose(page.context, url, language)
                goto(page, "/")
                assert page.locator("html").get_attribute("lang") == language
                assert_nothing_is_wider_than_the_screen(page, url)
            assert (untranslated(page), wrong) == ([], [])


def test_no_text_is_left_untranslated(chromium: Browser, shown: Shown) -> None:
    with looking(chromium, shown.url, PSEUDO, java_script_enabled=False) as page:
        for name, path in {**shown.pages(), **shown.more_pages()}.items():
            goto(page, path)
            assert untranslated(page) == [], name


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    chromium: Browser, shown: Shown, mine: Mine, scheme: Any
) -> None:
    # Long lists repeat the same row, so only short lists are examined.
    pages = {**shown.pages(), "documents": "/documents?state=dead", "customers": "/customers?q=me"}
    # The dark theme differs only in colours; these pages have all of them.
    coloured = ("rules", "now", "dead", "customers")
    rules = None if scheme == "light" else ["color-contrast"]
    with examining(chromium, shown.url, color_scheme=scheme) as page:
        for name in pages if scheme == "light" else coloured:
            goto(page, pages[name])
            assert serious(page, rules) == [], name
    with examining(chromium, mine.url, color_scheme=scheme, cookies=mine.cookies) as page:
        goto(page, "/mine")
        assert serious(page, rules) == []


@contextmanager
def examining(chromium: Browser, url: str, **more: Any) -> Iterator[Page]:
    """Return a page with axe. The page's policy refuses external scripts, so axe is injected
    through the debugger."""
    axe = (resources.files("axe_playwright_python") / "axe.min.js").read_text()
    with looking(chromium, url, bypass_csp=True, **more) as page:
        page.add_init_script(axe)
        yield page


def serious(page: Page, rules: list[str] | None) -> list[Any]:
    """Return axe's findings that exclude readers, by all rules or by these."""
    options: dict[str, Any] = {"resultTypes": ["violations"]}
    if rules is not None:
        options["runOnly"] = rules
    found = page.evaluate("options => axe.run(document, options)", options)
    return [
        (each["id"], [node["html"][:150] for node in each["nodes"]][:3])
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def assert_nothing_is_wider_than_the_screen(page: Page, name: str) -> None:
    wide, screen = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide <= screen, (name, wide)
    assert page.evaluate(COVERED) == [], name


# Blocks of a card that begin before the one above has ended.
COVERED = """() => [...document.querySelectorAll(".card, .card section")].flatMap((card) => {
  const blocks = [...card.children].filter((each) => getComputedStyle(each).position === "static");
  return blocks.slice(1).filter((each, n) => {
    const [above, below] = [blocks[n].getBoundingClientRect(), each.getBoundingClientRect()];
    const inside = Math.max(above.bottom, ...[...blocks[n].children].map(
      (child) => child.getBoundingClientRect().bottom));
    return below.height && below.left < above.right && below.top < inside - 1;
  }).map((each) => each.outerHTML.slice(0, 80));
})"""


def test_a_hundred_hostile_names_do_nothing_anywhere(
    chromium: Browser, queue: Queue, address: str
) -> None:
    assert len(HOSTILE) >= 100
    shown = Shown(queue, address, fill(queue, len(HOSTILE)))
    elsewhere: list[str] = []
    pages = shown.pages()
    paths = [pages[name] for name in ("now", "waiting", "search", "customer", "documents", "bulk")]
    paths += list(shown.more_pages().values())
    paths += [f"/customers?sort=name&page={number}" for number in (1, 2, 3)]
    paths += [f"/documents?name={quote(HOSTILE[1], safe='')}"]
    # Each kind of result, and each page of long and hostile ones.
    paths += [f"/documents/{each.id}" for each in queue.iterate(states=State.COMPLETED)][:6]
    paths += [f"/customer?name={quote(HOSTILE[n], safe='')}" for n in (1, 2, 10, 12, 14, 31)]
    with looking(chromium, address) as page:
        wrong = watched(page)
        page.on("request", lambda r: None if r.url.startswith(address) else elsewhere.append(r.url))
        for path in paths:
            goto(page, path)
            assert page.evaluate("window.hacked") is None, path
            assert page.locator("b[id], main img, main iframe").count() == 0, path
            assert_nothing_is_wider_than_the_screen(page, path)
        assert (wrong, elsewhere) == ([], [])


def test_every_chart_has_a_title_and_a_table_and_every_time_is_exact(
    chromium: Browser, shown: Shown
) -> None:
    context = context_of(chromium, shown.url)
    page = context.new_page()
    charts = 0
    for path in ("/", "/customer?name=Acme+Logistics"):
        page.goto(path)
        for card in page.locator("section:has(svg.chart)").all():
            charts += 1
            assert card.locator("h2").inner_text().strip()
            card.locator("details.behind summary").click()
            expect(card.locator("details.behind table tbody tr").first).to_be_visible()
    for time in page.locator("time").all():
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", time.get_attribute("datetime") or "")
    assert charts == 2
    context.close()


# ── By keyboard ──────────────────────────────────────────────────────────────────────────────────


def test_everything_can_be_done_by_keyboard(page: Page, queue: Queue) -> None:
    queue.submit("acme", payload=1, name="one.pdf")
    page.goto("/priorities")

    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_url("**/customers")
    page.locator("summary[aria-label=Change]").focus()
    page.keyboard.press("Enter")
    weight = page.get_by_label("Weight", exact=True)
    weight.focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("2.5")
    page.keyboard.press("Enter")
    expect(page.locator("td[data-label=Weight]")).to_have_text("2.5")
    assert queue.customer("acme").settings.weight == 2.5
    page.keyboard.press("/")
    page.keyboard.type("one.pdf")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("one.pdf")


def test_focus_is_seen_and_follows_the_order_of_reading(page: Page, queue: Queue) -> None:
    queue.submit("acme", payload=1)
    page.goto("/")
    places: list[tuple[float, float]] = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen = page.evaluate(
            """() => {
              const each = document.activeElement, style = getComputedStyle(each);
              const box = each.getBoundingClientRect();
              return [style.outlineStyle !== "none", box.top + scrollY, box.left, each.tagName];
            }"""
        )
        if seen[3] == "BODY":
            break
        assert seen[0], seen
        places.append((seen[1], seen[2]))
    header = [place for place in places if place[0] < 60]
    assert header == sorted(header, key=lambda place: place[1])
    assert len(places) >= 8


# ── Live ─────────────────────────────────────────────────────────────────────────────────────────


def test_nine_tabs_are_live_over_one_stream(chromium: Browser, queue: Queue) -> None:
    queue.submit("acme", payload=1)
    app = page_app(queue)
    with served_app(app) as address:
        context = context_of(chromium, address)
        tabs = [context.new_page() for _ in range(9)]
        for tab in tabs:
            tab.goto("/")
            expect(tab.locator("#tiles .big").first).to_have_text("1")
        streams = app.state.service.streams
        wait_until(lambda: streams.total() == 1, "one stream is open for all of them")

        queue.submit_many([_submission("acme") for _ in range(4)])

        for tab in tabs:
            expect(tab.locator("#tiles .big").first).to_have_text("5", timeout=WAIT_MS)
        assert streams.total() == 1
        context.close()


def test_a_service_that_is_cut_off_is_told_and_comes_back(
    chromium: Browser, address: str, queue: Queue
) -> None:
    queue.submit("acme", payload=1)
    context = context_of(chromium, address)
    page = context.new_page()
    page.goto("/")
    cut = [True]
    page.route("**/*", lambda route: route.abort() if cut[0] else route.continue_())
    queue.submit("acme", payload=2)
    queue.submit("acme", payload=3)
    expect(page.locator("#cut-off")).to_be_visible(timeout=3 * WAIT_MS)
    expect(page.locator("#cut-off")).to_contain_text("does not answer")

    cut[0] = False

    expect(page.locator("#cut-off")).to_be_hidden(timeout=2 * WAIT_MS)
    expect(page.locator("#tiles .big").first).to_have_text("3")
    context.close()


def test_where_there_is_no_shared_worker_the_page_asks_again_by_itself(
    chromium: Browser, address: str, queue: Queue
) -> None:
    queue.submit("acme", payload=1)
    with looking(chromium, address) as page:
        page.clock.install()
        page.add_init_script("delete window.SharedWorker")
        page.goto("/")
        expect(page.locator(".status")).to_contain_text("refreshed every few seconds")

        queue.submit("acme", payload=2)
        page.clock.fast_forward(6_000)

        expect(page.locator("#tiles .big").first).to_have_text("2")


def test_banners_say_that_no_worker_runs_and_who_is_paused(page: Page, queue: Queue) -> None:
    queue.submit("acme", payload=1)
    queue.set_customer("acme", paused=True)

    page.goto("/")

    expect(page.locator("#banners")).to_contain_text("No worker is running")
    expect(page.locator("#banners")).to_contain_text("acme")


def test_lanes_of_a_kind_are_chosen_stay_in_the_address_and_are_live(
    page: Page, queue: Queue
) -> None:
    for kind in ("ocr", "text"):
        queue.set_kind(kind)
        queue.submit(f"{kind} customer", payload=1, name=f"{kind}.pdf", kind=kind)
    page.goto("/")
    expect(page.locator("#lanes .chip")).to_have_count(2)
    # The choice appears in the open page once the service has seen that there are several kinds.
    expect(page.get_by_role("combobox", name="Kind of work")).to_be_visible()

    page.get_by_role("combobox", name="Kind of work").select_option("ocr")

    expect(page.locator("#lanes .chip")).to_have_count(1)
    expect(page.locator("#why")).to_contain_text("ocr.pdf")
    assert page.url.endswith("/?kind=ocr")
    for kind in ("text", "ocr"):
        queue.submit(f"{kind} customer", payload=2, kind=kind)
    expect(page.locator("#lanes .chip")).to_have_count(2)  # by the stream of changes
    expect(page.locator("#lanes .chosen")).to_contain_text("Waiting 2")
    page.reload()
    expect(page.get_by_role("combobox", name="Kind of work")).to_have_value("ocr")
    page.get_by_role("combobox", name="Kind of work").select_option("all")
    expect(page.locator("#lanes .chip")).to_have_count(4)


def test_a_kind_is_limited_paused_resumed_and_created(page: Page, queue: Queue) -> None:
    queue.set_kind("ocr")
    queue.submit("acme", payload=1, kind="ocr")
    wait_until(lambda: "/kinds" in page.request.get("/").text(), "the service saw the kinds")
    page.goto("/")
    page.keyboard.press("g")
    page.keyboard.press("k")
    page.wait_for_url("**/kinds")

    change = page.get_by_role("row", name="ocr").locator("details")
    change.locator("summary").click()
    change.get_by_role("spinbutton", name="Limit").fill("3")
    change.get_by_role("button", name="Save").click()
    expect(page.locator(".banner.done")).to_contain_text("in force")
    assert queue.kind("ocr").settings.limit == 3
    change.locator("summary").click()
    change.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("row", name="ocr")).to_contain_text("paused")
    assert queue.kind("ocr").settings == KindSettings(limit=3, paused=True)
    change.locator("summary").click()
    change.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("row", name="ocr")).not_to_contain_text("paused")
    page.get_by_role("textbox", name="Name").fill("export")
    page.get_by_role("button", name="Create").click()
    expect(page.get_by_role("row", name="export")).to_be_visible()
    assert queue.kind("export").settings == KindSettings()


def work_all(queue: Queue, handler: Any) -> None:
    """Run a real worker until no document waits or runs."""
    worker = Worker(queue, handler, threads=True, concurrency=4)
    thread = threading.Thread(target=worker.run)
    thread.start()
    wait_until(lambda: not queue.summary().waiting + queue.summary().running, "all was tried")
    worker.stop()
    thread.join(WAIT_MS / 1_000)


def tear(document: ClaimedDocument) -> None:
    raise ValueError("page 3 is torn")


FAILURE_MS = 5_000


@pytest.mark.parametrize("attempts_max", [1, 5], ids=["dead", "retrying"])
def test_25_of_25_failing_documents_are_seen_on_the_first_view_within_5_seconds(
    chromium: Browser, attempts_max: int
) -> None:
    with Queue(":memory:", attempts_max=attempts_max) as queue, page_served(queue) as url:
        queue.submit("acme", payload=0)
        with looking(chromium, url) as page:
            wrong = watched(page)
            page.goto("/")
            expect(page.locator("#failures")).to_have_count(0)
            expect(page.locator("#dead .big")).to_have_text("0")
            queue.submit_many(_submission("acme") for _ in range(24))
            work_all(queue, tear)

            banner, tile = page.locator("#failures"), page.locator("#dead")
            seen = expect(banner)
            if attempts_max == 1:
                seen.to_contain_text("25 documents died", timeout=FAILURE_MS)
                seen.to_have_class("banner bad")
                expect(tile.locator(".big.failed")).to_have_text("25")
            else:
                seen.to_contain_text("25 documents failed and will be retried", timeout=FAILURE_MS)
                seen.to_have_class("banner late")
                expect(tile.locator(".note.late")).to_have_text("25 documents will be retried")
                expect(tile.locator(".big")).to_have_text("0")
            seen.to_contain_text("ValueError: page 3 is torn")
            expect(banner).to_be_in_viewport()
            expect(tile).to_be_in_viewport()
            if attempts_max == 1:
                tile.get_by_role("link").click()
                expect(page.locator("tbody tr")).to_have_count(25)
            assert wrong == []


# ── Actions ──────────────────────────────────────────────────────────────────────────────────────


def test_the_calculator_answers_while_one_types(page: Page) -> None:
    page.goto("/priorities")

    page.get_by_label("How many documents").fill("5")

    expect(page.locator("#calculated .answer")).to_have_text(
        "The first gets priority 1, the last gets priority 2."
    )
    page.get_by_label("Seconds between two documents").fill("1501")
    expect(page.locator("#calculated .answer")).to_contain_text("All 5 get priority 1")


def test_a_document_is_cancelled_and_a_dead_one_tried_again(page: Page, queue: Queue) -> None:
    fill(queue)
    waiting = queue.submit("acme", payload=1).id
    dead = next(queue.iterate(states=State.DEAD)).id

    page.goto(f"/documents/{waiting}")
    page.get_by_role("button", name="Cancel the document").click()
    expect(page.locator(".state").first).to_have_text("cancelled")
    page.goto(f"/documents/{dead}")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".state").first).to_have_text("waiting")

    assert queue.get(waiting).state is State.CANCELLED
    assert queue.get(dead).state is State.WAITING


def test_what_was_submitted_and_the_result_can_be_seen_and_downloaded(
    page: Page, queue: Queue, tmp_path: Path
) -> None:
    id = queue.submit("acme", content=b"%PDF", name="../a<b>.pdf").id
    page.goto(f"/documents/{id}")

    with page.expect_download() as started:
        page.get_by_role("link", name="Download").click()

    assert Path(started.value.path()).read_bytes() == b"%PDF"
    assert "/" not in started.value.suggested_filename


def test_a_customer_is_paused_weighted_limited_and_all_of_it_cancelled(
    page: Page, queue: Queue
) -> None:
    queue.submit_many([_submission("a b&c") for _ in range(3)])
    page.goto("/customers")
    page.get_by_role("link", name="a b&c").click()

    page.get_by_label("Weight", exact=True).fill("4")
    page.get_by_label("Limit", exact=True).fill("2")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Pause").click()
    expect(page.locator(".head .state")).to_have_text("paused")
    settings = queue.customer("a b&c").settings
    assert (settings.weight, settings.limit, settings.paused) == (4, 2, True)

    page.get_by_role("link", name="Cancel all…").click()
    expect(page.locator("h1")).to_have_text("Cancel 3 documents?")
    assert queue.customer("a b&c").waiting == 3
    page.get_by_role("button", name="Cancel 3 documents").click()
    expect(page.locator(".banner.done")).to_have_text("3 documents were cancelled.")
    assert queue.customer("a b&c").waiting == 0


def test_filters_are_the_address_and_what_matches_is_exported(page: Page, queue: Queue) -> None:
    fill(queue)
    page.goto("/documents")

    page.get_by_role("textbox", name="Customer").fill("Acme Logistics")
    page.get_by_role("combobox", name="Priority").select_option("8")
    expect(page.locator("#matches tbody tr")).to_have_count(6)
    assert "customer=Acme" in page.url
    with page.expect_download() as as_csv:
        page.get_by_role("link", name="CSV").click()
    with page.expect_download() as as_json:
        page.get_by_role("link", name="JSON").click()

    lines = Path(as_csv.value.path()).read_text().splitlines()
    assert len(lines) == 7
    assert lines[0].startswith("id,customer,state,priority")
    exported = json.loads(Path(as_json.value.path()).read_text())
    assert {each["priority"] for each in exported} == {8}
    page.goto("/documents?state=dead")
    page.get_by_role("link", name="Try all that match again").click()
    page.get_by_role("button", name="Try 10 again").click()
    expect(page.locator(".banner.done")).to_have_text("10 documents wait again.")


def test_the_customers_are_sorted_searched_and_turned_over(page: Page, queue: Queue) -> None:
    for number in range(60):
        queue.submit_many([_submission(f"customer {number:02}") for _ in range(1 + number % 3)])
    page.goto("/customers?sort=name")

    expect(page.locator("tbody tr")).to_have_count(50)
    page.get_by_role("link", name="Next page").click()
    expect(page.locator("tbody tr")).to_have_count(10)
    page.get_by_role("link", name="Waiting").click()
    expect(page.locator("td[data-label=Waiting]").first).to_have_text("3")
    page.get_by_label("Name contains").fill("R 42")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody")).to_contain_text("customer 42")


def test_a_column_is_sorted_one_way_and_then_the_other(page: Page, queue: Queue) -> None:
    for name, documents in (("one", 1), ("three", 3), ("two", 2)):
        queue.submit_many([_submission(name) for _ in range(documents)])
    page.goto("/customers?sort=name")
    names, head = page.locator("td.title .name"), page.get_by_role("link", name="Waiting")

    head.click()
    expect(page.locator("th[aria-sort=descending]")).to_have_text("Waiting")
    expect(names).to_have_text(["three", "two", "one"])
    head.click()

    expect(page.locator("th[aria-sort=ascending]")).to_have_text("Waiting")
    expect(names).to_have_text(["one", "two", "three"])


def test_what_takes_long_says_that_it_is_being_asked_for(page: Page, queue: Queue) -> None:
    queue.submit("acme", payload=1)
    page.goto("/customers")
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/customers?*", hold)

    page.get_by_label("Name contains").fill("x")

    expect(page.locator("#list")).to_have_attribute("aria-busy", "true")
    held[0].continue_()
    expect(page.locator("#list")).to_contain_text("No customer matches.")
    expect(page.locator("#list")).not_to_have_attribute("aria-busy", "true")


def test_a_search_shows_what_it_has_found_and_goes_on_by_itself(
    page: Page, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.submit("acme", payload=1, name="Invoice-17.pdf")
    for number in range(40):
        queue.submit("acme", payload=1, name=f"scan-{number}.pdf")
    queue.submit("acme", payload=1, name="an invoice.pdf")
    monkeypatch.setattr("fairturn.service.scan.STEP", 5)
    monkeypatch.setattr("fairturn.service.scan.SCAN_S", 0.0)

    page.goto("/")
    page.get_by_role("searchbox").fill("INVOICE")
    page.keyboard.press("Enter")

    names = page.locator("tbody .name").and_(page.locator("td.title .name"))
    expect(names).to_have_text(["an invoice.pdf", "Invoice-17.pdf"])
    expect(page.locator("#further")).to_have_count(0)
    page.goto("/documents?name=scan")
    expect(page.locator("tbody tr")).to_have_count(24)
    expect(page.get_by_role("link", name="Older ones")).to_be_visible()
    page.goto("/search?q=nowhere")
    expect(page.locator("tbody")).to_have_text("No document matches.")


def test_the_expected_start_counts_down(chromium: Browser, shown: Shown) -> None:
    with looking(chromium, shown.url) as page:
        page.clock.install()
        page.goto(f"/documents/{shown.ids['waiting']}")
        latest = page.locator("#explanation .place time").last
        before = latest.inner_text()

        page.clock.run_for(2_500)

        expect(latest).not_to_have_text(before)
        expect(latest).to_have_attribute("title", re.compile(r"\d\d:\d\d:\d\d"))


def test_progress_is_seen_while_a_document_runs(page: Page, queue: Queue) -> None:
    id = queue.submit("acme", payload=1).id
    (claim,) = queue.store.claim(1, worker="w", lease_us=LEASE_US).claims
    page.goto(f"/documents/{id}")
    expect(page.locator("#heading .state")).to_have_text("running")

    for done in (25, 75):
        told = {claim.fence: Progress(done, 100)}
        queue.store.renew([claim.fence], lease_us=LEASE_US, progress=told)
        expect(page.locator("#explanation .place")).to_have_text(f"{done}\u00a0%")
    queue.store.finish([Completed(claim.fence, '{"pages": 3}')])

    expect(page.locator("#heading .state")).to_have_text("completed")


def test_a_language_that_was_chosen_stays(page: Page) -> None:
    page.goto("/priorities")

    page.locator("details.menu summary").first.click()
    page.get_by_role("link", name="Deutsch").click()
    expect(page.locator("html")).to_have_attribute("lang", "de")
    page.goto("/customers")

    expect(page.locator("h1")).to_have_text("Kunden")


def test_an_empty_queue_teaches_and_the_demo_comes_and_goes(page: Page, address: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=address)
    page.goto("/")
    page.get_by_role("button", name="Copy").first.click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith(f"curl --data-binary @invoice.pdf '{address}/v1/documents?")

    page.get_by_role("button", name="Load the demo").click()

    page.wait_for_url("**/demo")
    expect(page.locator(".columns dd.big")).to_have_count(3, timeout=2 * WAIT_MS)
    expect(page.locator(".columns")).to_contain_text("simulated")
    expect(page.locator("#lanes")).to_contain_text("ZE", timeout=2 * WAIT_MS)
    page.get_by_role("button", name="Remove the demo").click()
    expect(page.get_by_role("button", name="Load the demo")).to_be_visible()


def test_a_history_is_simulated_under_other_settings(page: Page, queue: Queue) -> None:
    fill(queue)
    page.goto("/what-if")

    page.get_by_label("Order").select_option("fifo")
    page.get_by_label("Worker slots").fill("1")
    page.get_by_label("Weights").fill(f"{HOSTILE[9]} = 2")
    page.get_by_role("button", name="Simulate").click()

    expect(page.locator("#outcome table tbody tr").first).to_be_visible(timeout=2 * WAIT_MS)
    expect(page.locator("#outcome")).to_contain_text("Simulated: 20 documents")
    expect(page.locator("#outcome")).to_contain_text(f"{HOSTILE[9]} = 2")


def test_without_scripts_the_page_still_works(
    chromium: Browser, address: str, queue: Queue
) -> None:
    id = queue.submit("acme", payload=1, name="one.pdf").id
    context = context_of(chromium, address, java_script_enabled=False)
    page = context.new_page()

    page.goto("/priorities")
    page.get_by_label("How many documents").fill("5")
    page.get_by_role("button", name="Work it out").click()
    expect(page.locator("#calculated .answer")).to_contain_text("the last gets priority 2")
    page.goto("/")
    page.locator("#lanes .chip").click()
    page.get_by_role("button", name="Cancel the document").click()

    expect(page.locator(".state").first).to_have_text("cancelled")
    assert queue.get(id).state is State.CANCELLED
    context.close()


# ── With keys ────────────────────────────────────────────────────────────────────────────────────


def test_who_has_no_key_sees_the_rule_and_the_login_and_nothing_else(
    page: Page, queue: Queue
) -> None:
    key_for(queue)
    for path in ("/", "/customers", "/documents", "/what-if", "/mine", "/search?q=x"):
        answer = page.request.get(path, max_redirects=0)
        assert (answer.status, answer.headers["location"][:6]) == (303, "/login"), path
    page.goto("/customers")
    assert page.url.endswith("/login?next=%2Fcustomers")
    page.goto("/priorities")
    expect(page.locator("h1")).to_have_text("How priorities work")


def test_a_customer_uploads_and_sees_its_own_documents_and_nothing_else(
    page: Page, queue: Queue, tmp_path: Path
) -> None:
    queue.submit_many([_submission("Secret Rival") for _ in range(30)])
    other = queue.submit("Secret Rival", payload=1, name="secret.pdf").id
    file = tmp_path / "invoice 1.pdf"
    file.write_bytes(b"%PDF-1.7 " * 1_000)
    log_in(page, key_for(queue, "acme"))
    assert page.url.endswith("/mine")

    page.locator("#files").set_input_files([file])
    expect(page.locator("#uploads")).to_contain_text("submitted")
    page.locator("#drop").dispatch_event("drop", {"dataTransfer": dropped(page, "dropped.pdf")})

    expect(page.locator("#uploads li")).to_have_count(2)
    expect(page.locator("#uploads .good")).to_have_text(["submitted", "submitted"])
    rows = page.locator("#own-documents tbody tr")
    expect(rows).to_have_count(2)
    row = rows.filter(has_text="invoice 1.pdf")
    expect(row).to_contain_text("number 2", timeout=2 * WAIT_MS)
    row.get_by_role("link").click()
    expect(page.locator("#explanation")).to_contain_text("priority 1")
    assert "Secret" not in page.content()
    for path in (f"/documents/{other}", "/customers", "/documents", "/customer?name=acme"):
        response = page.request.get(path)
        assert response.status in (403, 404), path
        assert "Secret" not in response.text(), path
    page.goto("/search?q=secret.pdf")
    expect(page.locator("main")).to_contain_text("No document matches.")


def test_a_customer_uploads_for_a_kind_and_is_told_of_one_that_is_unknown(
    chromium: Browser, address: str, queue: Queue, tmp_path: Path
) -> None:
    queue.set_kind("ocr")
    file = tmp_path / "scan 1+2.pdf"
    file.write_bytes(b"%PDF-1.7")
    key = key_for(queue, "acme")
    with looking(chromium, address) as page:
        log_in(page, key)
        wait_until(lambda: "upload-kind" in page.request.get("/mine").text(), "it saw the kinds")
        page.goto("/mine")
        kind = page.get_by_role("combobox", name="Kind of work")
        expect(kind).to_have_value("default")

        kind.fill("ocr")
        page.locator("#files").set_input_files([file])
        expect(page.locator("#uploads .good")).to_have_text("submitted")
        kind.fill("orc")
        page.locator("#files").set_input_files([file])

        expect(page.locator("#uploads .failed")).to_have_text(
            "not submitted: The queue does not accept this kind of work."
        )
        assert [(each.name, each.kind) for each in queue.iterate()] == [("scan 1+2.pdf", "ocr")]
        expect(page.locator("#own-documents tbody tr")).to_contain_text("ocr")


def dropped(page: Page, name: str) -> JSHandle:
    """Return what a browser passes on when a file is dropped."""
    return page.evaluate_handle(
        """name => {
          const data = new DataTransfer();
          data.items.add(new File(["%PDF"], name));
          return data;
        }""",
        name,
    )


def test_keys_are_made_shown_once_and_revoked_and_a_revoked_one_ends_its_session(
    chromium: Browser, page: Page, address: str, queue: Queue
) -> None:
    queue.submit("acme", payload=1)
    log_in(page, key_for(queue))
    page.goto("/customer?name=acme")
    page.get_by_label("For what").fill("laptop")
    page.get_by_role("button", name="Make a key").click()
    key = page.locator("#made-key").inner_text().strip()
    page.goto("/customer?name=acme")
    assert key not in page.content()
    context = context_of(chromium, address)
    theirs = context.new_page()
    log_in(theirs, key)
    expect(theirs.locator("h1")).to_contain_text("acme")

    page.get_by_role("button", name="Revoke").click()

    expect(page.locator(".banner.done")).to_be_visible()
    theirs.goto("/mine")
    assert "/login" in theirs.url
    expect(theirs.locator("main")).to_contain_text("Your session has ended.")
    assert KeyRegistry(queue.store).check(key) is None
    context.close()


def test_who_logs_out_is_out(page: Page, queue: Queue) -> None:
    log_in(page, key_for(queue))
    expect(page.locator(".status")).to_be_visible()

    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
    page.goto("/customers")

    assert "/login" in page.url


def test_a_reader_sees_everything_and_no_button_that_changes_anything(
    page: Page, queue: Queue
) -> None:
    ids = fill(queue)
    log_in(page, key_for(queue, role="reader"))
    for path in ("/", "/customers", "/documents", f"/documents/{ids['dead']}"):
        page.goto(path)
        forms = page.locator("main form[method=post]").count()
        assert forms == 0, path
    response = page.request.post(
        f"/documents/{ids['dead']}/retry", headers={"Sec-Fetch-Site": "same-origin"}
    )
    assert response.status == 403
