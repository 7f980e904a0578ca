"""The page over HTTP: its responses by role, before any browser draws them."""

import asyncio
import csv
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from fairturn import Queue, Submission
from fairturn.clock import SystemClock
from fairturn.dashboard import routes
from fairturn.dashboard.language import all_tongues
from fairturn.dashboard.login import back_to
from fairturn.dashboard.renderer import COLOURS, LANGUAGE_NAMES, face_of, plain
from fairturn.dashboard.routes import install
from fairturn.dashboard.rules import calculate, rows_of
from fairturn.dashboard.samples import ActivitySampler
from fairturn.dashboard.texts import LABELS
from fairturn.dashboard.visitors import LASTS_US, SESSIONS_MAX, PageSessions
from fairturn.i18n import languages
from fairturn.model import Completed, Outcome, State
from fairturn.priority import Reset, Rule
from fairturn.service.app import make_app
from fairturn.simulator.demo.traffic import DemoPace
from tests.http_server import TOKEN, asked, entered, key_for, served_app
from tests.page_contents import fill
from tests.servers.queues import Databases
from tests.wait import wait_until

TONGUES = all_tongues()
SAME = {"Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def queue() -> Iterator[Queue]:
    with Queue(":memory:") as found:
        yield found


@pytest.fixture
def app(queue: Queue) -> FastAPI:
    made = make_app(queue, token=TOKEN)
    install(made)
    return made


def logged_in(app: FastAPI, key: str) -> dict[str, str]:
    """Return the cookie of a session for this key."""
    response = asked(app, "POST", "/login", data={"key": key}, headers=SAME)
    assert response.status_code == 303, response.text
    return {"Cookie": response.headers["set-cookie"].partition(";")[0]}


def opened(app: FastAPI, path: str) -> httpx.Response:
    """Return a page as the operator of a queue without keys sees it."""
    return asked(app, "GET", path, headers=entered(app))


# ── The rule ─────────────────────────────────────────────────────────────────────────────────────


def test_the_table_has_the_counts_and_documents_of_the_texts() -> None:
    rows = rows_of(Rule())

    assert [(row.highest, row.lowest) for row in rows] == [
        (0, -2), (-3, -4), (-5, -6), (-7, -8), (-9, -10), (-11, -12), (-13, -14), (-15, -20),
        (-21, None),
    ]  # fmt: skip
    assert [(row.first, row.last) for row in rows][-2:] == [(16, 21), (22, None)]


def test_the_calculator_applies_the_rule_itself() -> None:
    burst = calculate(Rule(), 30, 10)
    apart = calculate(Rule(), 30, 1_501)
    periodic = calculate(Rule(reset=Reset.PERIODIC), 30, 100)

    assert [share.documents for share in burst.shares] == [3, 2, 2, 2, 2, 2, 2, 6, 9]
    assert [share.first for share in burst.shares] == [1, 4, 6, 8, 10, 12, 14, 16, 22]
    assert (apart.shares[0].documents, apart.resets) == (30, 29)
    assert (periodic.resets, periodic.last) == (1, 7)


def test_everybody_may_read_the_rule_in_force_without_a_key(queue: Queue, app: FastAPI) -> None:
    key_for(queue)
    queue.configure(reset_interval_s=120, reset="periodic", bounds=range(-1, -9, -1))

    response = asked(app, "GET", "/priorities", address="192.0.2.7")

    assert response.status_code == 200
    assert "2 minutes" in response.text
    assert "also without a pause" in response.text
    assert "−9 and below" in response.text.replace("\n", " ")


@pytest.mark.parametrize("wrong", ["documents=0", "documents=x", "documents=10001", "apart_s=-1"])
def test_a_number_that_the_calculator_cannot_take_is_a_page_that_says_so(
    app: FastAPI, wrong: str
) -> None:
    response = asked(app, "GET", f"/priorities?{wrong}")

    assert response.status_code == 422
    assert "not as it must be" in response.text
    assert response.headers["content-type"].startswith("text/html")


# ── Who may see what ─────────────────────────────────────────────────────────────────────────────


def test_a_page_allows_no_script_or_style_but_its_own_files_and_no_frame(app: FastAPI) -> None:
    response = asked(app, "GET", "/priorities")

    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "data:" not in policy
    assert not re.search(
        r"<script(?! type=\"module\" src=)|\sstyle=|\son\w+=|<style", response.text
    )


def test_a_key_opens_a_session_and_the_cookie_is_strict_and_not_for_scripts(
    queue: Queue, app: FastAPI
) -> None:
    key = key_for(queue)

    response = asked(app, "POST", "/login", data={"key": f" {key} "}, headers=SAME)

    cookie = response.headers["set-cookie"].lower()
    assert response.status_code == 303
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert key not in cookie


def test_over_https_the_cookie_is_for_https_alone(queue: Queue, app: FastAPI) -> None:
    key, base = key_for(queue), "https://queue.example"

    response = asked(app, "POST", "/login", data={"key": key}, headers=SAME, base=base)

    cookie = response.headers["set-cookie"]
    assert cookie.startswith("__Host-fairturn_session=")
    assert {"secure", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert "domain" not in cookie.lower()
    session = {"Cookie": cookie.partition(";")[0], **SAME}
    assert asked(app, "GET", "/customers", headers=session, base=base).status_code == 200
    ended = asked(app, "POST", "/logout", headers=session, base=base).headers["set-cookie"]
    assert ended.startswith('__Host-fairturn_session="";')
    assert "secure" in ended.lower()


def test_over_https_browsers_are_told_to_stay_there(app: FastAPI) -> None:
    for path in ("/priorities", "/v1/rule", "/v1/summary", "/nowhere"):
        encrypted = asked(app, "GET", path, base="https://queue.example")
        assert encrypted.headers["strict-transport-security"] == "max-age=31536000", path
        assert "strict-transport-security" not in asked(app, "GET", path).headers, path


def test_without_keys_the_printed_url_becomes_a_session_and_leaves_the_address_bar(
    queue: Queue, app: FastAPI
) -> None:
    first = asked(app, "GET", f"/login?token={TOKEN}&next=/customers")
    cookie = {"Cookie": first.headers["set-cookie"].partition(";")[0]}

    assert (first.status_code, first.headers["location"]) == (303, "/customers")
    assert TOKEN not in first.headers["set-cookie"]
    assert asked(app, "GET", "/customers", headers=cookie).status_code == 200
    elsewhere = {**cookie, "X-Forwarded-For": "203.0.113.9"}
    assert asked(app, "GET", "/customers", headers=elsewhere).status_code == 303
    key_for(queue)
    assert asked(app, "GET", "/customers", headers=cookie).headers["location"].startswith("/login")


def test_without_keys_a_page_without_a_session_asks_for_the_token(app: FastAPI) -> None:
    for path in ("/", "/customers", "/documents.csv", "/page-events", "/what-if"):
        assert asked(app, "GET", path).headers["location"].startswith("/login"), path
    assert "Enter the token that fairturn printed" in asked(app, "GET", "/login").text

    wrong = asked(app, "GET", f"/login?token={TOKEN[:-1]}0")
    typed = asked(app, "POST", "/login", data={"key": TOKEN}, headers=SAME)

    assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
    assert (typed.status_code, "set-cookie" in typed.headers) == (303, True)


def test_an_access_key_is_not_accepted_in_a_url(queue: Queue, app: FastAPI) -> None:
    response = asked(app, "GET", f"/login?token={key_for(queue)}")

    assert (response.status_code, "set-cookie" in response.headers) == (401, False)


def test_a_key_that_is_not_known_opens_nothing(queue: Queue, app: FastAPI) -> None:
    key_for(queue)

    response = asked(app, "POST", "/login", data={"key": "ft_x"}, headers=SAME)

    assert response.status_code == 401
    assert "set-cookie" not in response.headers
    assert "not known" in response.text


def test_a_key_is_not_taken_from_another_machine_over_plain_http(
    queue: Queue, app: FastAPI
) -> None:
    key = key_for(queue)

    response = asked(app, "POST", "/login", data={"key": key}, headers=SAME, address="192.0.2.7")

    assert response.status_code == 403


def test_a_form_of_another_site_changes_nothing(queue: Queue, app: FastAPI) -> None:
    key = key_for(queue)
    foreign: list[dict[str, str]] = [
        {},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:1"},
    ]
    for headers in foreign:
        for path, data in (("/login", {"key": key}), ("/logout", {})):
            response = asked(app, "POST", path, data=data, headers=headers)
            assert response.status_code == 403, (path, headers)
            assert "set-cookie" not in response.headers


def test_sessions_end_by_themselves_and_the_oldest_make_room() -> None:
    numbers = iter(range(SESSIONS_MAX + 2))
    sessions = PageSessions(token=lambda: str(next(numbers)))

    first = sessions.begin("a", 0)
    assert sessions.find(first, LASTS_US - 1) is not None
    assert sessions.find(first, LASTS_US) is None
    for n in range(SESSIONS_MAX):
        last = sessions.begin(f"b{n}", 0)
    assert sessions.find(first, 0) is None
    assert sessions.find(last, 0) is not None
    sessions.end(last)
    assert sessions.find(last, 0) is None


@pytest.mark.parametrize(
    ("wanted", "path"),
    [
        ("/customers?x=1", "/customers?x=1"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example", "/"),
        ("/a\r\nSet-Cookie: x", "/"),
        ("", "/"),
    ],
)
def test_after_the_login_one_stays_on_this_service(wanted: str, path: str) -> None:
    assert back_to(wanted) == path


def page_routes(method: str) -> list[str]:
    """Return the paths of the page with this method."""
    routers = [routes.router, *(page.router for page in routes.PAGES)]
    return [
        route.path
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and method in (route.methods or ())
    ]


def test_every_change_that_does_not_say_where_it_comes_from_is_refused(
    queue: Queue, app: FastAPI
) -> None:
    id = queue.submit("acme", payload=1).id
    paths = page_routes("POST")
    assert len(paths) >= 12
    for path in paths:
        for headers in ({}, {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}):
            response = asked(app, "POST", path.replace("{id}", id), headers=headers)
            assert response.status_code in (303, 403, 422), path
            if response.status_code == 303:
                assert response.headers["location"].startswith("/login"), path
    assert queue.get(id).state is State.WAITING


def test_no_page_shows_a_customer_anything_of_another(queue: Queue, app: FastAPI) -> None:
    foreign = queue.submit("rival", payload="hush", name="hush.pdf").id
    queue.store.claim(1, worker="hush worker", lease_us=10**9)
    queue.submit_many([Submission(customer="rival", payload=1) for _ in range(9)])
    queue.submit("acme", payload=1)
    cookie = logged_in(app, key_for(queue, "acme"))
    paths = page_routes("GET")
    assert len(paths) >= 18
    for path in paths:
        if path == "/page-events":
            continue  # it never ends; a browser test covers its events
        full = path.replace("{id}", foreign).replace("{name}", "style.css")
        query = "?name=rival&customer=rival&q=rival&action=cancel&to=en"
        response = asked(app, "GET", full + query, headers=cookie)
        assert response.status_code in (200, 303, 403, 404, 422), path
        assert "hush" not in response.text.lower(), path
    for path in page_routes("POST"):
        response = asked(
            app,
            "POST",
            path.replace("{id}", foreign),
            data={"name": "rival", "paused": "true", "action": "cancel"},
            headers={**cookie, **SAME},
        )
        assert "hush" not in response.text.lower(), path
    assert queue.customer("rival").waiting == 9
    assert not queue.customer("rival").settings.paused


def test_a_foreign_document_looks_like_a_missing_one(queue: Queue, app: FastAPI) -> None:
    foreign = queue.submit("rival", payload=1).id
    cookie = logged_in(app, key_for(queue, "acme"))

    answers = {
        re.sub(r'data-now="\d+"|%2Fdocuments%2F\w+', "", response.text)
        for id in (foreign, "0" * 15)
        if (response := asked(app, "GET", f"/documents/{id}", headers=cookie)).status_code == 404
    }

    assert len(answers) == 1


def test_a_link_from_another_site_is_followed_with_the_session(queue: Queue, app: FastAPI) -> None:
    key_for(queue)
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}

    first = asked(app, "GET", "/customers", headers=followed)
    again = asked(app, "GET", "/customers", headers={"Sec-Fetch-Site": "same-origin"})

    assert (first.status_code, 'http-equiv="refresh"' in first.text) == (200, True)
    assert again.headers["location"] == "/login?next=%2Fcustomers"


def test_a_formula_in_a_name_is_text_in_a_table(queue: Queue, app: FastAPI) -> None:
    queue.submit("=1+1", payload=1, name='@SUM("a")\nb')

    table = opened(app, "/documents.csv").text
    listed = opened(app, "/documents.json").json()

    (_, row) = csv.reader(table.splitlines(keepends=True))
    assert (row[1], row[5]) == ("'=1+1", '\'@SUM("a")\nb')
    assert listed[0]["customer"] == "=1+1"
    assert opened(app, "/documents.json?customer=nobody").json() == []


def test_a_bulk_action_changes_the_documents_that_all_filters_match(
    queue: Queue, app: FastAPI
) -> None:
    wanted = queue.submit("acme", name="Invoice-17.pdf", tags=["scan", "late"]).id
    queue.submit("acme", name="Invoice-18.pdf", tags=["scan"])
    queue.submit("other", name="Invoice-19.pdf", tags=["scan", "late"])
    filters: dict[str, Any] = {
        "customer": "acme",
        "name": "invoice",
        "tag": ["late", "scan"],
        "state": ["", "waiting"],
        "priority": ["", "1"],
        "submitted_from": "2020-01-01T00:00",
        "submitted_before": "",
    }

    cookie = entered(app)
    shown = asked(
        app, "GET", "/documents-bulk", params={**filters, "action": "cancel"}, headers=cookie
    )
    done = asked(
        app,
        "POST",
        "/documents-bulk",
        data={**filters, "action": "cancel"},
        headers={**SAME, **cookie},
    )

    assert "Cancel 1 document?" in shown.text
    assert 'name="tag" value="late"><input type="hidden" name="tag" value="scan"' in shown.text
    assert done.status_code == 303
    assert "did_cancel=1" in done.headers["location"]
    assert [each.id for each in queue.iterate(states="cancelled")] == [wanted]


@pytest.mark.parametrize("path", ["/documents?", "/documents-bulk?action=cancel&"])
@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("&".join(f"tag={n}" for n in range(17)), "17 tags were given; at most 16 are allowed"),
        ("customer=" + "x" * 256, "customer has 256 bytes; at most 255 are allowed"),
        ("submitted_from=noon", "&#39;noonZ&#39; is not a timestamp"),
    ],
)
def test_a_wrong_filter_is_a_problem(app: FastAPI, path: str, query: str, detail: str) -> None:
    response = opened(app, path + query)

    assert response.status_code == 422
    assert detail in response.text


# ── Languages ────────────────────────────────────────────────────────────────────────────────────


def test_the_browser_says_the_language_until_one_was_chosen(app: FastAPI) -> None:
    browser = {"Accept-Language": "pl,en;q=0.5"}
    by_browser = asked(app, "GET", "/priorities", headers=browser)
    choice = asked(app, "GET", "/language?to=pt&back=/priorities", headers=browser)
    cookie = choice.headers["set-cookie"].partition(";")[0]
    by_choice = asked(app, "GET", "/priorities", headers={**browser, "Cookie": cookie})

    assert '<html lang="pl"' in by_browser.text
    assert (choice.status_code, choice.headers["location"]) == (303, "/priorities")
    assert '<html lang="pt"' in by_choice.text
    assert list(LANGUAGE_NAMES) == languages()


def test_every_label_is_used_and_every_label_that_is_used_is_there() -> None:
    folder = resources.files("fairturn.dashboard")
    sources = [file.read_text() for file in (folder / "templates").iterdir()]
    sources += [f.read_text() for f in folder.iterdir() if f.name.endswith(".py")]
    everything = "\n".join(s for s in sources if "LABELS: Mapping" not in s)

    said = set(re.findall(r"""\blabel\(\s*["']([a-z_]+)["'](?!\s*~)""", everything))
    beginnings = set(re.findall(r"""["']([a-z_]+_)(?:["']\s*~|\{)""", everything))

    assert said <= set(LABELS)
    unused = {
        key
        for key in LABELS
        if f'"{key}"' not in everything
        and f"'{key}'" not in everything
        and not any(key.startswith(beginning) for beginning in beginnings)
    }
    assert unused == set()


@pytest.mark.parametrize(
    ("us", "shown"),
    [
        (None, "–"),
        (0, "0 s"),
        (840_000, "0.8 s"),
        (9_960_000, "10 s"),
        (11_000_000, "11 s"),
        (1_872_000_000, "31 min"),
        (72_000_000, "1 min 12 s"),
        (120_000_000, "2 min"),
        (11_100_000_000, "3 h 5 min"),
        (187_200_000_000, "2 d 4 h"),
    ],
)
def test_a_duration_is_short_and_has_its_unit(us: int | None, shown: str) -> None:
    assert TONGUES["en"].short(us) == shown.replace(" s", "\u00a0s").replace(
        " min", "\u00a0min"
    ).replace(" h", "\u00a0h").replace(" d", "\u00a0d")


# ── Text from outside ────────────────────────────────────────────────────────────────────────────


def test_a_customer_has_the_same_colour_and_letters_everywhere() -> None:
    assert face_of("Acme Logistics") == face_of("Acme Logistics")
    assert face_of("Acme Logistics").letters == "AC"
    assert face_of("  ß").letters == "SS"
    assert face_of("<>").letters == "··"
    assert {face_of(f"customer {n}").colour for n in range(500)} == set(range(COLOURS))


def test_what_would_steer_the_layout_unseen_is_shown_as_a_sign() -> None:
    assert plain("a\u202eb\x00c\ud800") == "a\ufffdb\ufffdc\ufffd"
    assert plain("zażółć 文 👩‍💻") == "zażółć 文 👩‍💻"


def test_only_files_of_the_page_are_files(app: FastAPI) -> None:
    for name in ("..%2Ftexts.py", "nothing.js", "%2e%2e"):
        response: httpx.Response = asked(app, "GET", f"/page/{name}")
        assert response.status_code in (404, 405), name


def test_a_sample_that_fails_does_not_end_the_service(
    queue: Queue, app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    sampled = threading.Event()

    class Broken(ActivitySampler):
        def sample(self) -> None:
            sampled.set()
            raise ZeroDivisionError

    app.state.page.trail = Broken(queue.store, SystemClock())

    with served_app(app) as url:
        assert sampled.wait(30)
        assert httpx.get(f"{url}/livez").status_code == 200

    assert "the page could not sample the queue" in caplog.text


def test_behind_a_proxy_every_address_has_what_stands_before_it(app: FastAPI) -> None:
    async def ask(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=app, root_path="/queue")
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(f"/queue{path}")

    page = asyncio.run(ask("/priorities?documents=3"))
    chosen = asyncio.run(ask("/language?to=de&back=/priorities"))

    assert page.status_code == 200
    addresses = re.findall(r'(?:href|src|action)="([^"#][^"]*)"', page.text)
    assert addresses
    assert all(address.startswith("/queue/") for address in addresses)
    assert "back=%2Fpriorities%3Fdocuments%3D3" in page.text
    assert chosen.headers["location"] == "/queue/priorities"


def test_an_address_that_leads_nowhere_is_a_page_to_people_and_a_problem_to_programs(
    app: FastAPI,
) -> None:
    person = asked(app, "GET", "/nowhere", headers={"Sec-Fetch-Dest": "document"})
    program = asked(app, "GET", "/nowhere")

    assert (person.status_code, program.status_code) == (404, 404)
    assert "There is nothing here." in person.text
    assert person.headers["content-type"].startswith("text/html")
    assert program.headers["content-type"] == "application/problem+json"


# ── The search, the first steps and the demo ─────────────────────────────────────────────────────


def test_one_thing_that_is_meant_is_shown_at_once_and_several_are_listed(
    queue: Queue, app: FastAPI
) -> None:
    id = queue.submit("Acme Logistics", payload=1, name="Invoice-17.pdf").id
    queue.submit("Beta", payload=1, name="logistics.pdf")

    def found(q: str) -> str:
        response = opened(app, f"/search?q={q}")
        return str(response.headers.get("location", response.text))

    assert found(f"%20{id.upper()}") == f"/documents/{id}"
    assert found("voice-17") == f"/documents/{id}"
    assert found("beta") == "/customer?name=Beta"
    both = found("LOGISTICS")
    assert "Acme Logistics" in both
    assert "logistics.pdf" in both
    assert "No document matches." in found("nothing")


def test_without_scripts_a_link_leads_to_what_was_not_looked_at_yet(
    queue: Queue, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.submit("acme", payload=1, name="wanted.pdf")
    queue.submit_many([Submission(customer="acme", payload=1, name="scan") for _ in range(9)])
    monkeypatch.setattr("fairturn.service.scan.STEP", 5)
    monkeypatch.setattr("fairturn.service.scan.SCAN_S", 0.0)

    first = opened(app, "/search?q=wanted").text
    (link,) = re.findall(r'rel="next" href="([^"]+)"', first)
    second = opened(app, link.replace("&amp;", "&")).text

    assert "wanted.pdf" not in first
    assert "Looked at the newest 5 documents so far." in first
    assert "wanted.pdf" in second
    assert 'rel="next"' not in second


def test_the_second_step_names_the_command_that_was_started(queue: Queue) -> None:
    for works, command in ((True, "fairturn up invoices:extract"), (False, "fairturn work ")):
        made = make_app(queue, token=TOKEN)
        install(made, works=works)
        assert command in opened(made, "/").text


def running_shown(app: FastAPI) -> str:
    """Return the text of the tile of running documents."""
    tile = re.search(r"<dt>Running</dt><dd[^>]*>(.*?)</dd>", opened(app, "/").text)
    assert tile is not None
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", "", tile[1])).strip()


def test_the_tile_shows_how_many_slots_of_the_workers_are_busy(queue: Queue, app: FastAPI) -> None:
    queue.submit_many([Submission(customer="acme", payload=1) for _ in range(9)])
    assert running_shown(app) == "0"
    queue.store.sign_on("first", 2)
    queue.store.sign_on("second", 4)
    assert running_shown(app) == "0 of 6"

    queue.store.claim(1, worker="second", lease_us=10**9)
    assert running_shown(app) == "1 of 6"

    # Prefetched documents of the first worker wait inside it.
    queue.store.claim(5, worker="first", lease_us=10**9)
    assert running_shown(app) == "3 of 6"


def test_of_a_demo_the_simulated_orders_are_shown_beside_what_is_measured(queue: Queue) -> None:
    made = make_app(queue, token=TOKEN)
    install(made, demo=DemoPace(document_s=0.3, workers=4))
    queue.submit("oak", payload=1)
    queue.store.claim(1, worker="w", lease_us=10**9)

    def orders() -> list[tuple[str, str]]:
        text = opened(made, "/").text
        return re.findall(r'<small class="muted">([^<]+)</small></dt><dd[^>]*>([^<]+)</dd>', text)

    wait_until(lambda: "…" not in str(orders()), "both orders are simulated")

    (fifo, fifo_wait), (levels, levels_wait), (fair, fair_wait) = orders()
    assert (fifo, levels, fair) == ("simulated", "simulated", "measured now")
    assert "min" in fifo_wait
    assert "min" in levels_wait
    assert fair_wait == "0\u00a0s"
    assert "simulated" not in opened(made, "/customers").text


def test_the_timeline_says_who_overtook_to_those_who_may_know(queue: Queue, app: FastAPI) -> None:
    queue.submit_many([Submission(customer="acme", payload=1) for _ in range(9)])
    last = queue.list(customer="acme", size=1).documents[0].id
    queue.submit_many([Submission(customer="rival", payload=1) for _ in range(3)])
    outcomes: list[Outcome] = []
    while queue.get(last).attempts == 0:
        (claim,) = queue.store.claim(1, worker="w", lease_us=10**9, outcomes=outcomes).claims
        outcomes = [Completed(claim.fence)]

    whole = opened(app, f"/documents/{last}").text
    key = key_for(queue, "acme")
    own = asked(app, "GET", f"/documents/{last}", headers=logged_in(app, key)).text

    assert re.search(r"started while it waited: .*rival \(3\)", whole)
    assert "started while it waited" in own
    assert "rival" not in own


def test_the_timeline_of_a_child_shows_what_it_inherited_and_no_count_that_it_did_not_find(
    queue: Queue, app: FastAPI
) -> None:
    parent = queue.submit_many([Submission(customer="acme", payload=1) for _ in range(4)])[-1].id
    queue.submit("acme", payload=1)
    child = queue.submit("acme", payload=1, parent=parent).id

    of_parent = opened(app, f"/documents/{parent}").text
    of_child = opened(app, f"/documents/{child}").text

    assert "Priority 2: it found the count -3" in of_parent.replace("−", "-")
    assert f"It has priority 2, like document {parent}" in of_child
    assert "it found the count" not in of_child


# ── Every store ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("place", ["memory", "file", "postgres"])
def test_every_page_can_be_read_over_every_store(place: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        database = ":memory:" if place == "memory" else str(tmp_path / "queue.db")
        if place == "postgres":
            database = stack.enter_context(Databases()).new()
        queue = stack.enter_context(Queue(database))
        ids = fill(queue)
        app = make_app(queue, token=TOKEN)
        install(app)
        for state, id in ids.items():
            response = opened(app, f"/documents/{id}")
            assert response.status_code == 200, state
        for path in ("/", "/customers", "/customers?sort=share", "/documents", "/what-if"):
            assert opened(app, path).status_code == 200, path
        dead = opened(app, "/documents?state=dead&name=nothing")
        assert "No document matches." in dead.text
        acme = opened(app, "/customer?name=Acme+Logistics")
        assert "−39" in acme.text
        found = opened(app, "/search?q=po-77124.pdf")
        assert found.headers["location"].startswith("/documents/")
