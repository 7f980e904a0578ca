"""A purged customer is erased: nothing of it is left in the database, its log, its contents or a
later backup."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fairturn import Completed, Failed, Queue
from fairturn.clock import ManualClock
from fairturn.errors import NotFound
from fairturn.maintenance.backup import back_up
from fairturn.stores.sqlite import SqliteStore
from tests.commands import claim, error_of, fairturn
from tests.test_content import run

MARK = b"erased-7f3a"  # in everything that belongs to the purged customer
NAME, TEXT = "customer-erased-7f3a", "text-erased-7f3a "
START = 1_790_000_000_000_000
DAY_S = 24 * 3_600

PURGE_AND_DIE = f"""
import sys
from fairturn import Queue
with Queue(sys.argv[1]) as queue:
    queue.purge({NAME!r})
"""


def files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def traces(folder: Path) -> dict[str, int]:
    """Return how often the mark occurs in each file, and in the names of files."""
    found = {}
    for path in files(folder):
        n = path.read_bytes().count(MARK) + str(path.relative_to(folder)).encode().count(MARK)
        if n:
            found[str(path.relative_to(folder))] = n
    return found


def use(queue: Queue, clock: ManualClock) -> None:
    """Leave data of the customer in every table, among that of others, and delete some of it."""
    queue.keys.make("customer", name=TEXT, customer=NAME)
    for n in range(60):
        name, metadata, tags = f"{TEXT}{n}.pdf", {TEXT: n}, [f"{TEXT}{n}"]
        for payload in ({"small": TEXT}, {"large": TEXT * 2_000}):
            key = f"{TEXT}{n}{len(str(payload))}"
            queue.submit(NAME, payload=payload, key=key, name=name, metadata=metadata, tags=tags)
        queue.submit(f"other {n}", payload={"small": "x" * n, "large": "y" * 40 * n})
        if n % 10 == 0:
            queue.submit(NAME, content=TEXT.encode() * 10_000, name=name)
    while claims := claim(queue, 50):
        for n, each in enumerate(claims):
            text = (TEXT if each.document.customer == NAME else "z ") * 400
            failed, completed = Failed(each.fence, text, 1), Completed(each.fence, f'"{text}"')
            queue.store.finish([failed if n % 3 else completed])
        clock.advance(1)
    clock.advance(40 * DAY_S)
    for n in range(40):
        queue.submit(NAME, payload={"late": TEXT * (1 + 50 * n)})
        queue.submit(f"other {n}", payload={"late": "x" * 50 * n})
    queue.prune()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "queue"
    folder.mkdir()
    return folder


def test_nothing_of_a_purged_customer_is_left_in_any_file(folder: Path, tmp_path: Path) -> None:
    clock = ManualClock(START)
    with Queue(folder / "documents.db", clock=clock) as queue:
        use(queue, clock)
        assert sum(traces(folder).values()) > 100

        queue.purge(NAME)

        assert traces(folder) == {}
        backup = tmp_path / "backup"
        backup.mkdir()
        back_up(queue, backup / "copy.db")
        assert traces(backup) == {}
        assert len(list(queue.iterate())) > 40  # of the others


def test_a_reader_delays_the_erasure_from_the_log_until_the_next_prune(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fairturn.stores.sqlite.connection.ERASE_S", 0.05)
    with Queue(folder / "documents.db") as queue:
        queue.submit(NAME, payload={"text": TEXT})
        store = queue.store
        assert isinstance(store, SqliteStore)
        with store.read_transaction():
            queue.purge(NAME)
            assert "the next prune tries again" in caplog.text
        assert traces(folder) != {}

        queue.prune()

        assert traces(folder) == {}


def test_a_purge_that_is_killed_before_the_erasure_is_completed_by_the_next_prune(
    folder: Path,
) -> None:
    database = folder / "documents.db"
    with Queue(database) as queue:  # keeps the log
        queue.submit(NAME, payload={"text": TEXT})

        assert run(PURGE_AND_DIE, str(database), crash_at="prune-after-commit") == -9

        assert traces(folder) != {}
        queue.prune()
        assert traces(folder) == {}


def test_other_threads_write_while_a_purge_waits_for_a_reader(folder: Path) -> None:
    with Queue(folder / "documents.db") as queue:
        queue.submit(NAME, payload={"text": TEXT})
        store = queue.store
        assert isinstance(store, SqliteStore)
        with store.read_transaction():
            purge = threading.Thread(target=queue.purge, args=(NAME,))
            purge.start()
            queue.submit("other", payload=1)
            purge.join(30)
        assert not purge.is_alive()


def test_the_access_keys_of_a_customer_that_has_never_submitted_are_purged(folder: Path) -> None:
    database = folder / "documents.db"
    with Queue(database) as queue:
        shown = queue.keys.make("customer", customer=NAME).shown
        queue.keys.make("customer", customer="other")
        assert queue.customers().customers == []

        queue.purge(NAME)

        assert queue.keys.check(shown) is None
        assert [key.customer for key in queue.keys.list()] == ["other"]
        assert traces(folder) == {}
        with pytest.raises(NotFound, match="there is no customer"):
            queue.purge(NAME)


def test_the_command_purges_a_customer_that_has_only_access_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Queue("documents.db") as queue:
        queue.keys.make("customer", customer="acme")

    agreed = fairturn("purge", "acme", stdin="acme\n")

    assert "acme has no documents, and possibly access keys" in agreed.stderr
    assert agreed.stdout == "Deleted acme with all its data.\n"
    assert error_of(fairturn("purge", "acme", "--yes"), 3) == "there is no customer 'acme'"
