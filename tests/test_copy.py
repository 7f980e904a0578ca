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
from fairturn.access.keys import AccessKey, Role
from fairturn.contents.local import Folder
from fairturn.errors import StoreRefused, StoreUnavailable
from fairturn.maintenance.copy import Copied, copy_queue
from fairturn.model import INLINE_BYTES_MAX, Completed, Filter, State
from fairturn.stores.conformance.steps import assert_numbers_are_exact
from fairturn.stores.postgres import PostgresStore
from tests.commands import SCRIPT, claim, complete, error_of, fairturn, kill, lines_of
from tests.servers.queues import Databases


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
    queue.store.add_key(AccessKey("id", Role.CUSTOMER, "b", "letters", b"digest", made_at_us=1))


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
        assert copy.submit("a", payload={"n": 1}, key="key of a").replayed


def test_large_contents_go_into_the_folder_of_all_machines(
    queue: Queue, url: str, tmp_path: Path
) -> None:
    large = b"x" * (INLINE_BYTES_MAX + 1)
    document = queue.submit("a", content=large).id

    with pytest.raises(StoreRefused, match="1 contents outside its file; name a folder"):
        copy_queue("documents.db", url)
    copied = copy_queue("documents.db", url, contents=tmp_path / "shared")

    assert copied.contents == 1
    with Queue(url, contents=Folder(tmp_path / "shared")) as copy:
        assert copy.read(document) == large


def test_what_a_copy_left_that_was_killed_while_it_copied_a_content_is_no_obstacle(
    queue: Queue, url: str, tmp_path: Path
) -> None:
    large = b"x" * (INLINE_BYTES_MAX + 1)
    document = queue.submit("a", content=large).id
    killed = subprocess.run(
        [SCRIPT, "copy", "documents.db", url, "--contents", "shared"],
        env={**os.environ, "FAIRTURN_CRASH_AT": "content-before-rename"},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL

    copy_queue("documents.db", url, contents="shared")

    with Queue(url, contents=Folder(tmp_path / "shared")) as copy:
        assert copy.read(document) == large


def test_a_queue_in_which_something_runs_is_not_copied(queue: Queue, url: str) -> None:
    queue.submit("a")
    (claimed,) = claim(queue)

    with pytest.raises(StoreRefused, match="1 documents of the queue are running; let the"):
        copy_queue("documents.db", url)
    queue.store.finish([Completed(claimed.fence)])

    assert copy_queue("documents.db", url).documents == 1


def test_leases_that_expired_are_ended_in_the_copy_and_not_in_the_file(
    queue: Queue, url: str
) -> None:
    queue.configure(attempts_max=2)
    queue.set_customer("a", limit=3)
    last = queue.submit("a").id
    queue.store.claim(1, worker="w", lease_us=1)
    once, cancelled = queue.submit("a").id, queue.submit("b").id
    assert len(queue.store.claim(3, worker="w", lease_us=1).claims) == 3
    queue.cancel(cancelled)
    waiting = queue.submit("b").id
    before = [*queue.iterate(), queue.summary(), queue.customers()]

    copied = copy_queue("documents.db", url)

    assert copied.documents == 4
    assert [*queue.iterate(), queue.summary(), queue.customers()] == before
    with Queue(url) as copy:
        assert {id: copy.get(id).state for id in (last, once, cancelled, waiting)} == {
            last: State.DEAD,
            once: State.WAITING,
            cancelled: State.CANCELLED,
            waiting: State.WAITING,
        }
        assert copy.summary().waiting == 2
        assert_numbers_are_exact(copy.store)
        assert {each.document.id for each in claim(copy, 9)} == {once, waiting}
        assert {each.document.id for each in claim(queue, 9)} == {once, waiting}
        assert copy.summary() == queue.summary()


def test_a_file_that_changes_while_it_is_copied_is_not_copied_and_was_never_locked(
    queue: Queue, url: str
) -> None:
    for _ in range(1_000):
        queue.submit("a")
    submitted: list[str] = []

    def submit(done: int, total: int) -> None:
        if not submitted:  # the rows are being sent to the server
            submitted.append(queue.submit("b").id)

    with pytest.raises(StoreUnavailable, match="was changed while it was copied, and nothing was"):
        copy_queue("documents.db", url, progress=submit)

    assert len(submitted) == 1
    with Queue(url) as target:
        assert target.summary().waiting == 0
    assert copy_queue("documents.db", url).documents == 1_001


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
    assert "keep documents.db as a backup" in printed.stdout
    assert "secret" not in error_of(fairturn("copy", "documents.db", secret), 1)


def test_programs_get_the_numbers(queue: Queue, url: str) -> None:
    queue.submit("a")

    assert lines_of(fairturn("copy", "documents.db", url, "--json")) == [
        {"documents": 1, "customers": 1, "contents": 0}
    ]


def test_what_cannot_be_copied_is_refused_with_a_remedy(
    queue: Queue, tmp_path: Path, url: str
) -> None:
    absent = str(tmp_path / "absent.db")

    assert "there is no queue" in error_of(fairturn("copy", absent, url), 1)
    assert "or use: fairturn backup" in error_of(fairturn("copy", "documents.db", "other.db"), 1)
    assert "only be copied to a postgresql" in error_of(fairturn("copy", url, "other.db"), 1)
    assert not Path("other.db").exists()
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT to_regnamespace('fairturn') IS NULL").fetchall()
    assert found == [(True,)]
