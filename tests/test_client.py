"""The client returns what the queue returns: the same scenarios through three interfaces, with the
same values and errors."""

import asyncio
import hashlib
import inspect
import io
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, UploadFile

from fairturn import (
    AsyncClient,
    Client,
    Completed,
    Document,
    ExpiryPassed,
    KeyReused,
    KindRefused,
    NotAllowed,
    NotFound,
    Queue,
    QueueFull,
    Receipt,
    Submission,
    WrongState,
)
from fairturn.access.registry import KeyRegistry
from fairturn.explain.sentences import tell
from fairturn.model import Advanced, Failed, Fence, KindSettings, OutageReport, Progress
from tests.commands import LEASE_US, claim, complete, kill
from tests.doors import DOORS, ELSEWHERE, door_to
from tests.http_server import TOKEN, asked, served
from tests.wait import wait_until

NOBODYS = "0123456789abcde"
LARGE = bytes(range(256)) * 1_024  # too large for a row


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with Queue(tmp_path / "documents.db") as queue:
        yield queue


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest, queue: Queue) -> Iterator[Any]:
    with door_to(request.param, queue) as door:
        yield door


# Some scenarios also against the program, in another process.
EVERY_DOOR = pytest.mark.parametrize("door", [*DOORS, ELSEWHERE], indirect=True)


def seen(document: Document) -> Document:
    """Return a document without the fields that only its store has."""
    return document._replace(order=None, content_name=None)


# ── Submitting ───────────────────────────────────────────────────────────────────────────────────


PAYLOADS = [None, 17, "№ 17 \x00 \ud800", {"b": [1.5, True, None], "a": {}}, "x" * 1_500_000]


def test_a_payload_is_submitted_and_comes_back(queue: Queue, door: Any) -> None:
    for n, payload in enumerate(PAYLOADS):
        receipt = door.submit(f"customer {n}", payload=payload)

        assert door.payload(receipt.id) == queue.payload(receipt.id) == payload
        document = queue.get(receipt.id)
        assert seen(door.get(receipt.id)) == seen(document)
        assert receipt == (receipt.id, f"customer {n}", 0, 1, document.submitted_at_us, False)
        with pytest.raises(ValueError, match="has a payload, not content"):
            door.read(receipt.id)


@pytest.mark.parametrize("way", ["bytes", "stream", "file"])
def test_a_content_is_submitted_and_comes_back(
    queue: Queue, door: Any, tmp_path: Path, way: str
) -> None:
    path = tmp_path / "invoice.pdf"
    for content in (b"", b"Invoice 17", LARGE):
        path.write_bytes(content)
        if way == "file":
            receipt = door.submit("acme", file=path)
        else:
            given = content if way == "bytes" else io.BytesIO(content)
            receipt = door.submit("acme", content=given)

        assert door.read(receipt.id) == queue.read(receipt.id) == content
        with door.open(receipt.id) as stream:
            assert stream.read() == content
        document = door.get(receipt.id)
        assert seen(document) == seen(queue.get(receipt.id))
        assert document.sha256 == hashlib.sha256(content).digest()
        assert document.name == ("invoice.pdf" if way == "file" else None)
        with pytest.raises(ValueError, match="has content, not a payload"):
            door.payload(receipt.id)


def test_a_stream_is_sent_from_where_it_stands_and_need_not_go_back(
    queue: Queue, door: Any
) -> None:
    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

    begun = io.BytesIO(b"head" + LARGE)
    begun.seek(4)
    receipts = [door.submit("acme", content=each) for each in (begun, Pipe(LARGE))]

    assert [queue.read(receipt.id) for receipt in receipts] == [LARGE, LARGE]


SAID: list[dict[str, Any]] = [
    {"name": "Übersicht/№ 1 \x00.pdf", "cost": 2.5, "key": "k"},
    {"metadata": {"pages": 3, "b": [1.0, None], "a": "ä"}, "key": "a b=c&d"},
    {"metadata": {"long": "ä" * 8_000}, "name": "x" * 900},
    {"key": " spaces at its ends "},
    {"key": "ключ"},
    {"due_at": datetime(2100, 1, 31, 8, tzinfo=UTC)},
    {"due_at": 1},
    {"expires_at": datetime(2100, 1, 31, 8, tzinfo=UTC)},
]


@pytest.mark.parametrize("carried", [{"payload": [1]}, {"content": b"x"}, {"content": LARGE}])
def test_everything_that_is_said_about_a_document_arrives_as_it_was_said(
    queue: Queue, door: Any, carried: dict[str, Any]
) -> None:
    told = (
        "customer",
        "name",
        "metadata_json",
        "cost",
        "due_at",
        "body_type",
        "size_bytes",
        "sha256",
    )
    for said in SAID:
        receipt = door.submit("Müller & Söhne=?", **carried, **said)
        with Queue(":memory:") as other:
            expected = other.get(other.submit("Müller & Söhne=?", **carried, **said).id)

        document = queue.get(receipt.id)
        for field in told:
            assert getattr(document, field) == getattr(expected, field), (field, said)
        assert seen(door.get(receipt.id)) == seen(document)
        if "key" in said:
            again = door.submit("Müller & Söhne=?", **carried, **said)
            assert again == receipt._replace(replayed=True)


def test_a_key_belongs_to_one_document(queue: Queue, door: Any) -> None:
    first = door.submit("acme", payload=1, key="k")

    assert door.submit("acme", payload=1, key="k") == first._replace(replayed=True)
    assert door.submit("other", payload=2, key="k").replayed is False
    with pytest.raises(KeyReused, match="the idempotency key 'k' of customer 'acme' belongs to"):
        door.submit("acme", payload=2, key="k")
    with pytest.raises(KeyReused):
        door.submit("acme", content=LARGE, key="k")
    assert queue.summary().waiting == 2


def test_a_document_without_a_key_is_never_called_repeated(queue: Queue, door: Any) -> None:
    receipts = [door.submit("acme", payload=1) for _ in range(2)]

    assert [receipt.replayed for receipt in receipts] == [False, False]
    assert [receipt.count for receipt in receipts] == [0, -1]


def test_a_child_has_the_priority_of_its_parent(queue: Queue, door: Any) -> None:
    parent = door.submit("acme", payload=1)

    child = door.submit("acme", payload=2, parent=parent.id)

    assert (child.count, door.get(child.id).parent) == (0, parent.id)
    wrong = "customer 'acme' has no document '0123456789abcde' to be the parent"
    for carried in ({"payload": 3}, {"content": LARGE}):
        with pytest.raises(NotFound, match=wrong):
            door.submit("acme", parent=NOBODYS, **carried)


def wrong_submissions() -> list[dict[str, Any]]:
    return [
        {"payload": {1}},
        {"payload": float("nan")},
        {"payload": 1, "content": b"x"},
        {"content": "text"},
        {"payload": 1, "metadata": [1]},
        {"payload": 1, "metadata": {str(n): n for n in range(65)}},
        {"payload": 1, "cost": -1},
        {"payload": 1, "cost": True},
        {"payload": 1, "due_at": datetime(2030, 1, 1)},
        {"payload": 1, "key": ""},
        {"payload": 1, "key": "\x00"},
        {"payload": 1, "name": 1},
        {"payload": 1, "parent": 1},
        {"customer": "", "payload": 1},
        {"customer": "x" * 256, "payload": 1},
        {"file": "."},
        {"file": 1},
    ]


def test_what_is_wrong_with_a_submission_is_told_in_the_same_words(queue: Queue, door: Any) -> None:
    for wrong in wrong_submissions():
        fields = {"customer": "acme", **wrong}
        with pytest.raises((ValueError, TypeError)) as expected:
            queue.submit(**fields)

        kind, said = type(expected.value), re.escape(str(expected.value))
        with pytest.raises(kind, match=f"^{said}$"):
            door.submit(**fields)
        with pytest.raises(kind, match=f"^submission 0: {said}$"):
            door.submit_many([Submission(**fields)])
        with pytest.raises(kind, match=f"^submission 1: {said}$"):
            door.submit_many([Submission("acme", payload=0), Submission(**fields)])
    with pytest.raises(TypeError, match="the content yields str; open it in binary mode"):
        door.submit("acme", content=io.StringIO("text"))
    assert queue.summary().waiting == 0


def test_a_file_that_is_not_there_is_pythons_own_error(queue: Queue, door: Any) -> None:
    with pytest.raises(FileNotFoundError):
        door.submit("acme", file="nowhere.pdf")


@EVERY_DOOR
def test_many_are_stored_in_their_order_all_or_none(
    queue: Queue, door: Any, tmp_path: Path
) -> None:
    (tmp_path / "a.pdf").write_bytes(LARGE)
    wanted = [
        Submission("acme", payload={"n": 1}, key="k", metadata={"a": 1}, cost=2, due_at=1),
        Submission("other", content=b"bytes"),
        Submission("acme", content=io.BytesIO(LARGE), name="b.pdf"),
        Submission("acme", file=tmp_path / "a.pdf"),
    ]
    receipts = door.submit_many(wanted)

    assert [receipt.customer for receipt in receipts] == ["acme", "other", "acme", "acme"]
    assert [receipt.count for receipt in receipts] == [0, 0, -1, -2]
    assert queue.payload(receipts[0].id) == {"n": 1}
    assert [queue.read(receipt.id) for receipt in receipts[1:]] == [b"bytes", LARGE, LARGE]
    assert queue.get(receipts[3].id).name == "a.pdf"
    again = door.submit_many([wanted[0], Submission("acme", payload=2)])
    assert [receipt.replayed for receipt in again] == [True, False]
    with pytest.raises(KeyReused):
        door.submit_many([Submission("acme", payload=3), Submission("acme", payload=4, key="k")])
    assert door.submit_many([]) == []
    assert door.submit_many(iter([Submission("acme", payload=5)]))[0].count == -4
    assert queue.summary().waiting == 6
    with pytest.raises(ValueError, match="at most 10,000 documents are accepted in one call"):
        door.submit_many(Submission("acme", payload=1) for _ in range(10_001))
    with pytest.raises(TypeError, match="submission 1: 1 is not a Submission"):
        door.submit_many([Submission("acme", payload=1), 1])


def test_a_full_queue_is_told_with_its_limit_and_room_is_waited_for(
    queue: Queue, door: Any
) -> None:
    door.configure(waiting_per_customer_max=2, waiting_max=3)
    ids = [door.submit("acme", payload=1).id for _ in range(2)]

    with pytest.raises(QueueFull) as refused:
        door.submit("acme", payload=1)
    full = refused.value
    assert (full.limit, full.maximum, full.waiting, full.customer) == (
        "waiting_per_customer_max",
        2,
        2,
        "acme",
    )
    assert "customer 'acme' has 2 documents waiting" in str(full)
    assert not door.wait_for_room("acme", timeout_s=0)
    assert not door.has_room("acme")
    assert door.wait_for_room()
    with pytest.raises(ValueError, match="it must be at most 2, the limit of the queue"):
        door.wait_for_room("acme", 3)
    for wrong in ({"n": 0}, {"customer": ""}, {"n": 100_000_000}):
        with pytest.raises(ValueError, match="."):
            door.wait_for_room(**wrong)
    waiting = threading.Thread(target=queue.cancel, args=(ids[0],))
    waiting.start()
    assert door.wait_for_room("acme", timeout_s=30)
    waiting.join()
    door.submit("other", payload=1)
    door.submit("acme", payload=1)
    with pytest.raises(QueueFull) as refused:
        door.submit_many([Submission("third", payload=1), Submission("third", payload=1)])
    assert (refused.value.limit, refused.value.customer) == ("waiting_max", None)


# ── Looking ──────────────────────────────────────────────────────────────────────────────────────


def test_a_document_that_is_not_there_is_not_found(queue: Queue, door: Any) -> None:
    queue.submit("acme", payload=1)
    looks = ("get", "payload", "read", "open", "result", "open_result", "wait", "explain")
    for id in (NOBODYS, "", "nonsense", "../rule", "0" * 16, "ä"):
        for call in (*looks, "cancel", "retry"):
            with pytest.raises(NotFound, match=re.escape(f"there is no document {id!r}")):
                getattr(door, call)(id)
        assert door.cancel([id]) == door.retry([id]) == [None]


def documents_in_every_state(queue: Queue) -> list[str]:
    """Create a completed document with a value, one with a file, a dead, a running, a cancelled, a
    delayed one that failed once, and a waiting one."""
    ids = [queue.submit("acme", payload=n, cost=1.000001, name=f"n{n}").id for n in range(3)]
    queue.store.finish([Completed(claim(queue)[0].fence, '{"pages": 3}', None, 1_234_567)])
    (with_file,) = claim(queue)
    file = queue.contents.put([LARGE])
    queue.store.finish([Completed(with_file.fence, '"beside"', file)])
    kill(queue)
    ids += [queue.submit("other", payload=n).id for n in range(4)]
    (running,) = claim(queue)
    queue.store.renew([running.fence], lease_us=LEASE_US, progress=_half(running.fence))
    (failed,) = claim(queue)
    queue.store.finish([Failed(failed.fence, "no connection", 3_600_000_000)])
    queue.cancel(ids[5])
    return ids


def _half(fence: Fence) -> dict[Fence, Progress]:
    return {fence: Progress(1, 2.5)}


@EVERY_DOOR
def test_documents_in_every_state_are_the_same_by_every_door(queue: Queue, door: Any) -> None:
    ids = documents_in_every_state(queue)

    for id in ids:
        assert seen(door.get(id)) == seen(queue.get(id))
        assert door.result_file_bytes(id) == queue.result_file_bytes(id)
        assert type(door.get(id).state) is type(queue.get(id).state)
    assert {queue.get(id).state for id in ids} == {
        "completed",
        "dead",
        "running",
        "delayed",
        "cancelled",
        "waiting",
    }


def test_results_come_back_or_are_refused_in_the_same_words(queue: Queue, door: Any) -> None:
    plain, with_file, dead, *_ = documents_in_every_state(queue)

    assert (door.result(plain), door.result(with_file)) == ({"pages": 3}, "beside")
    with door.open_result(with_file) as stream:
        assert stream.read() == LARGE
    with pytest.raises(NotFound, match=f"document {plain} has no result file"):
        door.open_result(plain)
    for look in (door.result, door.open_result):
        with pytest.raises(
            WrongState,
            match=rf"document {dead} is dead \(unreadable\); "
            "only a completed document has a result",
        ):
            look(dead)


FILTERS: list[dict[str, Any]] = [
    {},
    {"customer": "acme"},
    {"customer": "nobody"},
    {"states": "waiting"},
    {"states": ["dead", "running"]},
    {"states": []},
    {"priorities": 1},
    {"priorities": (2, 3)},
    {"name": "n1"},
    {"submitted_from": 1, "submitted_before": datetime(2300, 1, 1, tzinfo=UTC)},
    {"submitted_before": 1},
    {"ids": [NOBODYS]},
    {"ids": []},
]


def test_lists_are_the_same_by_every_door(queue: Queue, door: Any) -> None:
    documents_in_every_state(queue)
    for filters in FILTERS:
        expected = [seen(document) for document in queue.iterate(**filters)]
        assert [seen(document) for document in door.iterate(**filters)] == expected
        after, pages = None, []
        while True:
            documents, after = door.list(after=after, size=2, **filters)
            assert len(documents) <= 2
            pages += [seen(document) for document in documents]
            if after is None:
                break
        assert pages == expected


def test_a_list_of_certain_documents_has_no_others(queue: Queue, door: Any) -> None:
    ids = documents_in_every_state(queue)

    found = door.list(ids=[ids[0], NOBODYS, ids[3]])

    assert {document.id for document in found.documents} == {ids[0], ids[3]}


WRONG_LISTS: list[dict[str, Any]] = [
    {"states": "lost"},
    {"priorities": 10},
    {"size": 0},
    {"size": 1_001},
    {"after": "nonsense"},
    {"customer": ""},
    {"submitted_from": datetime(2030, 1, 1)},
    {"nonsense": 1},
]


def test_a_list_that_cannot_be_meant_is_refused_in_the_same_words(queue: Queue, door: Any) -> None:
    for wrong in WRONG_LISTS:
        with pytest.raises((ValueError, TypeError)) as expected:
            queue.list(**wrong)
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            door.list(**wrong)


@EVERY_DOOR
def test_a_document_is_waited_for_until_it_has_ended(queue: Queue, door: Any) -> None:
    id = door.submit("acme", payload=1).id

    with pytest.raises(TimeoutError, match=f"document {id} is still waiting after 0.05 s"):
        door.wait(id, timeout_s=0.05)
    finishing = threading.Thread(target=complete, args=(queue,))
    finishing.start()
    document = door.wait(id, timeout_s=30)
    finishing.join()

    assert (document.state, seen(document)) == ("completed", seen(queue.get(id)))
    assert door.wait(id) == document


@pytest.mark.parametrize("audience", ["operator", "customer"])
def test_explanations_are_the_same_by_every_door_and_in_every_language(
    queue: Queue, door: Any, audience: str
) -> None:
    ids = documents_in_every_state(queue)
    queue.set_customer("other", limit=1, weight=2)
    ids += [queue.submit("big", payload=1).id for _ in range(30)][-1:]

    for id in ids:
        expected, told = queue.explain(id, audience), door.explain(id, audience)
        # Time has passed between the two; values derived from it may differ.
        assert (told.id, told.state, told.priority, told.count) == (
            expected.id,
            expected.state,
            expected.priority,
            expected.count,
        )
        position = expected.position
        bare = None if position is None else replace(position, turns={})
        found = told.position
        assert (None if found is None else replace(found, turns={})) == bare
        assert [(each.code, set(each.parameters)) for each in told.reasons] == [
            (each.code, set(each.parameters)) for each in expected.reasons
        ]
        largest = [each.parameters.get("largest") for each in expected.reasons]
        assert [each.parameters.get("largest") for each in told.reasons] == largest
        assert len(tell(told, "de")) == len(tell(expected, "de"))
    with pytest.raises(ValueError, match="'nobody' is not a valid Audience"):
        door.explain(ids[0], "nobody")


# ── Changing the course ──────────────────────────────────────────────────────────────────────────


def test_documents_are_cancelled_and_tried_again(queue: Queue, door: Any) -> None:
    completed, _, dead, running, delayed, cancelled, waiting = documents_in_every_state(queue)

    assert door.cancel(running) == "running"
    assert door.cancel(cancelled) == "cancelled"
    with pytest.raises(
        WrongState, match=f"document {completed} is already completed; it cannot be cancelled"
    ):
        door.cancel(completed)
    assert door.cancel([dead, NOBODYS, waiting, waiting]) == ["dead", None, *["cancelled"] * 2]
    assert door.cancel([]) == []
    with pytest.raises(
        WrongState, match=f"document {delayed} is delayed; only a dead document can be retried"
    ):
        door.retry(delayed)
    assert door.retry([delayed, NOBODYS]) == ["delayed", None]
    assert door.retry(dead) is None
    assert queue.get(dead).state == "waiting"
    assert door.retry(dead) is None
    assert queue.get(dead).state == "waiting"


# ── Customers and the queue itself ───────────────────────────────────────────────────────────────


def test_customers_are_listed_set_and_purged(queue: Queue, door: Any) -> None:
    documents_in_every_state(queue)

    changed = door.set_customer("Müller & Söhne", weight=2.5, limit=4)
    assert changed == queue.customer("Müller & Söhne")
    assert door.set_customer("Müller & Söhne", limit=None, paused=True).settings.limit is None
    assert queue.customer("Müller & Söhne").settings.weight == 2.5
    assert door.customer("acme") == queue.customer("acme")
    assert door.customers() == queue.customers()
    first = door.customers(size=1)
    assert first == queue.customers(size=1)
    assert door.customers(after=first.next, size=1) == queue.customers(after=first.next, size=1)
    door.purge("acme")
    for look in (door.customer, door.purge):
        with pytest.raises(NotFound, match="there is no customer 'acme'"):
            look("acme")
    assert not queue.list(customer="acme").documents


WRONG_CUSTOMERS: list[dict[str, Any]] = [
    {"weight": 0},
    {"weight": 101},
    {"weight": "2"},
    {"weight": float("nan")},
    {"limit": 0},
    {"limit": 1.5},
    {"limit": 10_000_000},
    {"paused": 1},
]


def test_what_a_customer_cannot_have_is_refused_in_the_same_words(queue: Queue, door: Any) -> None:
    for wrong in WRONG_CUSTOMERS:
        with pytest.raises((ValueError, TypeError)) as expected:
            queue.set_customer("acme", **wrong)
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            door.set_customer("acme", **wrong)


# ── Kinds of work ────────────────────────────────────────────────────────────────────────────────


@EVERY_DOOR
def test_kinds_are_listed_created_and_set(queue: Queue, door: Any) -> None:
    queue.sign_on("gpu", 2, ["ocr"])
    queue.submit("acme", kind="ocr")

    assert door.set_kind("export", limit=2, attempts_max=3, paused=True) == queue.kind("export")
    assert queue.kind("export").settings == KindSettings(limit=2, attempts_max=3, paused=True)
    assert door.set_kind("export", limit=None).settings.limit is None
    assert door.set_kind("export", expires_in_s=1.5).settings.expires_in_s == 1.5
    removed = door.set_kind("export", attempts_max=None, expires_in_s=None, paused=False)
    assert removed.settings == KindSettings()
    assert door.set_kind("new") == queue.kind("new")
    assert door.kinds() == queue.kinds()
    assert door.kind("ocr") == queue.kind("ocr")
    assert (door.kind("ocr").waiting, door.kind("ocr").workers) == (1, 1)
    with pytest.raises(NotFound, match="there is no kind 'orc'"):
        door.kind("orc")
    assert door.configure(kinds="open").kinds == queue.settings.kinds == "open"


WRONG_KINDS: list[tuple[str, dict[str, Any]]] = [
    ("ocr", {"limit": 0}),
    ("ocr", {"limit": 1.5}),
    ("ocr", {"limit": 10_000_000}),
    ("ocr", {"paused": 1}),
    ("ocr", {"attempts_max": 0}),
    ("ocr", {"attempts_max": True}),
    ("ocr", {"expires_in_s": 0}),
    ("ocr", {"expires_in_s": "1"}),
    ("OCR", {}),
    ("", {}),
    ("fairturn.x", {}),
    ("..", {}),  # HTTP clients remove it from a path
]


def test_what_a_kind_cannot_have_is_refused_in_the_same_words(queue: Queue, door: Any) -> None:
    for name, wrong in WRONG_KINDS:
        with pytest.raises((ValueError, TypeError)) as expected:
            queue.set_kind(name, **wrong)
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            door.set_kind(name, **wrong)
    with pytest.raises(ValueError, match="kind 'a/b' is not valid"):
        door.kind("a/b")
    assert [kind.name for kind in queue.kinds()] == ["default"]


# Every form of a request: in the row, streamed, fields too long for a query, several documents.
OF_A_KIND: list[dict[str, Any]] = [
    {"payload": 1},
    {"content": b"x"},
    {"content": LARGE},
    {"payload": 1, "metadata": {"m": "x" * 5_000}},
    {"content": LARGE, "metadata": {"m": "x" * 5_000}},
]


def test_documents_of_a_kind_are_submitted_found_and_refused(queue: Queue, door: Any) -> None:
    queue.set_kind("ocr")
    for fields in OF_A_KIND:
        receipt = door.submit("acme", kind="ocr", **fields)
        assert door.get(receipt.id).kind == queue.get(receipt.id).kind == "ocr"
    door.submit_many([Submission("acme", kind="ocr"), Submission("acme")])
    for kinds in ("ocr", "default", ["ocr", "default"], "text", []):
        expected = [seen(document) for document in queue.iterate(kinds=kinds)]
        assert [seen(document) for document in door.iterate(kinds=kinds)] == expected
    with pytest.raises(ValueError, match="kind 'OCR' is not valid"):
        door.list(kinds="OCR")
    assert len(list(queue.iterate(kinds="ocr"))) == 6
    for fields in OF_A_KIND:
        with pytest.raises(KindRefused, match="the queue has no kind 'text'; start a worker"):
            door.submit("acme", kind="text", **fields)
    with pytest.raises(KindRefused):
        door.submit_many([Submission("acme"), Submission("acme", kind="text")])
    assert queue.summary().waiting == 7


# ── Attempts and outages ─────────────────────────────────────────────────────────────────────────


@EVERY_DOOR
def test_the_attempts_of_a_document_are_those_of_the_queue(queue: Queue, door: Any) -> None:
    for kind in ("text", "ocr"):
        queue.set_kind(kind)
    id = door.submit("acme", kind="text").id
    (claimed,) = claim(queue)
    queue.finish([Failed(claimed.fence, "unreadable", 0, "Traceback ä")])
    (claimed,) = claim(queue)
    queue.finish([Advanced(claimed.fence, "ocr", '{"a":[1.5,"ä"]}')])

    assert door.attempts(id) == queue.attempts(id)
    assert door.attempts(id, values=True) == queue.attempts(id, values=True)
    assert [each.value for each in door.attempts(id, values=True)] == [None, '{"a":[1.5,"ä"]}']
    assert door.get(id).step == queue.get(id).step == 1
    with pytest.raises(NotFound, match=f"there is no document '{NOBODYS}'"):
        door.attempts(NOBODYS)


def test_a_customer_reads_its_attempts_without_their_workers(queue: Queue) -> None:
    id = queue.submit("acme").id
    kill(queue)
    key = KeyRegistry(queue.store).make("customer", customer="acme")

    with served(queue) as url, Client(url, key.shown) as client:
        (attempt,) = client.attempts(id)
        with pytest.raises(NotAllowed):
            client.attempts(id, values=True)

    assert attempt == queue.attempts(id)[0]._replace(worker="", details=None)


@EVERY_DOOR
def test_held_services_are_listed_and_resumed(queue: Queue, door: Any) -> None:
    queue.sign_on("w", 2, ["ocr", "text"], needs={"ocr": ["azure/ocr"], "text": ["azure/ocr"]})
    for _ in range(3):
        door.submit("acme", kind="ocr")
    reports = [OutageReport(each.fence, "503", service="azure/ocr") for each in claim(queue, 2)]
    queue.finish(reports)

    (held,) = door.outages()
    assert [held] == queue.outages()
    assert (held.service, held.kinds, held.resumed_at_us) == ("azure/ocr", ("ocr", "text"), None)
    assert door.resume("azure/ocr") is None
    (resumed,) = door.outages()
    assert [resumed] == queue.outages()
    assert resumed.resumed_at_us is not None
    with pytest.raises(NotFound, match="no service 'azure/ocr' is held; outages"):
        door.resume("azure/ocr")
    for wrong in ("", "a\x00b", "x" * 70, 7):
        with pytest.raises((ValueError, TypeError)) as expected:
            queue.resume(wrong)  # type: ignore[arg-type]
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            door.resume(wrong)


# ── Expiry ───────────────────────────────────────────────────────────────────────────────────────


def test_an_expiry_is_a_timestamp_or_a_time_from_now_in_every_form(queue: Queue, door: Any) -> None:
    at = datetime(2100, 1, 31, 8, tzinfo=UTC)
    for fields in OF_A_KIND:
        by_timestamp = door.submit("acme", expires_at=at, **fields)
        by_seconds = door.submit("acme", expires_in_s=60.5, **fields)
        assert queue.get(by_timestamp.id).expires_at == at
        document = door.get(by_seconds.id)
        assert document.expires_at_us is not None
        # It counts from when the queue encodes the document, just before it is stored.
        assert 50_000_000 < document.expires_at_us - document.submitted_at_us <= 60_500_000
    first, _ = door.submit_many([Submission("acme", expires_in_s=60), Submission("acme")])
    assert door.get(first.id).expires_at_us == queue.get(first.id).expires_at_us is not None


WRONG_EXPIRIES: list[dict[str, Any]] = [
    {"expires_at": datetime(2100, 1, 1, tzinfo=UTC), "expires_in_s": 1},
    {"expires_at": "2100-01-01"},
    {"expires_in_s": 0},
    {"expires_in_s": "1"},
    {"expires_in_s": 1e11},
]


def test_an_expiry_that_no_document_can_have_is_refused_in_the_same_words(
    queue: Queue, door: Any
) -> None:
    (dead,) = [queue.submit("acme").id, *kill(queue)][1:]
    for wrong in WRONG_EXPIRIES:
        with pytest.raises((ValueError, TypeError)) as expected:
            queue.submit("acme", **wrong)
        for call in (partial(door.submit, "acme"), partial(door.retry, dead)):
            with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
                call(**wrong)
    for call in (partial(door.submit, "acme"), partial(door.retry, dead)):
        with pytest.raises(ExpiryPassed):
            call(expires_at=1)
    assert [document.state for document in queue.iterate()] == ["dead"]


def test_an_expired_document_is_retried_with_a_new_expiry_only(queue: Queue, door: Any) -> None:
    ids = [queue.submit("acme", expires_in_s=0.5).id for _ in range(3)]
    wait_until(
        lambda: queue.expire() >= 0 and queue.summary().expired == len(ids), "they have expired"
    )

    assert {door.get(id).state for id in ids} == {"expired"}
    with pytest.raises(WrongState, match="is expired; retry it with expires_at or expires_in_s"):
        door.retry(ids[0])
    assert door.retry(ids) == ["expired"] * 3
    assert door.retry(ids[0], expires_in_s=60) is None
    assert door.retry(ids, expires_at=datetime(2100, 1, 1, tzinfo=UTC)) == [
        "waiting",
        "expired",
        "expired",
    ]
    assert {queue.get(id).state for id in ids} == {"waiting"}
    assert None not in {queue.get(id).expires_at_us for id in ids}


def test_kinds_of_any_name_are_reached_through_the_path(queue: Queue, door: Any) -> None:
    for name in ("...", ".a", "a.b", "-", "_", "0", "x" * 64):
        door.set_kind(name, limit=3)
        assert door.kind(name).settings.limit == queue.kind(name).settings.limit == 3


@EVERY_DOOR
def test_the_whole_queue_in_numbers_and_settings(queue: Queue, door: Any) -> None:
    documents_in_every_state(queue)

    assert door.summary() == queue.summary()
    assert door.settings == queue.settings
    assert door.rule == queue.settings.rule
    after = door.configure(mode="levels", bounds=[-1, -2, -3, -4, -5, -6, -7, -8], patience_s=60)
    assert after == queue.settings == door.settings
    assert (after.mode, after.bounds[0], door.rule.bounds[0]) == ("levels", -1, -1)


WRONG_SETTINGS: list[dict[str, Any]] = [
    {"mode": "unfair"},
    {"attempts_max": 0},
    {"bounds": [1]},
    {"colour": "red"},
]


def test_settings_that_cannot_be_are_refused_in_the_same_words(queue: Queue, door: Any) -> None:
    for wrong in WRONG_SETTINGS:
        with pytest.raises((ValueError, TypeError)) as expected:
            queue.configure(**wrong)
        with pytest.raises(type(expected.value), match=re.escape(str(expected.value))):
            door.configure(**wrong)


def test_access_keys_are_made_listed_replaced_and_ended(queue: Queue) -> None:
    own = KeyRegistry(queue.store)
    first = own.make("operator").shown
    for name in DOORS[1:]:
        with door_to(name, queue, first) as door:
            made = door.keys.make("customer", customer=name, name="scanner")
            known = own.check(made.shown)
            assert known is not None
            assert made.key == known._replace(digest=b"", used_at_us=None)
            replaced = door.keys.rotate(made.key.id, overlap_s=60)
            assert own.check(made.shown) is not None
            ended = door.keys.revoke(replaced.key.id)
            assert ended.ends_at is not None
            assert own.check(replaced.shown) is None
            listed = [key._replace(digest=b"") for key in own.list(customer=name)]
            assert door.keys.list(customer=name) == listed
            page = door.keys.list(size=1)
            assert door.keys.list(after=page[0].id, size=1)[0].id > page[0].id
            for wrong in ("000000000000", "../rule", ""):
                with pytest.raises(NotFound, match=f"there is no key {wrong!r}"):
                    door.keys.revoke(wrong)
            with pytest.raises(ValueError, match="role is 'king'"):
                door.keys.make("king")
            with pytest.raises(ValueError, match="the role customer requires a customer"):
                door.keys.make("customer")
            assert made.shown not in repr(made)


def test_many_threads_share_a_client_and_many_tasks_an_async_one(queue: Queue) -> None:
    with served(queue) as url, Client(url, TOKEN) as client, ThreadPoolExecutor(8) as threads:
        ids = [
            receipt.id
            for receipt in threads.map(lambda n: client.submit("acme", payload=n), range(80))
        ]

        async def submit_all() -> list[Receipt]:
            async with AsyncClient(url, TOKEN) as together:
                wanted = (together.submit("other", content=b"%d" % n) for n in range(40))
                return await asyncio.gather(*wanted)

        ids += [receipt.id for receipt in asyncio.run(submit_all())]

    assert len(set(ids)) == queue.summary().waiting == 120


# ── The form of the three ────────────────────────────────────────────────────────────────────────

# A worker, housekeeping and transactions need the database itself.
ONLY_HERE = {
    "asubmit", "begin_epoch", "check", "claim", "discard", "expire", "finish", "interrupt", "prune",
    "renew", "sign_off", "sign_on", "single_writer", "sweep", "sync", "version", "wait_for_change",
}  # fmt: skip
ADDED = {"me"}


def methods(kind: type) -> dict[str, Any]:
    return {
        name: value
        for name, value in inspect.getmembers(kind)
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }


def test_the_clients_have_the_methods_of_the_queue_with_the_same_parameters() -> None:
    queue, client, awaiting = (methods(kind) for kind in (Queue, Client, AsyncClient))

    assert set(client) == set(awaiting) == set(queue) - ONLY_HERE | ADDED
    for name in set(client) - ADDED:
        if isinstance(client[name], property):
            assert isinstance(queue[name], property)
            continue
        own = inspect.signature(client[name]).parameters
        assert own == inspect.signature(awaiting[name]).parameters, name
        theirs = dict(inspect.signature(queue[name]).parameters)
        mine = dict(own)
        if name.startswith("submit"):
            del theirs["connection"], mine["progress"]
        assert list(mine) == list(theirs), name
        assert [each.kind for each in mine.values()] == [each.kind for each in theirs.values()]


def test_the_methods_of_the_async_client_are_coroutine_functions() -> None:
    client = AsyncClient("http://127.0.0.1:1")

    for bound in (client, client.keys):
        for name, unbound in methods(type(bound)).items():
            method = getattr(bound, name)
            assert name == "iterate" or inspect.iscoroutinefunction(method), name
            assert (method.__name__, method.__doc__) == (name, unbound.__doc__)
            assert list(inspect.signature(method).parameters) == [
                each for each in inspect.signature(unbound).parameters if each != "self"
            ]


def test_methods_called_through_the_class_send_requests(queue: Queue) -> None:
    class Submitter(AsyncClient):
        async def submit_payload(self, payload: object) -> Receipt:
            return await AsyncClient.submit(self, "acme", payload=payload)

    async def submit(url: str) -> Receipt:
        async with Submitter(url, TOKEN) as client:
            return await client.submit_payload(2)

    with served(queue) as url, Client(url, TOKEN) as client:
        ids = [Client.submit(client, "acme", payload=1).id, asyncio.run(submit(url)).id]
        found = list(map(partial(Client.get, client), ids))

    assert [seen(document) for document in found] == [seen(queue.get(id)) for id in ids]


# ── The page ─────────────────────────────────────────────────────────────────────────────────────

PAGE = (Path(__file__).parent.parent / "docs" / "client.md").read_text(encoding="utf-8")


def program_with(word: str) -> str:
    (program,) = [
        each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if word in each
    ]
    return str(program)


def test_the_program_of_the_page_runs_as_written(
    queue: Queue,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("invoice-17.pdf").write_bytes(LARGE)
    key = KeyRegistry(queue.store).make("customer", customer="acme").shown
    with served(queue) as url:
        program = program_with("with Client(").replace("https://documents.example", url)
        working = threading.Thread(target=_complete_when_it_comes, args=(queue,))
        working.start()
        exec(program, {"key": key, "print": print})
        working.join()

    assert f"{len(LARGE)} {len(LARGE)}\n{{'pages': 3}}\n" in capsys.readouterr().out


def test_the_program_with_an_event_loop_runs_as_written(queue: Queue, tmp_path: Path) -> None:
    folder = tmp_path / "invoices"
    folder.mkdir()
    for name in ("a.pdf", "b.pdf"):
        (folder / name).write_bytes(LARGE)
    key = KeyRegistry(queue.store).make("customer", customer="acme").shown
    with served(queue) as url:
        names: dict[str, Any] = {"key": key}
        exec(program_with("AsyncClient(").replace("https://documents.example", url), names)
        waiting = asyncio.run(names["submit_all"](folder))

    assert sorted(waiting) == ["a.pdf", "b.pdf"]


def _complete_when_it_comes(queue: Queue) -> None:
    wait_until(lambda: complete(queue), "a document comes")


def test_the_application_of_the_page_takes_documents(queue: Queue) -> None:
    app = FastAPI()
    exec(program_with("asubmit"), {"app": app, "queue": queue, "UploadFile": UploadFile})

    answer = asked(app, "POST", "/invoices?customer=acme", files={"file": ("a.pdf", LARGE)})

    assert queue.read(answer.json()) == LARGE
    assert queue.get(answer.json()).name == "a.pdf"
