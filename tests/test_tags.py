"""Tags of documents, and the filter "has all of", in Python, over HTTP, on the command line and on
the page."""

import csv
import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest

from fairturn import Client, KeyReused, Queue
from fairturn.dashboard.routes import install
from fairturn.model import TAG_BYTES_MAX, TAGS_MAX
from fairturn.service.app import make_app
from tests.commands import fairturn, lines_of
from tests.http_server import TOKEN, asked, entered, served


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.chdir(tmp_path)
    with Queue("documents.db") as opened:
        yield opened


def test_a_document_is_found_by_all_of_the_tags_that_are_required(queue: Queue) -> None:
    both = queue.submit("acme", tags=["scan", "late", "scan"]).id
    one = queue.submit("acme", content=b"x", tags=("scan",)).id
    queue.submit("acme", tags=[])

    assert queue.get(both).tags == ("late", "scan")
    assert [d.id for d in queue.iterate(tags="scan")] == [one, both]
    assert [d.id for d in queue.iterate(tags=["scan", "late"])] == [both]
    assert [d.tags for d in queue.iterate()] == [(), ("scan",), ("late", "scan")]
    assert len(list(queue.iterate(tags=[]))) == 3


@pytest.mark.parametrize(
    ("tags", "error", "sentence"),
    [
        ("scan", TypeError, "tags is 'scan'; it must be a list of texts"),
        ([1], TypeError, "tag"),
        ([""], ValueError, "tag"),
        (["x" * (TAG_BYTES_MAX + 1)], ValueError, "tag"),
        ([str(n) for n in range(TAGS_MAX + 1)], ValueError, "17 tags were given; at most 16"),
    ],
)
def test_tags_that_are_wrong_are_refused(
    queue: Queue, tags: object, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        queue.submit("acme", tags=tags)  # type: ignore[arg-type]

    assert queue.summary().waiting == 0


def test_other_tags_with_the_same_key_are_another_document(queue: Queue) -> None:
    queue.submit("acme", key="k", tags=["b", "a"])

    assert queue.submit("acme", key="k", tags=["a", "b"]).replayed
    with pytest.raises(KeyReused):
        queue.submit("acme", key="k", tags=["a"])


def test_the_command_line_submits_and_filters_by_tags(queue: Queue) -> None:
    lines = '{"customer":"acme","tags":["scan","late"]}\n{"customer":"acme"}\n'
    Path("many.ndjson").write_text(lines)
    fairturn("submit", "acme", "--payload", "1", "--tag", "scan")
    fairturn("submit", "--ndjson", "many.ndjson")

    found = lines_of(fairturn("list", "--tag", "scan", "--json"))
    assert [line["tags"] for line in found] == [["late", "scan"], ["scan"]]
    assert len(lines_of(fairturn("list", "--tag", "scan", "--tag", "late", "--json"))) == 1
    assert "late, scan" in fairturn("show", found[0]["id"]).stdout
    assert fairturn("cancel", "--tag", "late", "--yes").exit_code == 0
    assert [d.tags for d in queue.iterate(states="cancelled")] == [("late", "scan")]


def test_the_service_and_its_client_submit_and_filter_by_tags(queue: Queue) -> None:
    with served(queue) as url, Client(url, TOKEN) as client:
        for fields in ({"payload": 1}, {"content": b"x"}, {"content": b"y" * 100_000}):
            receipt = client.submit("acme", tags=["scan", "late"], **fields)
            assert client.get(receipt.id).tags == ("late", "scan")
        client.submit("acme", tags=["scan"])

        assert len(list(client.iterate(tags="scan"))) == 4
        assert len(list(client.iterate(tags=["late", "scan"]))) == 3
        assert [d.tags for d in client.iterate()] == [d.tags for d in queue.iterate()]


def test_the_page_filters_and_exports_tags(queue: Queue) -> None:
    app = make_app(queue, token=TOKEN)
    install(app)
    cookie = entered(app)
    queue.submit("acme", name="first.pdf", tags=["scan", "late"])
    queue.submit("acme", name="second.pdf", tags=["scan"])

    shown = asked(app, "GET", "/documents?tag=late", headers=cookie).text
    assert "first.pdf" in shown
    assert "second.pdf" not in shown
    assert 'name="tag" value="late"' in shown

    exported = asked(app, "GET", "/documents.csv?tag=scan", headers=cookie).text
    rows = list(csv.DictReader(StringIO(exported)))
    assert [json.loads(row["tags"]) for row in rows] == [["scan"], ["late", "scan"]]
    (only,) = asked(app, "GET", "/documents.json?tag=scan&tag=late", headers=cookie).json()
    assert only["tags"] == ["late", "scan"]
