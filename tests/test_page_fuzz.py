"""Pages with hostile values in every form and query: never an internal error, on both stores."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from fairturn import Queue
from fairturn.dashboard import routes
from fairturn.dashboard.renderer import PageRoute
from fairturn.dashboard.routes import install
from fairturn.service.app import make_app
from fairturn.service.options import ServiceLimits
from tests.http_server import asked, key_for
from tests.page_contents import HOSTILE, fill
from tests.servers.queues import Databases

VISITS, VISITS_LONG = 250, 5_000
# An event stream does not end. The demo has no fields, and would run in threads for ten minutes.
LEFT_OUT = ("/page-events", "/demo/begin")
# Values that were internal errors somewhere.
SHARP = ("\x00", "--5", "x" * 300, "1" * 5_000)
HOSTILE_VALUES = (
    "",
    *SHARP,
    "a\x00b",
    "\ud800",
    "\ufffe",
    "-",
    "+",
    "-0",
    "0",
    "1e400",
    "-1e400",
    "nan",
    "inf",
    "9" * 19,
    str(1 << 63),
    str(-(1 << 63) - 1),
    "٣",
    "²",
    "0x10",
    "1_0",
    "2030-01-31T08:00",
    "9999-12-31T23:59:59.999999Z",
    "0001-01-01T00:00+23:59",
    "2030-02-30",
    "é" * 300,
    "x" * 70_000,
    "%",
    "%00",
    "_",
    "'",
    "''; DROP TABLE documents; --",
    "\\",
    "//evil.example",
    "/\\evil.example",
    "http://evil.example",
    "\r\nSet-Cookie: a=b",
    "[]",
    "{}",
    "true",
    *HOSTILE[:30],
)
USUAL = {
    "state": ["waiting", "running", "completed", "dead", "cancelled", "delayed"],
    "priority": ["1", "5", "9"],
    "action": ["cancel", "retry"],
    "sort": ["name", "count", "next", "waiting", "p50", "p95", "share", "weight", "limit"],
    "turned": ["1", "0"],
    "page": ["1", "2"],
    "size": ["10"],
    "looked": ["0", "10000"],
    "mode": ["fair", "levels", "equal", "fifo"],
    "reset": ["idle", "periodic"],
    "reset_interval_s": ["1500", "0.5"],
    "workers": ["1", "4"],
    "weights": ["Acme Logistics = 2", "a = b"],
    "weight": ["1", "2.5"],
    "limit": ["", "3"],
    "paused": ["true", "false"],
    "to": ["de", "en"],
    "back": ["/customers"],
    "next": ["/customers"],
    "documents": ["30"],
    "apart_s": ["10"],
    "submitted_from": ["2020-01-01T00:00", "1"],
    "submitted_before": ["2040-01-01T00:00", "1"],
    "q": ["scan", "Acme"],
    "tag": ["urgent"],
    "kind": ["ocr", "default"],
    "limits": ["true"],
    "attempts_max": ["", "3"],
    "done": ["saved"],
}


class PageForm(NamedTuple):
    """The fields of a route: those in the path, in the query and in the body."""

    method: str
    path: str
    query: tuple[str, ...]
    body: tuple[str, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """Every field, and one that the route does not have."""
        in_path = tuple(name for name in ("id", "name") if f"{{{name}}}" in self.path)
        return (*in_path, *self.query, *self.body, "unknown")


class Visit(NamedTuple):
    """A request for a page."""

    method: str
    url: str
    headers: dict[str, str]
    content: bytes


@pytest.fixture(params=["sqlite", "postgres"])
def queue(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Queue]:
    with ExitStack() as stack:
        place = str(tmp_path / "documents.db")
        if request.param == "postgres":
            place = stack.enter_context(Databases(recycled=True)).new()
        yield stack.enter_context(Queue(place))


@pytest.mark.parametrize("seed", [1])
def test_no_form_with_hostile_values_is_an_internal_error(queue: Queue, seed: int) -> None:
    assert visited(queue, SHARP, VISITS, seed) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", [2])
def test_none_of_5000_forms_with_hostile_values_is_an_internal_error(
    queue: Queue, seed: int
) -> None:
    assert visited(queue, HOSTILE_VALUES, VISITS_LONG, seed) == []


def visited(
    queue: Queue, values: tuple[str, ...], visits: int, seed: int
) -> list[tuple[Visit, str]]:
    """Visit pages, with each of these values in each field in random order, and return the visits
    that ended in an internal error."""
    chance = random.Random(seed)
    known = {**USUAL, "id": list(fill(queue, 40).values()), "customer": ["Acme Logistics"]}
    known["name"], known["after"] = known["customer"], known["id"]
    cookies = sessions(queue, app := app_of(queue))
    cases = [(form, field, v) for form in forms_of() for field in form.fields for v in values]
    chance.shuffle(cases)
    assert len(cases) >= visits, len(cases)
    wrong = []
    for form, field, value in cases[:visits]:
        visit = visit_of(chance, form, known, {field: value})
        # The other visits need the sessions.
        cookie = "" if form.path == "/logout" else chance.choice(cookies)
        try:
            answer = answered(app, visit, cookie)
        except Exception as error:  # also one that cuts a response off after its status
            wrong.append((visit, repr(error)))
            continue
        if answer.status_code >= 500:
            wrong.append((visit, answer.text[:200]))
    return wrong


def app_of(queue: Queue) -> FastAPI:
    app = make_app(queue, ServiceLimits(rate="100000/second"))
    install(app)
    return app


def sessions(queue: Queue, app: FastAPI) -> list[str]:
    """Return the cookies of an operator, twice because it may do most, a reader and a customer."""
    cookies = []
    for role, customer in (("operator", None), ("reader", None), ("customer", "Acme Logistics")):
        key = key_for(queue, customer, role)
        same = {"Sec-Fetch-Site": "same-origin"}
        response = asked(app, "POST", "/login", data={"key": key}, headers=same)
        cookies.append(response.headers["set-cookie"].partition(";")[0])
    return [cookies[0], *cookies]


def forms_of() -> list[PageForm]:
    """Return every page and form, by its own definition."""
    found: list[PageForm] = []
    for router in (routes.router, *(page.router for page in routes.PAGES)):
        for route in router.routes:
            if isinstance(route, PageRoute) and route.path not in LEFT_OUT:
                fields = route.dependant
                query, body = _names(fields.query_params), _names(fields.body_params)
                found += [
                    PageForm(method, route.path, query, body) for method in route.methods or ()
                ]
    return found


def _names(params: Any) -> tuple[str, ...]:
    names: list[str] = []
    for param in params:
        kind = param.field_info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            names += kind.model_fields
        else:
            names.append(param.alias)
    return tuple(names)


def visit_of(
    chance: random.Random, form: PageForm, known: dict[str, list[str]], hostile: dict[str, str]
) -> Visit:
    """Return a visit with these hostile values; other fields have usual ones or are missing."""

    def value(name: str) -> str:
        return hostile.get(name) or chance.choice(known.get(name, HOSTILE_VALUES))

    def pairs(names: tuple[str, ...]) -> list[tuple[str, str]]:
        given = [(name, value(name)) for name in names if name in hostile or chance.random() < 0.7]
        if given and chance.random() < 0.1:
            given.append(given[0])
        return given

    path = form.path
    for name in ("id", "name"):
        path = path.replace(f"{{{name}}}", _quoted(value(name)[:300]))
    unknown = ("unknown",) if "unknown" in hostile else ()
    query = _encoded([(name, each[:3_000]) for name, each in pairs((*form.query, *unknown))])
    headers = {"Sec-Fetch-Site": "same-origin"}
    content = b""
    if form.method == "POST":
        headers["Content-Type"], content = _body(chance, pairs(form.body or ("file", "key")))
    return Visit(form.method, path + (f"?{query}" if query else ""), headers, content)


def _body(chance: random.Random, pairs: list[tuple[str, str]]) -> tuple[str, bytes]:
    kind = chance.random()
    if kind < 0.6:
        return "application/x-www-form-urlencoded", _encoded(pairs).encode()
    if kind < 0.65:
        return chance.choice(["", "application/json", "text/plain", "multipart/form-data"]), b"{"
    boundary = chance.choice(["b", "b" * 70, "b" * 257, "b" * 1_000])
    parts = b"".join(
        b"--%b\r\nContent-Disposition: form-data; name=%b%b\r\n\r\n%b\r\n"
        % (
            boundary.encode(),
            _plain(name),
            b'; filename="a\x00.pdf"' if name == "file" else b"",
            each.encode("utf-8", "surrogatepass"),
        )
        for name, each in pairs
    )
    ending = b"--%b--\r\n" % boundary.encode() if chance.random() < 0.9 else b""
    return f"multipart/form-data; boundary={boundary}", parts + ending


def _plain(name: str) -> bytes:
    return b'"%b"' % name.encode("utf-8", "replace").replace(b"\r\n", b" ").replace(b'"', b"'")


def _encoded(pairs: list[tuple[str, str]]) -> str:
    return "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in pairs)


def _quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


def answered(app: FastAPI, visit: Visit, cookie: str) -> httpx.Response:
    headers = {**visit.headers, "Cookie": cookie}
    return asked(app, visit.method, visit.url, content=visit.content, headers=headers)
