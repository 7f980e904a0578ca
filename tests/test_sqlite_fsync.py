"""When the SQLite store waits for an fsync, observed in the VFS."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from fairturn import Queue, Worker
from fairturn.clock import NO_BOOT, SECOND_US, ManualClock
from fairturn.errors import StoreUnavailable
from fairturn.model import Completed, NewDocument
from fairturn.stores.sqlite import SqliteStore

START = 1_700_000_000 * SECOND_US
LEASE_US = 30 * SECOND_US
PATIENCE_S = 30


class Disk(apsw.VFS):
    """The real file system, with a list of synced files."""

    def __init__(self) -> None:
        self.synced: list[str] = []
        self.true = apsw.vfs_names()[0]  # the default one
        super().__init__("counting", base=self.true, makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> "File":  # noqa: N802 - SQLite's name
        return File(self, name, flags)


class File(apsw.VFSFile):
    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        self._disk = disk
        self._name = Path(name.filename() if isinstance(name, apsw.URIFilename) else name or "")
        super().__init__(disk.true, name, flags)

    def xSync(self, flags: int) -> None:  # noqa: N802 - SQLite's name
        self._disk.synced.append(self._name.name)
        super().xSync(flags)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        disk.synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    yield disk
    disk.unregister()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def store(tmp_path: Path, disk: Disk, clock: ManualClock) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "queue.db", clock=clock)
    store.submit([new()] * 3)
    store.claim(0, worker="another", lease_us=LEASE_US)  # the first of this boot is synced
    disk.synced.clear()
    yield store
    store.close()


def new(customer: str = "acme") -> NewDocument:
    return NewDocument(customer, "1")


def claim(store: SqliteStore, **options: Any) -> Any:
    return store.claim(1, worker="w", lease_us=LEASE_US, **options)


def test_a_claim_is_on_the_disk_when_it_returns(store: SqliteStore, disk: Disk) -> None:
    claim(store)

    assert disk.synced == ["queue.db-wal"]


def test_a_claim_that_need_not_be_synced_waits_for_no_disk_until_it_is(
    store: SqliteStore, disk: Disk
) -> None:
    claim(store, synced=False)
    assert disk.synced == []

    store.sync()
    assert disk.synced == ["queue.db-wal"]


@pytest.mark.parametrize("synchronous", ["FULL", "NORMAL"])
def test_the_first_claim_of_a_boot_is_on_the_disk_when_it_returns_whatever_was_asked_for(
    tmp_path: Path, disk: Disk, clock: ManualClock, synchronous: str
) -> None:
    store = SqliteStore(tmp_path / "queue.db", clock=clock, synchronous=synchronous)
    for boot in ("boot-2", "boot-3"):
        store.submit([new()])
        clock.reboot(boot)
        disk.synced.clear()

        claim(store, synced=False)

        assert disk.synced == ["queue.db-wal"]
    store.close()


def test_an_outcome_is_on_the_disk_when_it_is_recorded_whatever_is_claimed_with_it(
    store: SqliteStore, disk: Disk
) -> None:
    ((first,), *_) = claim(store)
    disk.synced.clear()

    claim(store, synced=False, outcomes=[Completed(first.fence)])

    assert disk.synced == ["queue.db-wal"]


def test_a_submission_after_such_a_claim_is_on_the_disk_when_it_returns(
    store: SqliteStore, disk: Disk
) -> None:
    claim(store, synced=False)

    store.submit([new()])

    assert disk.synced == ["queue.db-wal"]


def test_where_no_boot_is_known_every_claim_is_synced(
    store: SqliteStore, disk: Disk, clock: ManualClock
) -> None:
    clock.reboot(NO_BOOT)

    claim(store, synced=False)

    assert disk.synced == ["queue.db-wal"]


def test_a_claim_that_finds_nothing_but_has_changed_something_is_synced_too(
    store: SqliteStore, disk: Disk, clock: ManualClock
) -> None:
    store.claim(3, worker="w", lease_us=LEASE_US)
    claim(store)  # records this worker
    disk.synced.clear()

    claim(store, synced=False)
    store.sync()
    assert disk.synced == []  # it changed nothing

    clock.advance(3_600)
    store.claim(0, worker="w", lease_us=LEASE_US, synced=False)  # leases have expired
    store.sync()
    assert disk.synced == ["queue.db-wal"]


def test_nothing_is_synced_twice(store: SqliteStore, disk: Disk) -> None:
    claim(store, synced=False)
    store.sync()
    disk.synced.clear()

    store.sync()

    assert disk.synced == []


def test_a_disk_that_fails_is_told_and_tried_again(
    store: SqliteStore, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(store, synced=False)

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(StoreUnavailable, match="Input/output error"):
            store.sync()
    store.sync()

    assert disk.synced == ["queue.db-wal"]


MIB = 1_048_576


def write(store: SqliteStore, size_bytes: int) -> None:
    store.submit([NewDocument("acme", "x" * 60_000, size_bytes=60_000)] * (size_bytes // 60_000))


def test_a_long_log_is_written_into_the_file_when_nobody_waits_for_the_disk(
    store: SqliteStore, disk: Disk
) -> None:
    write(store, 18 * MIB)
    assert "queue.db" not in disk.synced

    store.wait(store.version(), 0.1)
    assert "queue.db" in disk.synced

    disk.synced.clear()
    store.wait(store.version(), 0.1)
    assert disk.synced == []


def test_a_log_that_nobody_has_time_for_does_not_grow_for_ever(
    store: SqliteStore, disk: Disk, tmp_path: Path
) -> None:
    for _ in range(16):
        write(store, 4 * MIB)

    assert "queue.db" in disk.synced
    assert (tmp_path / "queue.db-wal").stat().st_size < 32 * MIB


def test_a_claim_that_a_power_cut_has_undone_gave_a_fence_that_does_not_come_again(
    store: SqliteStore, clock: ManualClock, tmp_path: Path
) -> None:
    claim(store)
    after = tmp_path / "after"
    after.mkdir()
    for name in ("queue.db", "queue.db-wal"):  # on the disk before the next claim
        shutil.copy(tmp_path / name, after)
    ((undone,), *_) = claim(store, synced=False)
    clock.reboot("boot-2")

    again = SqliteStore(after / "queue.db", clock=clock)
    claims, *_ = again.claim(3, worker="w", lease_us=LEASE_US)
    again.close()

    (repeated,) = [one for one in claims if one.fence.document == undone.fence.document]
    assert repeated.document.attempts == 1
    assert repeated.fence.number > undone.fence.number


def test_a_handler_begins_before_its_claim_is_synced_and_that_follows_at_once(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, synced = threading.Event(), threading.Event()
    fsync = os.fsync

    def late(descriptor: int) -> None:
        assert begun.wait(PATIENCE_S)
        fsync(descriptor)
        synced.set()

    def process(document: object) -> bool:
        begun.set()
        return synced.wait(PATIENCE_S)

    with Queue(tmp_path / "queue.db") as queue:
        queue.store.claim(0, worker="another", lease_us=LEASE_US)  # the first of this boot
        monkeypatch.setattr(os, "fsync", late)
        receipt = queue.submit("acme", payload=1)
        Worker(queue, process, concurrency=1, threads=True).run(until_empty=True)
        assert queue.result(receipt.id) is True
