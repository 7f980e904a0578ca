"""A content is deleted only if the store reports it as unreferenced: after a lost reply, a refusal,
a lost attempt, a purge; and never while a transaction in flight may refer to it."""

import logging
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import apsw
import psycopg
import pytest

from fairturn import Queue
from fairturn.clock import ManualClock, SystemClock
from fairturn.contents.local import SWEEP_AGE_US, Folder, sweep
from fairturn.errors import FairturnError, KeyReused, QueueFull
from fairturn.model import Fence, NewDocument, Outcome, Receipt, State
from fairturn.stores.memory import MemoryStore
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.sqlite import SqliteStore
from tests import handlers
from tests.http_server import bearer, client_of, key_for
from tests.servers import lossy, postgres
from tests.servers.lossy import Lossy
from tests.servers.queues import Databases
from tests.test_worker import drain

LARGE = b"x" * 100_000
PATIENCE_S = 30.0
EVER = 1 << 62


def contents_in(queue: Queue) -> set[str]:
    return set(queue.contents.names(older_than=EVER))


# ── A reply is lost after the commit ─────────────────────────────────────────────────────────────


@pytest.fixture
def proxied(databases: Databases, tmp_path: Path) -> Iterator[tuple[Queue, Lossy]]:
    """A queue in PostgreSQL behind a proxy that can lose a reply."""
    name = databases.new().rpartition("/")[2].partition("?")[0]
    url = urlsplit(postgres.of_this_run().url(name, tcp=True))
    assert url.hostname is not None
    assert url.port is not None
    with lossy.before(url.hostname, url.port) as proxy:
        through = urlunsplit(url._replace(netloc=f"postgres@127.0.0.1:{proxy.port}"))
        with Queue(through, contents=Folder(tmp_path / "contents")) as queue:
            yield queue, proxy


def test_a_submission_whose_reply_was_lost_keeps_its_content(
    proxied: tuple[Queue, Lossy],
) -> None:
    queue, proxy = proxied
    queue.submit("acme")  # opens a connection
    proxy.lose_reply_to(b"order-17")

    receipt = queue.submit("acme", content=LARGE, key="order-17")

    assert proxy.has_lost_it
    assert receipt.replayed
    assert queue.read(receipt.id) == LARGE


def test_an_upload_whose_reply_from_the_database_was_lost_keeps_its_content(
    proxied: tuple[Queue, Lossy],
) -> None:
    queue, proxy = proxied
    headers = {**bearer(key_for(queue, "acme")), "Idempotency-Key": "order-17"}
    with client_of(queue) as client:
        proxy.lose_reply_to(b"order-17")
        answer = client.post("/v1/documents", content=LARGE, headers=headers)
        assert proxy.has_lost_it
        again = client.post("/v1/documents", content=LARGE, headers=headers)

    assert answer.is_success
    assert again.json()["id"] == answer.json()["id"]
    assert queue.read(answer.json()["id"]) == LARGE
    assert len(contents_in(queue)) == 1


class RefusesTheSecondAttempt(MemoryStore):
    """A store that sends a submission twice because the first reply was lost, and then rejects it:
    the first attempt filled the queue or used the key."""

    error: FairturnError = QueueFull(limit="x", maximum=1, waiting=1, customer=None)

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        super().submit(documents, connection=connection)
        raise self.error


@pytest.mark.parametrize(
    "error", [RefusesTheSecondAttempt.error, KeyReused("k")], ids=lambda error: type(error).__name__
)
@pytest.mark.parametrize("over_http", [False, True], ids=["directly", "over HTTP"])
def test_a_document_that_was_stored_keeps_its_content_whatever_its_repetition_was_answered(
    error: FairturnError, over_http: bool
) -> None:
    store = RefusesTheSecondAttempt()
    store.error = error
    with Queue(store) as queue:
        if over_http:
            headers = bearer(key_for(queue, "acme"))
            with client_of(queue) as client:
                assert not client.post("/v1/documents", content=LARGE, headers=headers).is_success
        else:
            with pytest.raises(type(error)):
                queue.submit("acme", content=LARGE)

        (document,) = queue.iterate()
        assert queue.read(document.id) == LARGE


class RecordsTwice(SqliteStore):
    """A store that sends outcomes twice because the first reply was lost."""

    def finish(self, outcomes: Sequence[Outcome]) -> list[Fence]:
        super().finish(outcomes)
        return super().finish(outcomes)

    def claim(self, *args: Any, outcomes: Sequence[Outcome] = (), **options: Any) -> Any:
        lost = self.finish(outcomes) if outcomes else []
        return super().claim(*args, **options)._replace(lost=lost)


def test_a_recorded_result_keeps_its_file_if_its_repetition_is_reported_as_lost(
    tmp_path: Path,
) -> None:
    with Queue(RecordsTwice(tmp_path / "documents.db")) as queue:
        receipt = queue.submit("acme")
        drain(queue, handlers.write_file, lease_s=1)

        assert queue.get(receipt.id).state is State.COMPLETED
        with queue.open_result(receipt.id) as file:
            assert file.read() == b"page " * 100_000


class SubmittedAgainDuringPurge(MemoryStore):
    """A store in which a submission whose first reply was lost is repeated right after a purge."""

    lost: Sequence[NewDocument] = ()

    def submit(self, documents: Sequence[NewDocument], *, connection: Any = None) -> list[Receipt]:
        self.lost = documents
        return super().submit(documents, connection=connection)

    def purge(self, customer: str) -> list[str]:
        names = super().purge(customer)
        super().submit(self.lost)
        return names


def test_a_document_that_is_stored_again_beside_a_purge_keeps_its_content() -> None:
    with Queue(SubmittedAgainDuringPurge()) as queue:
        queue.submit("acme", content=LARGE)

        queue.purge("acme")

        (document,) = queue.iterate()
        assert queue.read(document.id) == LARGE


# ── A transaction is in flight ───────────────────────────────────────────────────────────────────


@pytest.fixture
def queue(store: PostgresStore, tmp_path: Path) -> Queue:
    return Queue(store, contents=Folder(tmp_path / "contents"))


def swept(queue: Queue, timeout_s: float) -> int:
    """Return what a sweep more than an hour from now deletes."""
    much_later = SystemClock().now() + 2 * SWEEP_AGE_US
    return sweep(queue.contents, partial(queue.store.unreferenced, timeout_s=timeout_s), much_later)


def test_a_sweep_spares_the_content_of_a_submission_that_is_not_committed_yet(
    queue: Queue, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with psycopg.connect(url) as connection, caplog.at_level(logging.INFO, "fairturn.postgres"):
        receipt = queue.submit("acme", content=LARGE, connection=connection)

        assert swept(queue, timeout_s=0.05) == 0
        assert "1 contents without a document are kept for now" in caplog.text

    assert queue.read(receipt.id) == LARGE


@pytest.mark.parametrize("commits", [True, False])
def test_a_sweep_waits_for_a_transaction_in_flight_and_follows_its_end(
    queue: Queue, url: str, commits: bool
) -> None:
    deleted: list[int] = []
    with psycopg.connect(url) as connection:
        receipt = queue.submit("acme", content=LARGE, connection=connection)
        sweeping = threading.Thread(target=lambda: deleted.append(swept(queue, PATIENCE_S)))
        sweeping.start()
        if not commits:
            connection.rollback()
    sweeping.join(PATIENCE_S)

    assert deleted == [0 if commits else 1]
    if commits:
        assert queue.read(receipt.id) == LARGE


def test_transactions_that_do_not_write_to_the_queue_hold_up_no_sweep(
    queue: Queue, url: str
) -> None:
    queue.contents.put([b"orphan"])
    with psycopg.connect(url) as writes, psycopg.connect(url) as reads:
        writes.execute("CREATE TABLE other AS SELECT 1")
        reads.execute("SELECT * FROM fairturn.documents")

        assert swept(queue, timeout_s=0.0) == 1


def test_a_repetition_inside_the_caller_s_transaction_keeps_the_content_of_the_first(
    queue: Queue, url: str
) -> None:
    with psycopg.connect(url) as connection:
        first = queue.submit("acme", content=LARGE, key="k", connection=connection)
        again = queue.submit("acme", content=LARGE, key="k", connection=connection)

    assert again == first._replace(replayed=True)
    assert queue.read(first.id) == LARGE
    assert swept(queue, timeout_s=PATIENCE_S) == 1  # the second copy remained for the sweep
    assert len(contents_in(queue)) == 1


def test_a_refusal_inside_the_caller_s_transaction_leaves_no_content(
    queue: Queue, url: str
) -> None:
    queue.configure(waiting_max=1)
    queue.submit("acme")
    with psycopg.connect(url) as connection, pytest.raises(QueueFull):
        queue.submit("acme", content=LARGE, connection=connection)

    assert contents_in(queue) == set()


def test_in_a_file_the_write_lock_of_another_process_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "documents.db"
    with Queue(path, clock=ManualClock(1_800_000_000_000_000)) as queue:
        queue.submit("acme", content=LARGE)
        orphan = queue.contents.put([b"about to belong to a document"])
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE documents SET content_name = ?", (orphan.name,))
        answers: list[list[str]] = []
        looking = threading.Thread(
            target=lambda: answers.append(queue.store.unreferenced([orphan.name]))
        )
        looking.start()
        looking.join(0.1)  # without the lock it returns at once
        other.execute("COMMIT")
        other.close()
        looking.join(PATIENCE_S)

    assert answers == [[]]
