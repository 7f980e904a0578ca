"""No id and no fence of an SQLite file is reused after power cuts and restores."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import pytest

from fairturn import Queue
from fairturn.clock import SECOND_US, ManualClock
from fairturn.maintenance.backup import back_up
from fairturn.maintenance.copy import copy_queue
from fairturn.model import Completed, NewDocument
from fairturn.stores.sqlite import SqliteStore
from tests.commands import claim, fairturn, lines_of
from tests.servers.queues import Databases

START = 1_700_000_000 * SECOND_US
LEASE_US = 30 * SECOND_US


# ── Power cuts ───────────────────────────────────────────────────────────────────────────────────


class Machine:
    """A machine whose power can be cut: its files then have their last synced content.

    SQLite syncs a submission before it returns. The store syncs the WAL itself with `os.fsync`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._boots = 0
        self._disk: dict[str, bytes] = {}
        self._store: SqliteStore | None = None
        fsync = os.fsync

        def sync(descriptor: int) -> None:
            fsync(descriptor)
            self._sync()

        monkeypatch.setattr("os.fsync", sync)

    def _sync(self) -> None:
        self._disk = {path.name: path.read_bytes() for path in self._folder.glob("queue.db*")}

    def boot(self, synchronous: str) -> SqliteStore:
        """Start the machine with what is on the disk."""
        self.cut()
        self._boots += 1
        for name, content in self._disk.items():
            if not name.endswith("-shm"):
                (self._folder / name).write_bytes(content)
        clock = ManualClock(START, boot=f"boot-{self._boots}")
        self._store = SqliteStore(
            self._folder / "queue.db", clock=clock, key=5, synchronous=synchronous
        )
        return self._store

    def submit(self) -> None:
        assert self._store is not None
        self._store.submit([NewDocument("acme", "1")])
        self._sync()

    def cut(self) -> None:
        if self._store is not None:
            self._store.close()
        for path in self._folder.glob("queue.db*"):
            path.unlink()


@pytest.mark.parametrize("synchronous", ["FULL", "NORMAL"])
@pytest.mark.parametrize("claims", [1, 3])
def test_no_fence_comes_again_after_any_number_of_power_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, synchronous: str, claims: int
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    fences: list[int] = []
    for _ in range(5):  # the first claim ever, and the first of each boot after a cut
        store = machine.boot(synchronous)
        for _ in range(claims):
            machine.submit()
        for _ in range(claims):
            (claimed,) = store.claim(1, worker="w", lease_us=LEASE_US, synced=False).claims
            fences.append(claimed.fence.number)
    machine.cut()

    assert fences == sorted(set(fences))


# ── Restores ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Seen:
    """Every id and fence that a queue has returned."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.fences: list[int] = []

    def work(self, queue: Queue) -> None:
        """Submit, and claim everything that waits: the new documents must be included."""
        submitted = [queue.submit(customer).id for customer in "abc"]
        claims = claim(queue, 2) + claim(queue, 99)
        assert set(submitted) <= {claimed.document.id for claimed in claims}
        self.ids += submitted
        self.fences += sorted({claimed.fence.number for claimed in claims})

    def assert_none_came_again(self) -> None:
        assert len(set(self.ids)) == len(self.ids)
        assert len(set(self.fences)) == len(self.fences)


def copy_by_hand(queue: Queue) -> None:
    """Copy the files like a snapshot of the disk."""
    for path in Path().glob("documents.db*"):
        if not path.name.endswith("-shm"):
            shutil.copy(path, path.name.replace("documents", "copy"))


def restore() -> None:
    for path in Path().glob("documents.db*"):
        path.unlink()
    for path in Path().glob("copy.db*"):
        shutil.copy(path, path.name.replace("copy", "documents"))


@pytest.mark.parametrize("copy", [lambda queue: back_up(queue, "copy.db"), copy_by_hand])
def test_no_id_and_no_fence_comes_again_in_a_queue_that_was_restored_twice(
    copy: Callable[[Queue], object],
) -> None:
    seen = Seen()
    with Queue("documents.db") as queue:
        seen.work(queue)
        copy(queue)
        seen.work(queue)  # this is lost
        queue.submit("a")
        (late,) = claim(queue)
    for _ in range(2):
        restore()
        if copy is copy_by_hand:
            assert lines_of(fairturn("restored", "documents.db", "--json")) == [{"restored": True}]
        with Queue("documents.db") as queue:
            seen.work(queue)
            assert queue.store.finish([Completed(late.fence)]) == [late.fence]

    seen.assert_none_came_again()


def test_a_copy_begins_one_epoch_however_often_it_is_opened_and_written_to() -> None:
    with Queue("documents.db") as queue:
        queue.submit("acme")
        back_up(queue, "copy.db")
    assert epoch("documents.db").startswith("0; after a restore from anything but a fairturn")
    assert epoch("copy.db") == "0; a copy by fairturn backup: its first write begins a new one"

    for _ in range(2):
        with Queue("copy.db") as copy:
            assert copy.summary().waiting > 0
            copy.submit("acme")
            copy.submit("acme")

    assert epoch("copy.db").startswith("1; ")


def epoch(file: str) -> str:
    (found,) = (
        line["finding"]
        for line in lines_of(fairturn("doctor", "--json", "-d", file))
        if line["check"] == "epoch"
    )
    return str(found)


def test_processes_that_have_the_file_open_begin_an_epoch_when_it_is_restored_in_place() -> None:
    seen = Seen()
    with Queue("documents.db") as queue:
        seen.work(queue)
        back_up(queue, "copy.db")
        seen.work(queue)
        restore_in_place()

        seen.work(queue)
        seen.work(queue)

    seen.assert_none_came_again()


def restore_in_place() -> None:
    """Do what `.restore` of the sqlite3 program does, while other processes have the file open."""
    source, target = apsw.Connection("copy.db"), apsw.Connection("documents.db")
    with target.backup("main", source, "main") as restoring:
        restoring.step()
    source.close()
    target.close()


def test_a_process_trusts_no_cache_of_before_the_restore() -> None:
    with Queue("documents.db") as queue, Queue("documents.db") as other:
        back_up(queue, "copy.db")
        for customer in "xyz":
            queue.submit(customer)
            assert len(claim(queue)) == 1
        restore_in_place()
        submitted = [other.submit(customer).id for customer in "abcd"]
        claims = [claimed for _ in "abc" for claimed in claim(other)]

        claims += claim(queue)  # as many claims from the file as before the restore

        assert [claimed.document.id for claimed in claims] == submitted


@pytest.fixture
def url() -> Iterator[str]:
    with Databases() as databases:
        yield databases.new(empty=True)


def test_a_copy_that_goes_on_in_postgresql_gives_out_no_id_again(url: str) -> None:
    with Queue("documents.db") as queue:
        queue.submit("a")
        back_up(queue, "copy.db")
        lost = {queue.submit("a").id for _ in range(3)}
        before = Path("copy.db").read_bytes()

    copy_queue("copy.db", url)

    with Queue(url) as copied:
        assert {copied.submit("b").id for _ in range(3)}.isdisjoint(lost)
    assert Path("copy.db").read_bytes() == before
