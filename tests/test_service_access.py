"""Authorization: keys, roles, addresses; and no customer learns of other customers' documents."""

import asyncio
import itertools
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from fairturn import Queue
from fairturn.access.registry import KeyRegistry
from fairturn.clock import ManualClock
from fairturn.service.app import make_app
from fairturn.service.concurrency import network_of
from fairturn.service.logs import AccessLogEntry, LogFormatter
from fairturn.service.options import REFUSED_PER_MINUTE, ServiceLimits
from fairturn.service.rates import RateLimiter
from tests.commands import claim, complete, kill
from tests.http_server import TOKEN, asked, bearer, client_of, code_of, key_for

NOBODYS = "0123456789abcde"


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db") as queue:
        yield queue


@pytest.fixture
def app(queue: Queue) -> FastAPI:
    return make_app(queue, token=TOKEN)


def operations(app: FastAPI) -> list[tuple[str, str, dict[str, Any]]]:
    """Return every operation of the description: method, path, and its definition."""
    return [
        (method.upper(), path, operation)
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    ]


PUBLIC = {"/v1/rule", "/livez", "/readyz"}
OPERATORS_ONLY = {
    ("POST", "/v1/customers"),
    ("POST", "/v1/customers/purge"),
    ("PATCH", "/v1/kinds/{name}"),
    ("POST", "/v1/outages/resume"),
    ("PATCH", "/v1/settings"),
    ("POST", "/v1/bulk"),
    ("GET", "/v1/keys"),
    ("POST", "/v1/keys"),
    ("POST", "/v1/keys/{id}/rotate"),
    ("POST", "/v1/keys/{id}/revoke"),
}
NOT_FOR_CUSTOMERS = OPERATORS_ONLY | {
    ("GET", "/v1/customers"),
    ("GET", "/v1/kinds"),
    ("GET", "/v1/kinds/{name}"),
    ("GET", "/v1/outages"),
    ("GET", "/v1/summary"),
    ("GET", "/v1/workers"),
    ("GET", "/v1/settings"),
    ("GET", "/metrics"),
}
NOT_FOR_READERS = OPERATORS_ONLY | {
    ("POST", "/v1/documents"),
    ("POST", "/v1/documents/batch"),
    ("POST", "/v1/documents/cancel"),
    ("POST", "/v1/documents/retry"),
    ("GET", "/v1/room"),
    ("POST", "/v1/documents/{id}/cancel"),
    ("POST", "/v1/documents/{id}/retry"),
}
BODIES: dict[str, Any] = {
    "/v1/documents/batch": {
        "content": '{"payload": 1}',
        "headers": {"Content-Type": "application/x-ndjson"},
    },
    "/v1/documents/cancel": {"json": {"ids": [NOBODYS]}},
    "/v1/documents/retry": {"json": {"ids": [NOBODYS]}},
    "/v1/customers": {"json": {"name": "x"}},
    "/v1/customers/purge": {"json": {"name": "x", "dry_run": False}},
    "/v1/kinds/{name}": {"json": {"paused": True}},
    "/v1/outages/resume": {"json": {"service": "azure-ocr"}},
    "/v1/bulk": {"json": {"action": "cancel", "filter": {}, "dry_run": False}},
    "/v1/keys": {"json": {"role": "operator"}},
    "/v1/keys/{id}/rotate": {"json": {}},
    "/v1/settings": {"json": {"attempts_max": 1}},
    "/v1/documents": {"json": 1},
}


def called(
    app: FastAPI, method: str, path: str, key: str | None, id: str = NOBODYS
) -> httpx.Response:
    more = dict(BODIES.get(path, {}) if method != "GET" else {})
    headers = {**more.pop("headers", {}), **({} if key is None else bearer(key))}
    path = path.replace("{id}", id).replace("{name}", "default")
    return asked(app, method, path, headers=headers, **more)


# ── Keys and roles ───────────────────────────────────────────────────────────────────────────────


def test_every_operation_but_the_public_ones_asks_for_a_key(queue: Queue, app: FastAPI) -> None:
    key_for(queue)
    for method, path, operation in operations(app):
        if path in PUBLIC:
            assert called(app, method, path, None).status_code == 200
            continue
        assert operation["security"] == [{"key": []}], path
        assert code_of(called(app, method, path, None)) == (401, "key_missing"), path
        for wrong in ("ft_nonsense", f"ft_{'0' * 12}_{'0' * 64}", "ä", ""):
            answer = asked(
                app,
                method,
                path.replace("{id}", NOBODYS),
                headers={"Authorization": f"Bearer {wrong}".encode()},
                address="127.0.0.9",
            )
            assert answer.status_code in (401, 429), path


@pytest.mark.parametrize(
    "role, refused", [("customer", NOT_FOR_CUSTOMERS), ("reader", NOT_FOR_READERS)]
)
def test_a_key_opens_what_its_role_is_for_and_nothing_else(
    queue: Queue, app: FastAPI, role: str, refused: set[tuple[str, str]]
) -> None:
    key = key_for(queue, "acme" if role == "customer" else None, role)
    before, kinds = queue.settings, queue.kinds()

    for method, path, _ in operations(app):
        if path == "/v1/events":
            continue  # it does not end
        answer = called(app, method, path, key)
        if (method, path) in refused:
            assert code_of(answer) == (403, "not_allowed"), path
        else:
            assert answer.status_code != 403, path

    assert queue.settings == before
    assert [kind.settings for kind in queue.kinds()] == [kind.settings for kind in kinds]
    assert len(KeyRegistry(queue.store).list()) == 1


def test_a_revoked_key_opens_nothing_at_once(queue: Queue, app: FastAPI) -> None:
    key, other = key_for(queue), key_for(queue)
    assert called(app, "GET", "/v1/me", key).status_code == 200

    id = called(app, "GET", "/v1/me", key).json()["key"]
    assert asked(app, "POST", f"/v1/keys/{id}/revoke", headers=bearer(other)).status_code == 200

    assert code_of(called(app, "GET", "/v1/me", key)) == (401, "key_unknown")


def test_a_key_is_shown_once_and_nowhere_else(queue: Queue, app: FastAPI, tmp_path: Path) -> None:
    key = key_for(queue)
    made = asked(
        app,
        "POST",
        "/v1/keys",
        headers=bearer(key),
        json={"role": "customer", "customer": "acme", "name": "scanner"},
    )
    shown = made.json()["shown"]
    secret = shown.rpartition("_")[2]

    assert made.status_code == 201
    assert called(app, "GET", "/v1/me", shown).json()["customer"]["name"] == "acme"
    listed = called(app, "GET", "/v1/keys", key)
    assert {each["name"] for each in listed.json()["keys"]} == {"", "scanner"}
    assert any(each["used_at"] for each in listed.json()["keys"])
    assert secret not in listed.text
    queue.close()
    for file in tmp_path.iterdir():
        if file.is_file():
            assert secret.encode() not in file.read_bytes()


def test_the_first_key_is_an_operators(queue: Queue, app: FastAPI) -> None:
    wanted = {"role": "customer", "customer": "acme"}

    assert code_of(asked(app, "POST", "/v1/keys", json=wanted, headers=bearer(TOKEN))) == (
        409,
        "wrong_state",
    )
    first = asked(app, "POST", "/v1/keys", json={"role": "operator"}, headers=bearer(TOKEN))
    key = first.json()["shown"]
    made = asked(app, "POST", "/v1/keys", json=wanted, headers=bearer(key))

    assert made.status_code == 201


def test_a_rotated_key_gives_way_to_the_new_one(queue: Queue, app: FastAPI) -> None:
    key = key_for(queue)
    id = called(app, "GET", "/v1/me", key).json()["key"]

    new = asked(app, "POST", f"/v1/keys/{id}/rotate", headers=bearer(key), json={}).json()

    assert called(app, "GET", "/v1/me", new["shown"]).status_code == 200
    assert code_of(called(app, "GET", "/v1/me", key)) == (401, "key_unknown")


# ── Other customers ──────────────────────────────────────────────────────────────────────────────


def in_every_state(queue: Queue, customer: str) -> list[str]:
    """Create documents of a customer, of both kinds, in all states; no other document may wait."""
    completed = queue.submit(customer, content=b"x" * 70_000, name=f"secret of {customer}").id
    assert complete(queue) == [completed]
    dead = queue.submit(customer, payload=1, metadata={"secret": customer}).id
    assert kill(queue) == [dead]
    running = queue.submit(customer, payload=1).id
    assert [claimed.document.id for claimed in claim(queue)] == [running]
    cancelled = queue.submit(customer, payload=1).id
    queue.cancel(cancelled)
    delayed = queue.submit(customer, payload=1, due_at=1 << 52).id
    return [completed, dead, running, cancelled, delayed]


def places_of(operation: dict[str, Any]) -> set[tuple[str, str]]:
    """Return where the operation takes an id or the name of a customer."""
    named = {(each["in"], each["name"]) for each in operation.get("parameters", [])}
    places = {each for each in named if each[1] in ("id", "after", "parent", "customer")}
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if schema.get("$ref", "").endswith("/ToChange"):
        places.add(("body", "ids"))
    return places


def named_with(
    app: FastAPI, key: str, operation: tuple[str, str], place: tuple[str, str], name: str
) -> httpx.Response:
    """Return the response of an operation with this value in that place."""
    method, path = operation
    where, field = place
    more = dict(BODIES.get(path, {}) if method != "GET" else {})
    headers = {**more.pop("headers", {}), **bearer(key)}
    if where == "query":
        more["params"] = {field: name}
    elif where == "body":
        more["json"] = {field: [name]}
    path = path.replace("{id}", name if where == "path" else NOBODYS)
    return asked(app, method, path, headers=headers, **more)


def test_what_is_somebody_elses_is_answered_byte_for_byte_like_what_is_not_there(
    queue: Queue, app: FastAPI
) -> None:
    """Every place of every operation that takes a name, with every customer's key and all that
    every other customer has."""
    customers = ("acme", "bolt")
    documents = {customer: in_every_state(queue, customer) for customer in customers}
    keys = {customer: key_for(queue, customer) for customer in customers}
    access = {customer: [keys[customer].split("_")[1]] for customer in customers}
    before = [queue.get(id) for ids in documents.values() for id in ids]
    tried = 0

    for method, path, operation in operations(app):
        for place in places_of(operation):
            for mine, theirs in itertools.permutations(customers):
                names = access if "/keys/" in path else documents
                foreign, nobodys = names[theirs], NOBODYS
                if place[1] == "customer":
                    foreign, nobodys = [theirs], "nobody"
                missing = named_with(app, keys[mine], (method, path), place, nobodys)
                for name in foreign:
                    answer = named_with(app, keys[mine], (method, path), place, name)
                    assert answer.content == missing.content, (method, path, place)
                    assert answer.status_code == missing.status_code, (method, path, place)
                    assert dict(answer.headers) == dict(missing.headers), (method, path, place)
                    assert theirs not in answer.text
                    tried += 1

    assert tried > 100
    assert [queue.get(id) for ids in documents.values() for id in ids] == before
    assert [queue.customer(customer).count for customer in customers] == [-4, -4]


def test_a_customer_cannot_name_another_customer(queue: Queue, app: FastAPI) -> None:
    key = key_for(queue, "acme")
    queue.submit("other", payload=1)
    before = queue.customer("other")

    for answer in (
        asked(app, "POST", "/v1/documents?customer=other", json=1, headers=bearer(key)),
        asked(
            app,
            "POST",
            "/v1/documents/batch",
            content='{"customer": "other", "payload": 1}',
            headers={**bearer(key), "Content-Type": "application/x-ndjson"},
        ),
        asked(app, "GET", "/v1/documents?customer=other", headers=bearer(key)),
        asked(app, "GET", "/v1/documents?customer=acme", headers=bearer(key)),
    ):
        assert code_of(answer) == (422, "invalid")

    assert queue.customer("other") == before
    assert asked(app, "GET", "/v1/documents", headers=bearer(key)).json()["documents"] == []


def test_a_foreign_parent_gives_no_priority_and_no_answer(queue: Queue, app: FastAPI) -> None:
    key = key_for(queue, "acme")
    theirs = queue.submit("other", payload=1).id

    answers = [
        asked(app, "POST", f"/v1/documents?parent={id}", json=1, headers=bearer(key))
        for id in (theirs, NOBODYS)
    ]

    assert [code_of(answer) for answer in answers] == [(422, "parent_unknown")] * 2
    assert answers[0].content == answers[1].content


def test_a_page_after_a_foreign_document_is_answered_like_one_after_nothing(
    queue: Queue, app: FastAPI
) -> None:
    """Otherwise the response would reveal that the document exists, and its place among one's
    own."""
    key = key_for(queue, "acme")
    own = [queue.submit("acme", payload=1).id]
    theirs = queue.submit("other", payload=1).id
    own += [queue.submit("acme", payload=1).id]

    def listed(after: str) -> httpx.Response:
        return asked(app, "GET", f"/v1/documents?after={after}", headers=bearer(key))

    assert code_of(listed(theirs)) == (422, "invalid")
    assert listed(theirs).content == listed(NOBODYS).content
    assert [each["id"] for each in listed(own[1]).json()["documents"]] == own[:1]


# ── Addresses ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "headers, code",
    [
        ({}, None),
        ({"Host": "localhost:8750"}, None),
        ({"Host": "[::1]:8750"}, None),
        ({"Host": "[::1]"}, None),
        ({"Host": "127.0.0.1"}, None),
        ({"Host": ""}, "origin_unknown"),
        ({"Host": "evil.example"}, "origin_unknown"),
        ({"Host": "127.0.0.1.evil.example:8750"}, "origin_unknown"),
        ({"Origin": "http://127.0.0.1:8750"}, None),
        ({"Origin": "http://evil.example"}, "origin_unknown"),
        ({"Origin": "null"}, "origin_unknown"),
        ({"Sec-Fetch-Site": "cross-site"}, "origin_unknown"),
        ({"X-Forwarded-For": "203.0.113.9"}, "https_needed"),
        ({"X-Forwarded-Proto": "http"}, "https_needed"),
        ({"Forwarded": "for=203.0.113.9"}, "https_needed"),
        ({"Via": "1.1 proxy"}, "https_needed"),
        ({"X-Real-IP": "203.0.113.9"}, "https_needed"),
    ],
)
def test_without_keys_only_who_sits_at_the_machine_is_the_operator(
    app: FastAPI, headers: dict[str, str], code: str | None
) -> None:
    answer = asked(app, "GET", "/v1/summary", headers={**headers, **bearer(TOKEN)})
    without_token = asked(app, "GET", "/v1/summary", headers=headers)

    assert answer.status_code == 200 if code is None else code_of(answer)[1] == code
    assert code_of(without_token) == (401, "key_missing")


@pytest.mark.parametrize("token", [{}, bearer(TOKEN)])
def test_without_keys_nobody_from_elsewhere_gets_in(app: FastAPI, token: dict[str, str]) -> None:
    elsewhere: dict[str, Any] = {"address": "203.0.113.9", "headers": token}
    plain = asked(app, "GET", "/v1/summary", **elsewhere)
    encrypted = asked(app, "GET", "/v1/summary", base="https://127.0.0.1", **elsewhere)

    assert code_of(plain) == ((403, "https_needed") if token else (401, "key_missing"))
    assert code_of(encrypted) == (401, "key_missing")


def test_without_keys_every_request_needs_the_token_of_the_process(
    queue: Queue, app: FastAPI
) -> None:
    """Behind a proxy on this machine that adds no header, every stranger looks local."""
    for method, path, _ in operations(app):
        if path in PUBLIC:
            continue
        assert code_of(called(app, method, path, None)) == (401, "key_missing"), path
        other = TOKEN[:-1] + "0"
        assert code_of(called(app, method, path, other))[0] in (401, 429), path

    missing = called(app, "GET", "/v1/summary", None)
    assert "the token that the service printed" in missing.json()["detail"]
    assert called(app, "GET", "/v1/summary", TOKEN).json()["waiting"] == 0
    assert code_of(called(make_app(queue), "GET", "/v1/summary", TOKEN)) == (401, "key_unknown")


def test_after_the_first_key_the_token_opens_nothing_even_if_no_key_is_left(
    queue: Queue, app: FastAPI
) -> None:
    queue.submit("acme", payload=1)
    key_for(queue, "acme")
    keyed = code_of(called(app, "GET", "/v1/summary", TOKEN))

    queue.purge("acme")

    assert not queue.keys.are_required()
    assert keyed == (401, "key_unknown")
    assert code_of(called(app, "GET", "/v1/summary", TOKEN)) == (401, "key_unknown")
    assert code_of(called(app, "GET", "/v1/summary", None)) == (401, "key_missing")


def test_a_key_from_elsewhere_is_refused_unless_it_came_encrypted(
    queue: Queue, app: FastAPI
) -> None:
    key = bearer(key_for(queue))

    plain = asked(app, "GET", "/v1/me", address="203.0.113.9", headers=key)
    encrypted = asked(
        app, "GET", "/v1/me", address="203.0.113.9", headers=key, base="https://fair.example"
    )
    lied = asked(
        app,
        "GET",
        "/v1/me",
        address="203.0.113.9",
        headers={**key, "X-Forwarded-Proto": "https"},
    )

    behind_a_proxy = asked(app, "GET", "/v1/me", headers={**key, "X-Forwarded-For": "203.0.113.9"})

    assert code_of(plain) == code_of(lied) == (403, "https_needed")
    assert code_of(behind_a_proxy) == (403, "https_needed")
    assert encrypted.status_code == 200


# ── Rates ────────────────────────────────────────────────────────────────────────────────────────


def test_a_key_that_asks_too_often_is_told_when_to_come_again(queue: Queue) -> None:
    keys = [bearer(key_for(queue, name)) for name in ("acme", "other")]
    app = make_app(queue, ServiceLimits(rate="3/hour"))

    answers = [asked(app, "GET", "/v1/me", headers=keys[0]) for _ in range(4)]

    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert code_of(answers[3]) == (429, "rate_limited")
    assert 0 < int(answers[3].headers["retry-after"]) <= 3_600
    assert asked(app, "GET", "/v1/me", headers=keys[1]).status_code == 200


def test_a_window_ends_by_the_clock_and_old_ones_are_forgotten() -> None:
    clock = ManualClock(1_800_000_000_000_000)
    rates = RateLimiter("2/minute", clock)

    waits = [rates.seconds_to_wait("a") for _ in range(3)]
    clock.advance(59)
    late = rates.seconds_to_wait("a")
    clock.advance(1)

    assert (waits, late) == ([0, 0, 60], 1)
    assert rates.seconds_to_wait("a") == 0
    for n in range(30_000):
        rates.seconds_refused(f"2001:db8::{n:x}")
        clock.advance(0.01)
    assert rates.seconds_refused("2001:db8::1") == 0
    assert len(rates._windows) < 20_100


def test_wrong_keys_lock_out_only_wrong_keys(queue: Queue, app: FastAPI) -> None:
    """Other customers may share the address of the client that guesses."""
    key = bearer(key_for(queue))

    def ask(headers: dict[str, str], address: str = "127.0.0.2") -> httpx.Response:
        return asked(app, "GET", "/v1/me", headers=headers, address=address)

    guesses = [ask(bearer("ft_x")) for _ in range(REFUSED_PER_MINUTE + 1)]

    assert {code_of(each) for each in guesses[:-1]} == {(401, "key_unknown")}
    assert code_of(guesses[-1]) == (429, "rate_limited")
    assert 0 < int(guesses[-1].headers["retry-after"]) <= 60
    assert ask(key).status_code == 200
    assert code_of(ask(bearer("ft_x"), "127.0.0.3")) == (401, "key_unknown")


def test_anonymous_requests_are_limited_by_address_and_keys_are_not(queue: Queue) -> None:
    key = bearer(key_for(queue))
    app = make_app(queue, ServiceLimits(anonymous_per_minute=3))

    for path in ("/v1/rule", "/openapi.json", "/docs", "/v1/rule"):
        answer = asked(app, "GET", path)
    missing = asked(app, "GET", "/v1/me")

    assert code_of(answer) == code_of(missing) == (429, "rate_limited")
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert asked(app, "GET", "/v1/rule", address="127.0.0.2").status_code == 200
    assert asked(app, "GET", "/v1/me", headers=key).status_code == 200
    assert asked(app, "GET", "/livez").status_code == 200  # a probe may share the address


@pytest.mark.parametrize(
    "address, network",
    [
        ("203.0.113.9", "203.0.113.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.9", "::ffff:203.0.113.9"),
        ("a socket", "a socket"),
        ("", ""),
    ],
)
def test_a_client_is_counted_by_the_network_that_it_can_choose_addresses_from(
    address: str, network: str
) -> None:
    assert network_of(address) == network


# ── Words ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "language, title",
    [
        ("en", "This needs an access key."),
        ("de", "Dafür ist ein Zugangsschlüssel nötig."),
        ("es", "Para esto hace falta una clave de acceso."),
        ("pl", "Do tego potrzebny jest klucz dostępu."),
        ("pt-BR", "Isso requer uma chave de acesso."),
        ("tlh", "This needs an access key."),
    ],
)
def test_a_problem_says_what_is_wrong_in_the_language_of_who_asks(
    queue: Queue, app: FastAPI, language: str, title: str
) -> None:
    key_for(queue)

    answer = asked(app, "GET", "/v1/me", headers={"Accept-Language": language})

    assert code_of(answer) == (401, "key_missing")
    assert answer.json()["title"] == title


def test_a_log_has_no_key_no_query_and_no_name_in_it(queue: Queue) -> None:
    served: list[AccessLogEntry] = []
    key = key_for(queue, "acme")
    app = make_app(queue, on_served=served.append)

    asked(app, "POST", "/v1/documents?name=secret", json=1, headers=bearer(key))

    (one,) = served
    assert (one.method, one.route, one.status) == ("POST", "/v1/documents", 201)
    assert one.key == key.split("_")[1]
    said = json.dumps(one._asdict())
    assert key.split("_")[2] not in said
    assert "secret" not in said
    assert "acme" not in said


def test_what_the_server_says_is_one_line_of_json_too() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord(
            "uvicorn.error", logging.ERROR, "", 0, "Exception in %s", ("app",), sys.exc_info()
        )

    line = LogFormatter().format(record)

    assert "\n" not in line
    told = json.loads(line)
    assert (told["level"], told["message"]) == ("error", "Exception in app")
    assert "ValueError: two\nlines" in told["traceback"]


def test_a_mistake_of_the_service_is_a_problem_without_details(queue: Queue, app: FastAPI) -> None:
    def fail() -> None:
        raise ValueError("a secret of ours")

    app.add_api_route("/mistake", fail)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get("/mistake", headers={"Accept-Language": "es"})

    answer = asyncio.run(ask())

    assert code_of(answer) == (500, "internal")
    assert answer.json()["title"] == "Algo ha fallado en el servicio."
    assert "secret" not in answer.text


def test_a_store_that_does_not_answer_is_told_with_when_to_come_again(
    queue: Queue, app: FastAPI
) -> None:
    queue.close()

    answer = asked(app, "GET", "/v1/summary", headers=bearer(TOKEN))

    assert code_of(answer) == (503, "unavailable")
    assert int(answer.headers["retry-after"]) > 0


def test_what_is_nowhere_is_a_problem_too(queue: Queue) -> None:
    with client_of(queue) as client:
        assert code_of(client.get("/nowhere")) == (404, "not_found")
        assert code_of(client.get("/v1/me/")) == (404, "not_found")
        assert code_of(client.delete("/v1/me")) == (405, "method_not_allowed")
        assert client.delete("/v1/me").headers["allow"] == "GET"
