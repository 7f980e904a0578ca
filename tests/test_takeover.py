"""`fairturn copy` takes over queues that fairturn 0.1 wrote: a real file, and a real dump."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairturn import Queue
from fairturn.clock import SECOND_US, ManualClock
from fairturn.config import contents_beside
from fairturn.contents.local import Folder
from fairturn.errors import StoreRefused, StoreUnavailable
from fairturn.maintenance import takeover
from fairturn.maintenance.copy import copy_queue
from fairturn.model import Completed, Document, NewDocument, Stored
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.sqlite import SqliteStore, query
from tests.commands import fairturn
from tests.servers import dumps, postgres
from tests.servers.places import AnyStore
from tests.servers.queues import Databases

DATA = Path(__file__).parent / "data"
NAMES = {  # the names of 0.1, by the present ones
    "submitted_at_us": "submitted_at",
    "due_at_us": "due_at",
    "claimed_at_us": "claimed_at",
    "ended_at_us": "ended_at",
    "body_type": "kind",
    "kind": "kind_of_work",
}
LATER = {NAMES.get(name, name): value for name, value in Document._field_defaults.items()}
COMPARED_OTHERWISE = {"sha256", "progress", "body", "result", "result_content"}


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    """The file that 0.1 wrote, with its contents."""
    path = tmp_path / "old.db"
    shutil.copy(DATA / "queue-0.1.db", path)
    shutil.copytree(DATA / "queue-0.1.db.contents", contents_beside(path))
    return path


@pytest.fixture
def old_server() -> Iterator[str]:
    """A database that was restored from the dump of 0.1."""
    name = "takeover_from_0_1"
    yield dumps.restore(DATA / "queue-0.1.dump", name)
    postgres.of_this_run().drop(name)


@pytest.fixture
def url() -> Iterator[str]:
    with Databases() as databases:
        yield databases.new(empty=True)


def expected(name: str) -> Any:
    return json.loads((DATA / name).read_text("utf-8"))


def plain(value: Any) -> Any:
    """A value as the JSON files have it."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def read_in_words_of_0_1(document: Document) -> dict[str, Any]:
    return {
        NAMES.get(name, name): value
        for name, value in document._asdict().items()
        if name not in COMPARED_OTHERWISE
    }


def assert_documents_are_those_of(known: Any, store: AnyStore) -> None:
    for old in known["documents"]:
        stored = store.read(old["id"])
        assert isinstance(stored, Stored)
        present = read_in_words_of_0_1(stored.document)
        later = present.keys() - old.keys()  # fields that 0.1 did not have
        assert old.keys() - present.keys() == COMPARED_OTHERWISE
        assert present == {name: LATER[name] if name in later else old[name] for name in present}
        body = stored.body
        assert (body.decode("latin-1") if isinstance(body, bytes) else body) == _body(old)
        assert stored.result == old["result"]
    assert plain(store.summary().waiting_by_priority) == known["summary"]["waiting_by_priority"]
    for old in known["customers"]:
        (customer,) = store.customers(names=[old["name"]]).customers
        assert (customer.count, customer.count_updated_at_us) == (
            old["count"],
            old["count_updated_at"],
        )
        assert (customer.waiting, customer.delayed) == (old["waiting"], old["delayed"])
        assert customer.settings.limit == old["settings"]["limit"]


def _body(old: Any) -> Any:
    body = old["body"]
    return bytes.fromhex(body["hex"]).decode("latin-1") if isinstance(body, dict) else body


def claimed_one_by_one(store: AnyStore, *, completed: bool = True) -> list[str]:
    order = []
    while claims := store.claim(1, worker="later", lease_us=3_600 * SECOND_US).claims:
        order.append(claims[0].document.id)
        if completed:
            store.finish([Completed(claims[0].fence)])
    return order


def digest_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_a_file_of_0_1_is_refused_with_the_command_that_copies_it(old_file: Path) -> None:
    before = digest_of(old_file.parent)

    with pytest.raises(StoreRefused, match=r"has schema 8, of fairturn 0\.1; .* fairturn copy OLD"):
        Queue(old_file)

    assert digest_of(old_file.parent) == before


def test_a_file_of_0_1_is_copied_into_a_new_file_and_goes_on_there(
    old_file: Path, tmp_path: Path
) -> None:
    known, before = expected("queue-0.1.json"), digest_of(tmp_path)
    target = tmp_path / "new" / "documents.db"
    target.parent.mkdir()

    copied = copy_queue(old_file, target)

    assert (copied.documents, copied.customers) == (57, 9)
    after = {name: sha for name, sha in digest_of(tmp_path).items() if not name.startswith("new/")}
    assert after == before  # neither the file nor anything beside it has changed
    store = SqliteStore(target, clock=ManualClock(known["read_at"]))
    assert_documents_are_those_of(known, store)
    folder = Folder(contents_beside(target))
    with store.read_transaction() as snapshot:
        refs = list(query.contents(snapshot))
    assert len(refs) == copied.contents == 2
    for ref in refs:
        folder.open(ref).close()  # raises if it is missing or damaged
    (receipt,) = store.submit([NewDocument("acme", "1")])
    assert receipt.id not in {old["id"] for old in known["documents"]}
    store.cancel([receipt.id])
    assert claimed_one_by_one(store) == known["claims"]
    store.close()


def test_a_file_of_0_1_is_copied_into_postgresql(old_file: Path, url: str, tmp_path: Path) -> None:
    known = expected("queue-0.1.json")
    before = digest_of(tmp_path)

    copied = copy_queue(old_file, url, contents=tmp_path / "shared")

    assert (copied.documents, copied.customers, copied.contents) == (57, 9, 2)
    assert before.items() <= digest_of(tmp_path).items()
    store = PostgresStore(url, clock=ManualClock(known["read_at"]))
    # The copy has ended the leases of a past boot, as the next claim would, at the moment of the
    # copy: patience may choose another order between customers than at `read_at`.
    order = claimed_one_by_one(store)
    assert sorted(order) == sorted(known["claims"])
    customers = {old["id"]: old["customer"] for old in known["documents"]}
    for name in set(customers.values()):
        mine, theirs = (
            [id for id in claimed if customers[id] == name] for claimed in (order, known["claims"])
        )
        assert mine == theirs
    store.close()


def test_a_dump_of_0_1_is_copied_into_another_schema_and_goes_on_there(old_server: str) -> None:
    known = expected("queue-0.1-dump.json")

    done = fairturn("copy", old_server, old_server, "--schema", "invoices", "--json")

    assert json.loads(done.stdout) == {"documents": 60, "customers": 10, "contents": 0}
    with pytest.raises(StoreRefused, match=r"has schema 9, of fairturn 0\.1"):
        PostgresStore(old_server)
    store = PostgresStore(old_server, schema="invoices", clock=ManualClock(known["read_at"]))
    assert_documents_are_those_of(known, store)
    assert claimed_one_by_one(store, completed=False) == known["claim_order"]
    (receipt,) = store.submit([NewDocument("acme", "1")])
    assert receipt.id not in {old["id"] for old in known["documents"]}
    store.close()
    with psycopg.connect(old_server) as connection:
        ((rows,),) = connection.execute("SELECT count(*) FROM fairturn.documents").fetchall()
    assert rows == 60


def test_a_queue_of_this_release_is_copied_to_another_schema(url: str) -> None:
    with Queue(url) as queue:
        first = queue.submit("acme", payload={"n": 1}, key="k").id
        queue.submit("beta", payload={"n": 2})

    copied = copy_queue(url, url, schema="invoices")

    assert (copied.documents, copied.customers) == (2, 2)
    with Queue(url, schema="invoices") as copy, Queue(url) as queue:
        assert list(copy.iterate()) == list(queue.iterate())
        assert copy.submit("acme", payload={"n": 1}, key="k").id == first
        copy.submit("acme")
        assert len(list(copy.iterate())) == 3
        assert len(list(queue.iterate())) == 2
    with pytest.raises(StoreRefused, match="was used already"):
        copy_queue(url, url, schema="invoices")


def test_a_queue_in_use_is_not_copied(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "_LOCK_TIMEOUT_S", 0.05)
    with Queue(url) as queue, psycopg.connect(url) as connection:
        queue.submit("acme", connection=connection)

        with pytest.raises(StoreUnavailable, match="is in use, and nothing was copied"):
            copy_queue(url, url, schema="invoices")

        connection.rollback()
        assert copy_queue(url, url, schema="invoices").documents == 0
