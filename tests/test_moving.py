"""`fairturn copy`: a queue in a file goes on in PostgreSQL as if it had always been there.

That the order stays what it was is shown beside the other stores, in test_agreement.py."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from fairturn import Queue
from fairturn.access import AccessKey, Role
from fairturn.content import Folder
from fairturn.errors import StoreRefused
from fairturn.model import INLINE_BYTES_MAX, Completed, Filter
from fairturn.moving import Copied, copy_queue
from fairturn.stores.postgres import PostgresStore
from tests.commands import SCRIPT, complete, error_of, fairturn, kill, lines_of
from tests.servers.queues import Databases

LEASE_US = 30_000_000


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.chdir(tmp_path)
    with Queue("documents.db") as opened:
        yield opened


@pytest.fixture
def url() -> Iterator[str]:
    with Databases() as databases:
        yield databases.new(empty=True)


def fill(queue: Queue) -> None:
    for customer in "abca":
        queue.submit(customer, payload={"n": 1}, key=f"key of {customer}")
    complete(queue, 2)
    kill(queue)
    queue.submit("b", payload="waits", metadata={"a": 1}, name="letter")
    queue.submit("c", content=b"bytes")
    queue.submit("c", payload=1, due_at=4_000_000_000_000_000)
    queue.cancel(queue.submit("c").id)
    queue.set_customer("b", weight=2, limit=3)
    queue.store.add_key(AccessKey("id", Role.CUSTOMER, "b", "letters", b"digest", made_at=1))


def test_everything_is_there_afterwards_under_its_old_id(queue: Queue, url: str) -> None:
    fill(queue)

    copied = copy_queue("documents.db", url)

    before = list(queue.iterate())
    with Queue(url) as copy:
        assert list(copy.iterate()) == before
        assert copied == Copied(documents=len(before), customers=3, contents=0)
        assert copy.summary() == queue.summary()
        assert copy.customers() == queue.customers()
        assert copy.settings == queue.settings
        assert copy.store.access_key("id") == queue.store.access_key("id") is not None
        for document in before:
            assert copy.store.read(document.id) == queue.store.read(document.id)
        assert copy.submit("a", payload={"n": 1}, key="key of a").repeated


def test_large_contents_go_into_the_folder_of_all_machines(
    queue: Queue, url: str, tmp_path: Path
) -> None:
    large = b"x" * (INLINE_BYTES_MAX + 1)
    document = queue.submit("a", content=large).id

    with pytest.raises(StoreRefused, match="1 contents outside its file; name the folder"):
        copy_queue("documents.db", url)
    copied = copy_queue("documents.db", url, contents=tmp_path / "shared")

    assert copied.contents == 1
    with Queue(url, contents=Folder(tmp_path / "shared")) as copy:
        assert copy.read(document) == large


def test_a_queue_in_which_something_runs_is_not_copied(queue: Queue, url: str) -> None:
    queue.submit("a")
    (claim,) = queue.store.claim(1, worker="w", lease_us=LEASE_US).claims

    with pytest.raises(StoreRefused, match="1 documents of the queue are running; let the"):
        copy_queue("documents.db", url)
    queue.store.finish([Completed(claim.fence)])

    assert copy_queue("documents.db", url).documents == 1


def test_a_queue_that_was_used_is_never_written_over(queue: Queue, url: str) -> None:
    queue.submit("a")
    with Queue(url) as other:
        other.submit("somebody else")

    with pytest.raises(StoreRefused, match="has a queue that was used already"):
        copy_queue("documents.db", url)

    with Queue(url) as other:
        assert [customer.name for customer in other.customers().customers] == ["somebody else"]


@pytest.mark.parametrize("point", ["copy-before-commit", "copy-after-commit"])
def test_a_copy_that_is_killed_leaves_all_of_the_queue_or_nothing(
    queue: Queue, url: str, point: str
) -> None:
    fill(queue)

    child = subprocess.run(
        [SCRIPT, "copy", "documents.db", url],
        env={**os.environ, "FAIRTURN_CRASH_AT": point},
        capture_output=True,
        check=False,
    )

    assert child.returncode == -signal.SIGKILL
    store = PostgresStore(url)
    found = store.find(Filter(), size=1_000).documents
    store.close()
    if point == "copy-before-commit":
        assert found == []
        copy_queue("documents.db", url)
    else:
        assert found == list(queue.iterate())


def test_the_command_says_what_was_copied_and_never_the_password(queue: Queue, url: str) -> None:
    queue.submit("a")
    secret = url.replace("postgres@", "postgres:secret@", 1)

    printed = fairturn("copy", "documents.db", secret)

    assert printed.exit_code == 0, printed.stderr
    assert printed.stdout.startswith(
        "Copied 1 document of 1 customer to postgresql://postgres:***@"
    )
    assert "put documents.db away" in printed.stdout
    assert "secret" not in error_of(fairturn("copy", "documents.db", secret), 1)


def test_programs_get_the_numbers(queue: Queue, url: str) -> None:
    queue.submit("a")

    assert lines_of(fairturn("copy", "documents.db", url, "--json")) == [
        {"documents": 1, "customers": 1, "contents": 0}
    ]


def test_what_cannot_be_copied_is_told_with_what_to_do(tmp_path: Path, url: str) -> None:
    absent = str(tmp_path / "absent.db")

    assert "there is no queue" in error_of(fairturn("copy", absent, url), 1)
    assert "is no postgresql:// address" in error_of(fairturn("copy", absent, "other.db"), 2)
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT to_regnamespace('fairturn') IS NULL").fetchall()
    assert found == [(True,)]
