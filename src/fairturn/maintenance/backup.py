"""Online backup of a queue in a file: a database file with its contents folder beside it.

Contents are copied first. Then a snapshot of the database is taken, the contents added since are
copied, and finally the snapshot itself. So the copy contains every content that it refers to. If a
content was deleted before it could be copied, its document is gone too, and a newer snapshot is
taken.

The copy is written under a temporary name and renamed when it is complete. At any time the target
is absent, the previous copy or the new one, each with all its contents. A lock, which the kernel
releases with the process, admits one backup per target; the next one removes the files of a killed
one.
"""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import apsw

from fairturn.clock import TIMESTAMP_MAX
from fairturn.config import contents_beside
from fairturn.contents.local import Folder, copy_content, sync
from fairturn.errors import (
    ContentDamaged,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from fairturn.maintenance.sqlite_file import remove_beside, write_copy
from fairturn.model import ContentRef
from fairturn.queue import Queue
from fairturn.stores import crash
from fairturn.stores.sqlite import SqliteStore
from fairturn.stores.sqlite.query import contents
from fairturn.stores.sqlite.schema import refuse_foreign_file

SNAPSHOTS_MAX = 100  # snapshots before the backup fails

Progress = Callable[[int, int], None]  # called with the amount done and the total


class Backup(NamedTuple):
    """The result of a backup. Contents in `damaged` are damaged in the queue too."""

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
    """Copy a queue to a path. The copy is durable and verified when this returns.

    With `overwrite` it replaces an older copy and reuses its contents. Raise `StoreBusy` if another
    backup or restore is writing to the same path.
    """
    path = Path(to).absolute()
    store = queue.store
    if not isinstance(store, SqliteStore):
        raise StoreRefused(
            "only a queue in a file can be backed up: one in memory ends with its process; for one "
            "in PostgreSQL use pg_dump"
        )
    if not path.parent.is_dir():
        raise StoreRefused(f"the folder {path.parent} does not exist; create it first")
    with locked(path):
        _refuse_target(store.path, path, overwrite=overwrite)
        return _back_up(queue, store, path, progress)


def _back_up(queue: Queue, store: SqliteStore, path: Path, progress: Progress) -> Backup:
    folder = contents_beside(path)
    before = folder.exists()
    copy = _Copy(queue, store, Folder(folder), progress)
    try:
        with unfinished(path) as file:
            copy.run(file)
            _verify(file, copy)
            shutil.copymode(store.path, file)
            sync(file)
            crash.point("backup-before-rename")
            file.replace(path)
            sync(path.parent)
            crash.point("backup-after-rename")
    except BaseException:
        if not before and not path.exists():  # otherwise the folder belongs to a complete copy
            shutil.rmtree(folder, ignore_errors=True)
        raise
    copy.delete_others()
    return Backup(
        path, path.stat().st_size + copy.size_bytes, len(copy.copied), tuple(copy.damaged.values())
    )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock on a copy, a file beside it; raise `StoreBusy` if another process holds it.
    An `OSError` of the block becomes a `StoreError` that names the copy."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = _take_lock(lock)
        if descriptor is None:
            raise StoreBusy(f"another backup or restore is writing {path}; retry when it has ended")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"the disk of {path} is full; the copy is not complete") from error
        raise StoreError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yield an empty file beside the path, to be renamed to it; otherwise it is removed."""
    file = path.with_name(f"{path.name}.part")
    remove_database(file)
    # Created here because SQLite would create it readable for other users.
    os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    try:
        yield file
    finally:
        remove_database(file)


def _take_lock(lock: Path) -> int | None:
    """Return the descriptor of the locked file; None if another process holds the lock."""
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
            pass  # the previous holder removed the file after this process opened it
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


class _Copy:
    """A backup in progress."""

    def __init__(
        self, queue: Queue, store: SqliteStore, target: Folder, progress: Progress
    ) -> None:
        self._queue = queue
        self._store = store
        self._target = target
        self._progress = progress
        self._done = self._total = 0
        self.copied: dict[str, int] = {}
        self.damaged: dict[str, str] = {}

    @property
    def size_bytes(self) -> int:
        return sum(self.copied.values())

    def present(self) -> set[str]:
        """Return the names of the contents in the folder of the copy."""
        return set(self._target.names(TIMESTAMP_MAX))

    def run(self, path: Path) -> None:
        with self._store.read_transaction() as snapshot:
            refs = list(contents(snapshot))
        database = self._store.path.stat().st_size
        self._total = sum(ref.size_bytes for ref in refs) + database
        for ref in refs:
            with suppress(ContentDamaged):  # `_complete` finds out whether it was deleted
                self._copy(ref)
        del refs
        for _ in range(SNAPSHOTS_MAX):
            with self._store.read_transaction() as snapshot:
                if self._complete(snapshot):
                    write_copy(snapshot, path, lambda part: self._advance(round(part * database)))
                    return
        raise StoreUnavailable(
            "documents are being deleted faster than their contents can be copied; retry later"
        )

    def _complete(self, snapshot: apsw.Connection) -> bool:
        """Copy the contents that no earlier snapshot had; return False if one has been deleted."""
        needed = set()
        for ref in contents(snapshot):
            needed.add(ref.name)
            if ref.name in self.copied or ref.name in self.damaged:
                continue
            try:
                self._copy(ref)
            except ContentDamaged as error:
                if self._store.unreferenced([ref.name]):
                    return False
                self.damaged[ref.name] = str(error)
        # Documents of an earlier snapshot may have been deleted since.
        self.copied = {name: size for name, size in self.copied.items() if name in needed}
        self.damaged = {name: error for name, error in self.damaged.items() if name in needed}
        return True

    def _copy(self, ref: ContentRef) -> None:
        copy_content(ref, self._queue.contents, self._target)
        self.copied[ref.name] = ref.size_bytes
        self._done += ref.size_bytes
        self._total = max(self._total, self._done)
        self._advance(0)

    def _advance(self, of_database: int) -> None:
        self._progress(self._done + of_database, self._total)

    def delete_others(self) -> None:
        """Delete contents of older copies and of killed backups that this copy does not need."""
        self._target.delete(self.present() - self.copied.keys())


def _verify(path: Path, copy: _Copy) -> None:
    """Open the copy as a queue, and check that the contents it refers to are present."""
    present = copy.present()
    # Unlike a queue, a copy may be on a share.
    with closing(SqliteStore(path, allow_network=True)) as store:
        store.settings()
        with store.read_transaction() as snapshot:
            missing = [
                ref.name
                for ref in contents(snapshot)
                if ref.name not in present and ref.name not in copy.damaged
            ]
    if missing:
        raise StoreError(f"{path} refers to contents that are missing: {', '.join(missing[:3])}")


def refuse_target(source: Path, what: str, path: Path, *, replace: bool, hint: str) -> None:
    """Refuse to write a copy over its source, over another file, or without `replace` over an
    existing copy."""
    if path.resolve() == source.resolve() or (path.exists() and path.samefile(source)):
        raise StoreRefused(f"{path} is the {what} itself; choose another path")
    present = [str(there) for there in (path, contents_beside(path)) if there.exists()]
    if present and not replace:
        exist = "exists" if len(present) == 1 else "exist"
        raise StoreRefused(f"{' and '.join(present)} {exist} already; {hint}")
    if path.exists():
        refuse_foreign_file(path)


def _refuse_target(source: Path, path: Path, *, overwrite: bool) -> None:
    hint = "pass overwrite=True to replace an older copy"
    refuse_target(source, "queue", path, replace=overwrite, hint=hint)
    if path.exists():
        log = path.with_name(f"{path.name}-wal")
        if log.exists() and log.stat().st_size:
            raise StoreRefused(
                f"{path} is in use, or was not closed ({log.name} exists); it was not changed"
            )


def remove_database(path: Path) -> None:
    """Remove a database file and the files that SQLite keeps beside it."""
    path.unlink(missing_ok=True)
    remove_beside(path)
