"""Bad input gets a problem that names it, never an internal error, on both stores."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import FastAPI

from fairturn import Queue
from fairturn.dashboard.document_list import _cell
from fairturn.dashboard.routes import install
from fairturn.model import ATTEMPTS_MAX, NUMBER_MAX, Settings
from fairturn.service.app import make_app
from tests.http_server import TOKEN, asked, bearer, code_of, entered, key_for
from tests.servers.queues import Databases

NUL = "%00"
LINES = "application/x-ndjson"
THRESHOLDS = [-2, -4, -6, -8, -10, -12, -14]


class Place(NamedTuple):
    """A service with the page on one of the stores, and its keys."""

    queue: Queue
    app: FastAPI
    cookie: dict[str, str]  # the operator's session
    operator: dict[str, str]
    customer: dict[str, str]


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        file = str(tmp_path / "documents.db")
        if request.param == "postgres":
            file = stack.enter_context(Databases(recycled=True)).new()
        queue = stack.enter_context(Queue(file))
        queue.submit("acme", payload=1)
        app = make_app(queue, token=TOKEN)
        install(app)
        operator = key_for(queue)
        login = asked(app, "POST", "/login", data={"key": operator}, headers=SAME)
        cookie = {"Cookie": login.headers["set-cookie"].partition(";")[0], **SAME}
        yield Place(queue, app, cookie, bearer(operator), bearer(key_for(queue, "acme")))


SAME = {"Sec-Fetch-Site": "same-origin"}


def test_a_moment_that_is_no_number_is_named(place: Place) -> None:
    for wrong in ("--5", "-", "5-", "٣", "1_0"):
        asking: list[tuple[str, str, dict[str, Any]]] = [
            ("POST", f"/v1/documents?due_at={wrong}", {"json": 1}),
            ("GET", f"/v1/documents?submitted_from={wrong}", {}),
            ("GET", f"/v1/documents?submitted_before={wrong}", {}),
        ]
        for method, path, more in asking:
            answer = asked(place.app, method, path, headers=place.customer, **more)
            assert code_of(answer) == (422, "invalid"), path
            assert wrong in answer.json()["detail"]
    bulk = {"action": "cancel", "filter": {"submitted_from": "--5"}}
    answer = asked(place.app, "POST", "/v1/bulk", json=bulk, headers=place.operator)
    assert code_of(answer) == (422, "invalid")
    early = asked(place.app, "GET", "/v1/documents?submitted_before=-5", headers=place.customer)
    assert early.json()["documents"] == []


@pytest.mark.parametrize("length", [257, 5_000])
def test_a_form_with_a_boundary_that_is_too_long_is_malformed(place: Place, length: int) -> None:
    boundary = "b" * length
    part = 'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\nx'
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    content = f"--{boundary}\r\n{part}\r\n--{boundary}--\r\n"

    answer = asked(
        place.app, "POST", "/v1/documents", content=content, headers={**place.customer, **headers}
    )
    login = asked(place.app, "POST", "/login", content=content, headers={**SAME, **headers})

    assert code_of(answer) == (400, "malformed")
    assert login.status_code == 400


def test_a_name_or_key_that_no_database_can_store_is_refused_or_found_nowhere(
    place: Place,
) -> None:
    wanted = {
        f"/v1/customers?name={NUL}": 422,
        f"/v1/customers?after={NUL}": 422,
        f"/v1/keys?customer={NUL}": 422,
        f"/v1/keys?after={NUL}": 422,
        f"/v1/room?customer={NUL}": 422,
        f"/v1/documents?customer={NUL}": 422,
        f"/v1/documents?id={NUL}": 200,
        f"/v1/documents?name={NUL}": 200,
        f"/v1/documents?name_part={NUL}": 200,
        f"/v1/documents?tag={NUL}": 422,
        f"/v1/documents/{NUL}": 404,
    }
    assert {
        path: asked(place.app, "GET", path, headers=place.operator).status_code for path in wanted
    } == wanted

    bodies: list[tuple[str, Any, int]] = [
        (f"/v1/keys/{NUL}/revoke", None, 404),
        (f"/v1/keys/{NUL}/rotate", {}, 404),
        (f"/v1/documents/{NUL}/cancel", None, 404),
        ("/v1/documents/cancel", {"ids": ["\x00"]}, 200),
        ("/v1/documents/retry", {"ids": ["\x00"]}, 200),
        ("/v1/customers", {"name": "a\x00"}, 422),
        ("/v1/customers/purge", {"name": "a\x00", "dry_run": False}, 422),
        ("/v1/keys", {"role": "customer", "customer": "a\x00"}, 422),
        ("/v1/keys", {"role": "reader", "name": "a\x00"}, 201),
        ("/v1/bulk", {"action": "cancel", "filter": {"customer": "\x00"}}, 422),
        ("/v1/bulk", {"action": "cancel", "filter": {"id": ["\x00"], "name": "\x00"}}, 200),
    ]
    for path, body, status in bodies:
        answer = asked(place.app, "POST", path, json=body, headers=place.operator)
        assert answer.status_code == status, (path, body, answer.text)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ({"payload": 1, "key": "a\x00"}, 422),
        ({"payload": 1, "parent": "\x00"}, 422),
        ({"payload": 1, "due_at": "--5"}, 422),
        ({"payload": 1, "due_at": 10**30}, 422),
        ({"payload": 1, "tags": ["\x00"]}, 422),
        ({"payload": "\x00", "name": "\x00", "metadata": {"\x00": "\x00"}}, 201),
    ],
)
def test_a_line_of_a_batch_is_checked_like_a_request(
    place: Place, line: dict[str, Any], status: int
) -> None:
    headers = {**place.customer, "Content-Type": LINES}

    answer = asked(
        place.app, "POST", "/v1/documents/batch", content=json.dumps(line), headers=headers
    )

    assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bounds", [*THRESHOLDS, -(10**30)]),
        ("bounds", [*THRESHOLDS, -NUMBER_MAX - 1]),
        ("bounds", [NUMBER_MAX + 1, *THRESHOLDS]),
        ("attempts_max", ATTEMPTS_MAX + 1),
        ("waiting_max", NUMBER_MAX + 1),
        ("waiting_per_customer_max", 10**30),
    ],
)
def test_a_setting_that_no_store_can_hold_is_refused_by_both(
    place: Place, name: str, value: Any
) -> None:
    answer = asked(place.app, "PATCH", "/v1/settings", json={name: value}, headers=place.operator)

    assert code_of(answer) == (422, "invalid")
    with pytest.raises(ValueError, match=f"{name} is .*; (each|it) must be between"):
        place.queue.configure(**{name: value})
    assert place.queue.settings == Settings()


def test_the_largest_settings_are_accepted(place: Place) -> None:
    largest = {
        "bounds": [NUMBER_MAX, *THRESHOLDS[1:], -NUMBER_MAX],
        "attempts_max": ATTEMPTS_MAX,
        "waiting_max": NUMBER_MAX,
        "waiting_per_customer_max": NUMBER_MAX,
    }

    answer = asked(place.app, "PATCH", "/v1/settings", json=largest, headers=place.operator)
    submitted = asked(place.app, "POST", "/v1/documents", json=1, headers=place.customer)
    page = asked(place.app, "GET", "/priorities")

    assert [answer.json()[name] for name in largest] == list(largest.values())
    assert (submitted.status_code, page.status_code) == (201, 200)


def test_pages_refuse_what_the_service_refuses(place: Place) -> None:
    wanted = {
        f"/customer?name={NUL}": 422,
        f"/customers?q={NUL}": 200,
        f"/customers?after={NUL}": 200,
        f"/documents?customer={NUL}": 422,
        "/documents?submitted_from=--5": 422,
        f"/documents?did_cancel={'1' * 5_000}": 422,
        f"/documents/{NUL}": 404,
        f"/search?q=a{NUL}": 200,
        f"/documents-bulk?action=cancel&customer={'x' * 300}": 422,
        f"/documents-bulk?action=cancel&customer={'%C3%A9' * 200}": 422,
        f"/documents-bulk?action=cancel&{'&'.join(f'tag={n}' for n in range(30))}": 422,
        "/documents-bulk?action=cancel&submitted_from=--5": 422,
        f"/documents.csv?customer={'x' * 300}": 422,
    }
    assert {
        path: asked(place.app, "GET", path, headers=place.cookie).status_code for path in wanted
    } == wanted

    forms: list[tuple[str, dict[str, str], int]] = [
        ("/customer", {"name": "\x00", "weight": "1"}, 422),
        ("/customer", {"name": "acme", "weight": "1", "limit": "--5"}, 422),
        ("/customer", {"name": "acme", "weight": "1", "limit": "9" * 5_000}, 422),
        ("/customer/keys", {"customer": "\x00"}, 422),
        ("/customer/keys", {"customer": "acme", "name": "\x00"}, 200),
        ("/customer/keys/revoke", {"id": "\x00"}, 404),
        ("/documents-bulk", {"action": "cancel", "customer": "x" * 300}, 422),
        ("/login", {"key": "\x00"}, 401),
    ]
    for path, data, status in forms:
        answer = asked(place.app, "POST", path, data=data, headers=place.cookie)
        assert answer.status_code == status, (path, data)


# ── Other customers ──────────────────────────────────────────────────────────────────────────────


def test_a_search_after_a_foreign_document_is_answered_like_one_after_nothing(
    place: Place,
) -> None:
    place.queue.submit("acme", payload=1, name="scan-1")
    theirs = place.queue.submit("other", payload=1, name="scan-2").id
    own = [place.queue.submit("acme", payload=1, name=f"scan-{n}").id for n in (3, 4)]
    cookie = session_of(place, place.customer)

    def searched(after: str) -> httpx.Response:
        return asked(place.app, "GET", f"/search?q=scan&after={after}", headers=cookie)

    foreign, missing = searched(theirs), searched("0123456789abcde")

    assert foreign.status_code == missing.status_code == 422
    assert plain(foreign, theirs) == plain(missing, "0123456789abcde")
    assert own[0] in searched(own[1]).text


def plain(page: httpx.Response, id: str) -> str:
    """Return the page without the id that was asked for, and without its moment."""
    return re.sub(r"\b\d{16}\b", "", page.text.replace(id, ""))


def test_a_customers_search_goes_on_at_its_own_documents(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step scans documents of all customers; the link to the next one names none of them."""
    monkeypatch.setattr("fairturn.service.scan.STEP", 10)
    monkeypatch.setattr("fairturn.service.scan.SCAN_S", -1.0)
    own = {place.queue.submit("acme", payload=1, name=f"a-{n}").id: n for n in range(3)}
    foreign = []
    for n in range(3, 6):
        foreign += [place.queue.submit("other", payload=1, name="a").id for _ in range(25)]
        own[place.queue.submit("acme", payload=1, name=f"a-{n}" if n != 4 else "b").id] = n
    cookie = session_of(place, place.customer)

    path, seen = "/search?q=a-", set()
    for _ in range(20):
        page = asked(place.app, "GET", path, headers=cookie).text
        seen |= {id for id in own if f"/documents/{id}" in page}
        assert not any(id in page for id in foreign)
        _, link, rest = page.partition('rel="next" href="')
        if not link:
            break
        path = rest.partition('"')[0].replace("&amp;", "&")

    assert sorted(own[id] for id in seen) == [0, 1, 2, 3, 5]
    assert not link, "the search has no end"


def session_of(place: Place, key: dict[str, str]) -> dict[str, str]:
    shown = key["Authorization"].removeprefix("Bearer ")
    login = asked(place.app, "POST", "/login", data={"key": shown}, headers=SAME)
    return {"Cookie": login.headers["set-cookie"].partition(";")[0], **SAME}


def test_the_body_of_a_foreign_document_is_never_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a large one would take longer than a missing one, and tell that it exists."""
    theirs = place.queue.submit("other", content=b"x" * 60_000).id
    own = place.queue.submit("acme", content=b"x" * 60_000).id
    cookie = session_of(place, place.customer)
    read: list[str] = []
    reading = place.queue.store.read

    def noting(id: str) -> Any:
        read.append(id)
        return reading(id)

    monkeypatch.setattr(place.queue.store, "read", noting)

    for method, path, headers in (
        ("GET", "/v1/documents/{id}", place.customer),
        ("GET", "/v1/documents/{id}/content", place.customer),
        ("GET", "/v1/documents/{id}/result", place.customer),
        ("GET", "/v1/documents/{id}/result/file", place.customer),
        ("POST", "/v1/documents/{id}/cancel", place.customer),
        ("POST", "/v1/documents/{id}/retry", place.customer),
        ("POST", "/v1/documents?parent={id}", place.customer),
        ("GET", "/documents/{id}", cookie),
        ("GET", "/documents/{id}/content", cookie),
        ("GET", "/search?q={id}", cookie),
        ("POST", "/documents/{id}/cancel", cookie),
    ):
        answer = asked(place.app, method, path.replace("{id}", theirs), headers=headers)
        assert answer.status_code in (200, 404, 422), path

    assert read == []
    assert asked(place.app, "GET", f"/v1/documents/{own}", headers=place.customer).json()
    assert read == [own]


# ── Exports ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("＝1+1", "'＝1+1"),
        ("  =1", "'  =1"),
        ("\t=1", "'\t'=1"),
        ("\r=1", "'\r'=1"),
        ("\n=1", "'\n'=1"),
        ("\nplain", "'\nplain"),
        ("a;=cmd|' /C calc'!A0", "a;'=cmd|' /C calc'!A0"),
        ("a; =1;-2", "a;' =1;'-2"),
        ("a\n@x", "a\n'@x"),
        ("a\tb", "a\tb"),
        ("a-b;c=d, -e", "a-b;c=d, -e"),
        (["a;=1"], '["a;\'=1"]'),
        ([], ""),
        (-3, -3),
        (None, None),
    ],
)
def test_no_cell_of_a_table_begins_a_formula(value: Any, cell: Any) -> None:
    assert _cell(value) == cell


def test_a_name_with_a_formula_after_a_semicolon_is_text_in_the_export(tmp_path: Path) -> None:
    with Queue(tmp_path / "documents.db") as queue:
        app = make_app(queue, token=TOKEN)
        install(app)
        queue.submit("\n=1", payload=1, name="a;=2")

        table = asked(app, "GET", "/documents.csv", headers=entered(app)).text

    assert "\"'\n'=1\"" in table
    assert ",a;'=2," in table
