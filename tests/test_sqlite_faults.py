"""Faults around an SQLite file: locks that are not released, damaged pages, a full disk."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest

from fairturn import Queue
from fairturn.clock import SECOND_US, stopwatch
from fairturn.errors import FairturnError, StoreBusy, StoreError, StoreFull, StoreUnavailable
from fairturn.maintenance.backup import back_up
from fairturn.model import Filter, NewDocument, Settings
from fairturn.service.app import make_app
from fairturn.stores.sqlite import SqliteStore
from fairturn.stores.sqlite import connection as database
from fairturn.stores.sqlite.connection import holder_of
from tests.commands import fairturn
from tests.http_server import asked
from tests.wait import wait_until

LEASE_US = 30 * SECOND_US
MIB = 1_048_576
PAGE_BYTES = 4_096


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "documents.db"


@pytest.fixture
def store(file: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(file)
    yield opened
    opened.close()


@pytest.fixture
def locked(store: SqliteStore) -> Iterator[apsw.Connection]:
    """The write lock of the file, held by another connection."""
    connection = apsw.Connection(str(store.path))
    connection.execute("BEGIN IMMEDIATE")
    yield connection
    connection.close()


def new(customer: str = "acme", body: str = "1") -> NewDocument:
    return NewDocument(customer, body, size_bytes=len(body))


def writes(store: SqliteStore) -> dict[str, Callable[[], object]]:
    """Return a call of every kind that needs the write lock."""
    return {
        "submit": lambda: store.submit([new()]),
        "claim": lambda: store.claim(1, worker="w", lease_us=LEASE_US),
        "renew": lambda: store.renew([], lease_us=LEASE_US),
        "finish": lambda: store.finish([]),
        "cancel": lambda: store.cancel([]),
        "retry": lambda: store.retry([]),
        "configure": lambda: store.configure(Settings()),
        "prune": store.prune,
        "purge": lambda: store.purge("acme"),
    }


def waits(store: SqliteStore) -> bool:
    """Return whether a writing thread waits for the lock of the file."""
    lock = store._database._lock
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def reads(store: SqliteStore, ids: list[str]) -> dict[str, Callable[[], object]]:
    """Return a call of every kind that reads."""
    return {
        "settings": store.settings,
        "summary": store.summary,
        "find": lambda: store.find(Filter(), size=100),
        "customers": store.customers,
        "lanes": store.lanes,
        "snapshot": lambda: [store.snapshot(id) for id in ids[::5]],
        "read": lambda: [store.read(id) for id in ids],
        "workers": store.workers,
        "oldest_waiting": store.oldest_waiting,
        "access_keys": store.access_keys,
        "unreferenced": lambda: store.unreferenced(["x"]),
        "version": store.version,
    }


# ── Locks ────────────────────────────────────────────────────────────────────────────────────────


def test_every_call_that_writes_raises_store_busy_within_the_busy_timeout(
    store: SqliteStore, locked: apsw.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)

    for name, call in writes(store).items():
        begun_s = stopwatch()
        with pytest.raises(StoreBusy, match=f"locked by process {os.getpid()} "):
            call()
        assert stopwatch() - begun_s < 5, name


def test_threads_that_wait_for_one_lock_wait_beside_each_other_and_not_in_turn(
    store: SqliteStore, locked: apsw.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.5)
    ended: list[tuple[str, float]] = []

    def call(name: str, write: Callable[[], object]) -> None:
        begun_s = stopwatch()
        with pytest.raises(StoreBusy):
            write()
        ended.append((name, stopwatch() - begun_s))

    calls = list(writes(store).items()) * 3
    threads = [threading.Thread(target=call, args=each) for each in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(ended) == len(calls)
    assert max(seconds for _, seconds in ended) < 3  # one after the other they would take 13 s


def test_an_interrupt_ends_the_waits_that_are_under_way_and_no_later_one(
    store: SqliteStore, locked: apsw.Connection
) -> None:
    outcomes: list[str] = []

    def submit() -> None:
        try:
            store.submit([new()])
            outcomes.append("stored")
        except StoreBusy:
            outcomes.append("busy")

    waiting = threading.Thread(target=submit)
    waiting.start()
    wait_until(lambda: waits(store), "the submitter waits for the lock")
    begun_s = stopwatch()
    store.interrupt()
    waiting.join()
    assert stopwatch() - begun_s < 5
    later = threading.Thread(target=submit)
    later.start()
    wait_until(lambda: waits(store), "the next submitter waits for the lock")
    locked.execute("ROLLBACK")
    later.join()

    assert outcomes == ["busy", "stored"]


def test_a_call_that_begins_while_the_store_closes_does_not_wait_for_a_lock(
    store: SqliteStore, locked: apsw.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def sign_on() -> None:
        try:
            store.sign_on("w", 1)
        except StoreUnavailable as error:
            ended.append(str(error))

    calling = threading.Thread(target=sign_on)
    interrupt = store._database.interrupt

    def interrupt_just_before_a_call() -> None:
        interrupt()
        calling.start()
        wait_until(lambda: waits(store) or bool(ended), "the call waits for the lock, or has ended")

    monkeypatch.setattr(database, "BUSY_S", 30.0)
    begun_s = stopwatch()
    with monkeypatch.context() as patch:
        patch.setattr(store._database, "interrupt", interrupt_just_before_a_call)
        store.close()
    calling.join()

    assert stopwatch() - begun_s < 5
    assert "was closed" in ended[0]


def test_a_wait_for_changes_ends_in_time_while_another_thread_waits_for_a_lock(
    store: SqliteStore, locked: apsw.Connection
) -> None:
    version = store.version()
    writing = threading.Thread(target=store.submit, args=([new()],))
    writing.start()
    wait_until(lambda: waits(store), "the submitter waits for the lock")
    begun_s = stopwatch()

    assert store.wait(version, 0.1) == version

    assert stopwatch() - begun_s < 5
    locked.execute("ROLLBACK")
    writing.join()
    assert store.wait(version, 5) != version


def test_closing_a_store_does_not_wait_for_a_call_that_waits_for_a_lock(
    store: SqliteStore, locked: apsw.Connection
) -> None:
    failed: list[BaseException] = []

    def submit() -> None:
        try:
            store.submit([new()])
        except StoreError as error:
            failed.append(error)

    waiting = threading.Thread(target=submit)
    waiting.start()
    wait_until(lambda: waits(store), "the submitter waits for the lock")
    begun_s = stopwatch()

    store.close()
    waiting.join()

    assert stopwatch() - begun_s < 5
    assert len(failed) == 1


def test_the_process_that_holds_the_write_lock_is_named(file: Path) -> None:
    with Queue(file) as queue:
        queue.submit("acme")
        assert holder_of(file) is None
        program = (
            "import sys, apsw; c = apsw.Connection(sys.argv[1]); c.execute('BEGIN IMMEDIATE');"
            "print(flush=True); sys.stdin.read()"
        )
        with subprocess.Popen(
            [sys.executable, "-c", program, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()

            holder = holder_of(file)
            process.kill()

        assert holder is not None
        assert holder.pid == process.pid
        assert not holder.is_stopped
        assert holder_of(file) is None


# ── Damaged pages ────────────────────────────────────────────────────────────────────────────────


def fill(file: Path) -> list[str]:
    """Create a queue on about fifty pages and return the ids of its documents."""
    with Queue(file) as queue:
        for n in range(60):
            queue.submit(f"customer {n % 20}", payload="x" * 800)
        queue.store.claim(10, worker="w", lease_us=LEASE_US)
        return [document.id for document in queue.iterate()]


def damage(file: Path, page: int, random: Random) -> None:
    with file.open("r+b") as opened:
        opened.seek(page * PAGE_BYTES)
        opened.write(random.randbytes(PAGE_BYTES))


def test_no_error_of_the_driver_leaves_the_store_whichever_page_is_damaged(file: Path) -> None:
    ids = fill(file)
    random = Random(18)
    errors = 0
    for page in range(1, file.stat().st_size // PAGE_BYTES):
        copy = file.with_name(f"damaged{page}.db")
        shutil.copy(file, copy)
        damage(copy, page, random)
        try:
            store = SqliteStore(copy, synchronous="NORMAL")
        except FairturnError:
            errors += 1
            continue
        met = 0
        for call in [*reads(store, ids).values(), *writes(store).values()]:
            try:
                call()
            except FairturnError:  # any other error fails the test
                met += 1
        if met:
            with pytest.raises(StoreError, match="damaged"):
                store.check()
        store.close()
        errors += met

    assert errors > 100


def test_the_service_is_not_ready_once_a_call_has_met_damage(file: Path) -> None:
    ids = fill(file)
    damage(file, file.stat().st_size // PAGE_BYTES - 1, Random(1))
    with Queue(file) as queue:
        app = make_app(queue)
        assert asked(app, "GET", "/readyz").status_code == 200
        failures = 0
        for call in reads(_sqlite(queue), ids).values():
            try:
                call()
            except StoreError:
                failures += 1
        assert failures > 0

        not_ready = asked(make_app(queue), "GET", "/readyz")

    assert not_ready.status_code == 503
    assert not_ready.json()["reasons"] == ["store: it does not respond"]


def test_a_backup_of_a_damaged_file_names_the_file_and_not_the_copy(file: Path) -> None:
    fill(file)
    damage(file, file.stat().st_size // PAGE_BYTES // 2, Random(1))

    with Queue(file) as queue, pytest.raises(StoreError) as failed:
        back_up(queue, "copy.db")

    assert str(failed.value).startswith(f"{file} is damaged (")
    assert "copy.db" not in str(failed.value)


def _sqlite(queue: Queue) -> SqliteStore:
    assert isinstance(queue.store, SqliteStore)
    return queue.store


# ── A full disk ──────────────────────────────────────────────────────────────────────────────────


def leave(place: Path, free_bytes: int) -> None:
    """Fill the disk except for this many bytes."""
    stat = os.statvfs(place)
    with (place / "ballast").open("wb") as ballast:
        ballast.write(bytes(max(0, stat.f_bavail * stat.f_frsize - free_bytes)))


def test_a_large_submission_in_a_group_commit_does_not_fail_a_small_one(small_disk: Path) -> None:
    store = SqliteStore(small_disk / "documents.db")
    locked = apsw.Connection(str(store.path))
    leave(small_disk, database.RESERVE_BYTES + 2 * MIB)
    locked.execute("BEGIN IMMEDIATE")  # so that submissions queue behind the first
    outcomes: dict[str, Any] = {}

    def submit(name: str, documents: list[NewDocument]) -> None:
        try:
            outcomes[name] = len(store.submit(documents))
        except StoreFull as error:
            outcomes[name] = type(error)

    def started(name: str, documents: list[NewDocument]) -> threading.Thread:
        thread = threading.Thread(target=submit, args=(name, documents))
        thread.start()
        return thread

    try:
        threads = [started("first", [new()])]
        wait_until(lambda: store._group_commit._writer, "the first submitter writes")
        threads.append(started("small", [new()]))
        threads.append(started("large", [new(body="x" * 60_000)] * 40))
        wait_until(lambda: len(store._group_commit._requests) == 2, "two wait for the next commit")
        locked.execute("ROLLBACK")
        for thread in threads:
            thread.join()
    finally:
        locked.close()
        store.close()

    assert outcomes == {"first": 1, "small": 1, "large": StoreFull}


COMMANDS = {
    "submit": ("submit", "acme", "--payload", "1"),
    "list": ("list",),
    "show": ("show", "0" * 15),
    "explain": ("explain", "0" * 15),
    "wait": ("wait", "0" * 15),
    "cancel": ("cancel", "0" * 15),
    "retry": ("retry", "0" * 15),
    "customers": ("customers",),
    "purge": ("purge", "acme", "--yes"),
    "keys": ("keys",),
    "config": ("config",),
    "prune": ("prune",),
    "backup": ("backup", "copy.db"),
    "export": ("export",),
    "work": ("work", "tests.handlers:echo", "--until-empty"),
}


def test_every_command_ends_with_75_on_a_disk_without_a_free_byte(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Queue(small_disk / "documents.db") as queue:
        queue.submit("acme", payload=1)
    leave(small_disk, 0)

    with monkeypatch.context() as here:
        here.chdir(small_disk)
        ended = {name: fairturn(*arguments) for name, arguments in COMMANDS.items()}

    wrong = {name: end.output for name, end in ended.items() if end.exit_code != 75}
    assert wrong == {}
    assert all("is full" in end.stderr for end in ended.values())
