"""Kinds of work on the page, before a browser draws it: lanes, tables, banners, forms, uploads."""

import re
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI

from fairturn import Queue
from fairturn.clock import ManualClock
from fairturn.dashboard.now import CHIPS
from fairturn.dashboard.routes import install
from fairturn.model import KindSettings
from fairturn.service.app import make_app
from tests.http_server import TOKEN, asked, entered, key_for
from tests.page_contents import fill

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


@pytest.fixture
def kinds(queue: Queue) -> Queue:
    """A queue with documents of three kinds, and a kind that is paused."""
    queue.set_kind("export", paused=True)
    queue.sign_on("gpu", 2, ["ocr"])
    for name, kind in (("a", "ocr"), ("b", "default"), ("c", "export"), ("d", "ocr")):
        queue.submit("acme", name=f"{name}.pdf", kind=kind)
    return queue


def opened(app: FastAPI, path: str, **more: str) -> httpx.Response:
    """Return a page as the operator of a queue without keys sees it, or as the holder of a key."""
    if "key" not in more:
        return asked(app, "GET", path, headers=entered(app))
    return asked(app, "GET", path, headers=session_of(app, more["key"]))


def session_of(app: FastAPI, key: str) -> dict[str, str]:
    response = asked(app, "POST", "/login", data={"key": key}, headers=SAME)
    return {"Cookie": response.headers["set-cookie"].partition(";")[0]}


def sent(app: FastAPI, path: str, **fields: str) -> httpx.Response:
    return asked(app, "POST", path, data=fields, headers={**entered(app), **SAME})


def text_of(response: httpx.Response) -> str:
    """Return the text of the page, with one space between words."""
    assert response.status_code == 200, response.text
    main = response.text.partition("<main")[2].partition("</main>")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", main).split())


def documents_in(response: httpx.Response) -> set[str]:
    return set(re.findall(r"\b[a-d]\.pdf", response.text))


def test_a_queue_with_the_default_kind_alone_shows_nothing_of_kinds(
    queue: Queue, app: FastAPI
) -> None:
    id = queue.submit("acme", name="a.pdf").id
    queue.sign_on("every", 2)
    acme = key_for(queue, "acme")

    for path in ("/", "/documents", f"/documents/{id}", "/customer?name=acme", "/customers"):
        assert "kind" not in opened(app, path, key=key_for(queue)).text.lower(), path
    assert "kind" not in opened(app, "/mine", key=acme).text.lower()


def test_lanes_are_those_of_all_kinds_or_of_one(kinds: Queue, app: FastAPI) -> None:
    every, of_all, ocr = opened(app, "/"), opened(app, "/?kind="), opened(app, "/?kind=ocr")

    assert documents_in(every) == documents_in(of_all) == {"a.pdf", "b.pdf", "c.pdf", "d.pdf"}
    assert documents_in(ocr) == {"a.pdf", "d.pdf"}
    assert "<option data-given selected>ocr</option>" in ocr.text
    assert "ocr Waiting 2 Running 0 Workers 1" in text_of(ocr)
    assert "selected" not in every.text


def test_the_explained_document_is_one_of_the_chosen_kind_at_the_same_moment() -> None:
    clock = ManualClock()
    with Queue(":memory:", clock=clock, kinds="open") as queue:
        app = make_app(queue, clock=clock, token=TOKEN)
        install(app)
        for kind in ("ocr", "text"):
            queue.submit("acme", name=f"{kind}.pdf", kind=kind)

        def explained(path: str) -> str:
            return opened(app, path).text.partition('id="why"')[2].partition("</section>")[0]

        assert "text.pdf" in explained("/")
        assert "ocr.pdf" in explained("/?kind=ocr")
        assert "text.pdf" in explained("/?kind=text")


def test_a_lane_of_one_kind_counts_as_far_as_it_is_read(queue: Queue, app: FastAPI) -> None:
    queue.set_kind("ocr")
    for n in range(CHIPS + 22):  # 21 in better priorities
        queue.submit("acme", kind="ocr", name=f"{n}.pdf")

    lanes = opened(app, "/?kind=ocr").text.partition('<ol class="lanes">')[2].partition("</ol>")[0]
    counts = re.findall(r'class="count" data-given>([\d+]+)<', lanes)
    ages = re.findall(r'waited so long" data-given>(–|<time)', lanes)

    assert counts == ["3", "2", "2", "2", "2", "2", "2", "6", "24+"]
    assert ages == [*["<time"] * 8, "–"]  # the oldest of the last lane may not be among those read


def test_a_kind_that_does_not_exist_is_not_found_and_a_wrong_one_invalid(
    kinds: Queue, app: FastAPI
) -> None:
    assert opened(app, "/?kind=orc").status_code == 404
    assert opened(app, "/?kind=OCR").status_code == 422
    assert opened(app, f"/?kind={'x' * 65}").status_code == 422
    assert opened(app, "/documents?kind=OCR").status_code == 422


def test_banners_name_paused_kinds_and_those_that_no_running_worker_serves(
    kinds: Queue, app: FastAPI
) -> None:
    shown = text_of(opened(app, "/"))

    assert "Documents wait for 1 kind of work that no running worker serves: default (1)" in shown
    assert "1 kind of work is paused: export (1)" in shown
    kinds.sign_on("every", 2)
    kinds.set_kind("export", paused=False)
    app.state.page.trail.sample()
    assert "no running worker" not in (shown := text_of(opened(app, "/")))
    assert "paused" not in shown
    kinds.sign_off("every")
    kinds.sign_off("gpu")
    app.state.page.trail.sample()
    assert "No worker is running." in (shown := text_of(opened(app, "/")))
    assert "no running worker" not in shown


def test_documents_are_filtered_listed_and_changed_by_kind(kinds: Queue, app: FastAPI) -> None:
    every, ocr = opened(app, "/documents"), opened(app, "/documents?kind=ocr")

    assert documents_in(ocr) == {"a.pdf", "d.pdf"}
    assert '<th scope="col">Kind</th>' in every.text
    assert "<option data-given selected>ocr</option>" in ocr.text
    assert "/documents.csv?kind=ocr" in ocr.text
    assert "Kind" not in text_of(opened(app, "/documents?kind=default")).replace("Kind of", "")
    two = opened(app, "/documents?kind=ocr&kind=export")
    assert documents_in(two) == {"a.pdf", "c.pdf", "d.pdf"}
    assert '<input type="hidden" name="kind" value="export">' in two.text
    asking = opened(app, "/documents-bulk?action=cancel&kind=ocr")
    assert "Cancel 2 documents?" in (text := text_of(asking))
    assert "Kind of work : ocr" in text.replace(":", " :")
    assert sent(app, "/documents-bulk", action="cancel", kind="ocr").status_code == 303
    assert [document.kind for document in kinds.iterate(states="cancelled")] == ["ocr", "ocr"]
    exported = opened(app, "/documents.csv?kind=export").text.splitlines()
    assert exported[0].endswith(",kind")
    assert exported[1].endswith(",export")


def test_a_document_shows_its_kind(kinds: Queue, app: FastAPI) -> None:
    ocr, plain = (next(iter(kinds.iterate(kinds=kind))) for kind in ("ocr", "default"))

    assert "Kind of work ocr" in text_of(opened(app, f"/documents/{ocr.id}"))
    assert "Kind of work" not in text_of(opened(app, f"/documents/{plain.id}"))


def test_an_operator_sees_limits_pauses_and_creates_kinds(kinds: Queue, app: FastAPI) -> None:
    assert "ocr 2 0 1 – 5" in text_of(opened(app, "/kinds"))
    assert "export paused 1 0 0 – 5" in text_of(opened(app, "/kinds"))
    assert "default no worker 1 0 0 – 5" in text_of(opened(app, "/kinds"))

    limits = {"name": "ocr", "limits": "true"}
    response = sent(app, "/kinds", **limits, limit="2", attempts_max="3")
    assert response.headers["location"] == "/kinds?done=saved"
    assert kinds.kind("ocr").settings == KindSettings(limit=2, attempts_max=3)
    assert "It is in force now." in text_of(opened(app, "/kinds?done=saved"))
    assert sent(app, "/kinds", name="ocr", paused="true").status_code == 303
    assert kinds.kind("ocr").settings == KindSettings(limit=2, attempts_max=3, paused=True)
    assert sent(app, "/kinds", **limits, limit="", attempts_max="").status_code == 303
    assert kinds.kind("ocr").settings == KindSettings(paused=True)
    assert sent(app, "/kinds", name="new").status_code == 303
    assert kinds.kind("new").settings == KindSettings()


def test_creating_a_kind_that_exists_changes_nothing(kinds: Queue, app: FastAPI) -> None:
    kinds.set_kind("ocr", limit=2)

    assert sent(app, "/kinds", name="ocr").status_code == 303
    assert kinds.kind("ocr").settings == KindSettings(limit=2)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "OCR"},
        {"name": ""},
        {"name": "x" * 65},
        {"name": "ocr", "limits": "true", "limit": "0"},
        {"name": "ocr", "limits": "true", "limit": "many"},
        {"name": "ocr", "limits": "true", "attempts_max": "-1"},
        {"name": "ocr", "paused": "perhaps"},
    ],
)
def test_wrong_settings_are_a_page_that_says_so(
    kinds: Queue, app: FastAPI, fields: dict[str, str]
) -> None:
    before = kinds.kinds()

    assert sent(app, "/kinds", **fields).status_code == 422
    assert kinds.kinds() == before


def test_a_reader_sees_kinds_and_cannot_change_them_and_a_customer_sees_none(
    kinds: Queue, app: FastAPI
) -> None:
    key_for(kinds)
    reader, acme = key_for(kinds, role="reader"), key_for(kinds, "acme")

    seen = opened(app, "/kinds", key=reader)
    assert "export" in text_of(seen)
    assert 'action="/kinds"' not in seen.text
    assert opened(app, "/kinds", key=acme).status_code == 403
    for key in (reader, acme):
        data, headers = {"name": "ocr", "paused": "true"}, session_of(app, key) | SAME
        change = asked(app, "POST", "/kinds", data=data, headers=headers)
        assert change.status_code == 403
    assert not kinds.kind("ocr").settings.paused


def test_a_form_of_another_site_changes_no_kind(kinds: Queue, app: FastAPI) -> None:
    cookie = session_of(app, key_for(kinds))
    foreign = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}
    for headers in ({}, foreign):
        data = {"name": "ocr", "paused": "true"}
        response = asked(app, "POST", "/kinds", data=data, headers=cookie | headers)
        assert response.status_code == 403
    assert not kinds.kind("ocr").settings.paused


def test_a_customer_uploads_for_a_kind_and_is_told_of_its_own_kinds_alone(
    kinds: Queue, app: FastAPI
) -> None:
    kinds.configure(kinds="open")
    kinds.submit("rival", kind="merger-with-initech")
    cookie = session_of(app, key_for(kinds, "acme")) | SAME
    raw = {**cookie, "Content-Type": "application/octet-stream"}

    page = asked(app, "GET", "/mine", headers=cookie)
    options = re.findall(r'<option value="([^"]*)">', page.text)
    form = asked(
        app, "POST", "/mine", data={"kind": "ocr"}, files={"file": ("e.pdf", b"e")}, headers=cookie
    )
    script = asked(app, "POST", "/mine?name=f.pdf&kind=export", content=b"f", headers=raw)

    assert options == ["default", "export", "ocr"]
    assert "initech" not in page.text
    assert '<th scope="col">Kind</th>' in page.text
    assert (form.status_code, script.status_code) == (303, 201)
    assert [(d.name, d.kind) for d in kinds.iterate(customer="acme")][:2] == [
        ("f.pdf", "export"),
        ("e.pdf", "ocr"),
    ]
    kinds.configure(kinds="known")
    refused = asked(app, "POST", "/mine?name=g.pdf&kind=orc", content=b"g", headers=raw)
    assert refused.status_code == 422
    assert "The queue does not accept this kind of work." in refused.text


def test_a_full_page_shows_kinds_beside_hostile_names(queue: Queue, app: FastAPI) -> None:
    fill(queue)

    shown = text_of(opened(app, "/"))

    assert "no running worker serves: classify (1)" in shown
    assert "is paused: export (1)" in shown
    assert "default, ocr" in shown  # the kinds of the worker
