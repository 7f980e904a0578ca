"""A copy of a queue, taken while it is in use: a file with its folder beside it, like any other.

Contents are copied first. Then a moment of the database is held still, what has come since is
copied too, and only then the database. So whatever the copy refers to is in it: a content that was
deleted before it could be copied belongs to a document that is gone as well, and a later moment is
taken.

The copy has another name until it is whole. At every moment there is, under its own name, no copy,
the one before, or this one, each with all its contents. One backup at a time writes a copy: it
holds a lock that ends with its process, so that the next one can remove what a killed one has left.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fairturn import crash
from fairturn.clock import MOMENT_MAX
from fairturn.config import contents_beside
from fairturn.contents.local import Folder, chunks_of
from fairturn.errors import (
    ContentDamaged,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from fairturn.model import ContentRef
from fairturn.queue import Queue
from fairturn.stores.sqlite import SqliteStore
from fairturn.stores.sqlite.connection import refuse_foreign_file
from fairturn.stores.sqlite.copy import Snapshot

MOMENTS_MAX = 100  # that are taken before giving up
_BESIDE = ("", "-wal", "-shm", "-journal")  # what SQLite makes of a name

Progress = Callable[[int, int], None]  # hears of bytes done, and of all


class Backup(NamedTuple):
    """What was copied. A damaged content is damaged in the queue too; all others are whole."""

    path: Path
    size_bytes: int
    contents: int
    damaged: tuple[str, ...]


def back_up(
    queue: Queue,
    to: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> Backup:
    """Copy a queue to a path, synced and verified; with `overwrite` over an older copy, of which
    contents that are still needed are kept. Beside another backup to the same path it raises
    `StoreBusy`."""
    path = Path(to).absolute()
    store = queue.store
    if not isinstance(store, SqliteStore):
        raise StoreRefused(
            "only a queue in a file is copied by this: one in memory ends with its process, and "
            "one in PostgreSQL is copied with pg_dump"
        )
    if not path.parent.is_dir():
        raise StoreRefused(f"the folder {path.parent} does not exist; make it first")
    with named(path), locked(path):
        _refuse_target(store.path, path, overwrite=overwrite)
        return _back_up(queue, store, path, progress)


def _back_up(queue: Queue, store: SqliteStore, path: Path, progress: Progress) -> Backup:
    folder = contents_beside(path)
    before = folder.exists()
    unfinished = path.with_name(f"{path.name}.part")
    remove_database(unfinished)
    # SQLite would let others read the new file until it has the mode of the queue.
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    copying = _Copying(queue, store, Folder(folder), progress)
    try:
        copying.run(unfinished)
        _verify(unfinished, copying)
        shutil.copymode(store.path, unfinished)
        sync(unfinished)
        crash.point("backup-before-rename")
        unfinished.replace(path)
        sync(path.parent)
        crash.point("backup-after-rename")
    except BaseException:
        remove_database(unfinished)
        if not before and not path.exists():  # else they belong to a copy that is there
            shutil.rmtree(folder, ignore_errors=True)
        raise
    copying.forget_others()
    return Backup(
        path,
        path.stat().st_size + copying.size_bytes,
        len(copying.copied),
        tuple(copying.damaged.values()),
    )


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Raise the errors of the system as ours, which name the copy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"the disk of {path} is full; the copy is not complete") from error
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a copy, a file beside it. The kernel releases it when the process ends."""
    lock = path.with_name(f"{path.name}.lock")
    descriptor = _take_lock(lock)
    if descriptor is None:
        raise StoreBusy(f"another backup or restore is writing {path}; try again when it has ended")
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _take_lock(lock: Path) -> int | None:
    """The file, open and locked; None if another process has locked it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass  # the backup that had it has removed it: take a new one
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


class _Copying:
    def __init__(
        self, queue: Queue, store: SqliteStore, target: Folder, progress: Progress
    ) -> None:
        self._queue = queue
        self._store = store
        self._target = target
        self._progress = progress
        self._before = self.present()
        self._done = self._total = 0
        self.copied: dict[str, int] = {}
        self.damaged: dict[str, str] = {}

    @property
    def size_bytes(self) -> int:
        return sum(self.copied.values())

    def present(self) -> set[str]:
        """The contents in the folder of the copy."""
        return set(self._target.names(MOMENT_MAX))

    def run(self, path: Path) -> None:
        with self._store.snapshot() as snapshot:
            refs = list(snapshot.contents())
        database = self._store.path.stat().st_size
        self._total = sum(ref.size_bytes for ref in refs) + database
        for ref in refs:
            with suppress(ContentDamaged):  # deleted since, or it is told of below
                self._copy(ref)
        del refs
        for _ in range(MOMENTS_MAX):
            with self._store.snapshot() as snapshot:
                if self._complete(snapshot):
                    snapshot.write_to(path, lambda part: self._advance(round(part * database)))
                    return
        raise StoreUnavailable(
            "documents are being deleted faster than their contents can be copied; try again later"
        )

    def _complete(self, snapshot: Snapshot) -> bool:
        """Copy what this moment has and no earlier one had; False if some of it is gone already."""
        needed = set()
        for ref in snapshot.contents():
            needed.add(ref.name)
            if ref.name in self.copied or ref.name in self.damaged:
                continue
            try:
                self._copy(ref)
            except ContentDamaged as error:
                if self._store.unreferenced([ref.name]):
                    return False
                self.damaged[ref.name] = str(error)
        # Documents of an earlier moment may be gone since.
        self.copied = {name: size for name, size in self.copied.items() if name in needed}
        self.damaged = {name: said for name, said in self.damaged.items() if name in needed}
        return True

    def _copy(self, ref: ContentRef) -> None:
        if ref.name not in self._before or not is_whole(self._target, ref):
            with self._queue.contents.open(ref) as stream:
                target = Folder(self._target.path, new_name=lambda: ref.name)
                if target.put(chunks_of(stream)) != ref:
                    raise ContentDamaged(f"the content {ref.name} changed while it was copied")
        self.copied[ref.name] = ref.size_bytes
        self._done += ref.size_bytes
        self._total = max(self._total, self._done)
        self._advance(0)

    def _advance(self, of_database: int) -> None:
        self._progress(self._done + of_database, self._total)

    def forget_others(self) -> None:
        """Delete contents of an older copy, and of attempts at one, that this one does not need."""
        self._target.delete(self.present() - self.copied.keys())


def _verify(path: Path, copying: _Copying) -> None:
    """Open the copy as a queue is opened, and look for everything that it refers to."""
    there = copying.present()
    copy = SqliteStore(path, allow_network=True)  # a copy may lie where a queue should not
    try:
        copy.settings()
        with copy.snapshot() as snapshot:
            lost = [
                ref.name
                for ref in snapshot.contents()
                if ref.name not in there and ref.name not in copying.damaged
            ]
    finally:
        copy.close()
    if lost:
        raise StoreError(f"{path} lacks contents that it refers to: {', '.join(lost[:3])}")


def is_whole(folder: Folder, ref: ContentRef) -> bool:
    """Whether a content is there and agrees with its checksum."""
    try:
        folder.open(ref).close()
    except ContentDamaged:
        return False
    return True


def _refuse_target(source: Path, path: Path, *, overwrite: bool) -> None:
    if path.resolve() == source.resolve() or (path.exists() and path.samefile(source)):
        raise StoreRefused(f"{path} is the queue itself; name another file")
    present = [str(there) for there in (path, contents_beside(path)) if there.exists()]
    if present and not overwrite:
        raise StoreRefused(
            f"{' and '.join(present)} exist already; overwrite=True replaces an older copy"
        )
    if path.exists():
        refuse_foreign_file(path)
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise StoreRefused(
                f"{path} is in use, or was not closed ({log.name} is there); it was left untouched"
            )


def remove_database(path: Path) -> None:
    """Remove a file with what SQLite has made beside it."""
    for beside in _BESIDE:
        path.with_name(path.name + beside).unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
