"""Restoring a backup to a file-based queue.

Contents are copied first, then the database, under a temporary name beside the target. The copy
begins a new epoch. When everything is durable, one rename replaces the target. At any time the
target is the previous queue or the restored one, each with all its contents.
"""

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from fairturn.clock import TIMESTAMP_MAX
from fairturn.config import contents_beside
from fairturn.contents.local import Folder, chunks_of
from fairturn.errors import ContentDamaged, NoQueue, StoreRefused
from fairturn.maintenance.backup import (
    Progress,
    is_whole,
    locked,
    named,
    remove_database,
    sync,
)
from fairturn.maintenance.sqlite_file import (
    exclusive,
    refuse_open,
    remove_beside,
    snapshot_of,
    write_copy,
)
from fairturn.model import ContentRef
from fairturn.stores import crash
from fairturn.stores.sqlite import SqliteStore, query
from fairturn.stores.sqlite.schema import network_below, refuse_foreign_file, refuse_network


class Restored(NamedTuple):
    """The result of a restore. Contents in `damaged` are missing or damaged in the backup."""

    path: Path
    size_bytes: int
    contents: int
    damaged: tuple[str, ...]
    replaced: bool


def restore(
    backup: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    replace: bool = False,
    allow_network: bool = False,
    contents_shared: bool = False,
    progress: Progress = lambda done, total: None,
) -> Restored:
    """Restore a backup, which is not changed. With `replace`, replace an existing queue. The
    restored queue begins a new epoch.

    Raise `NoQueue` if there is no backup, and `StoreBusy` if another process has the target open.
    This process must not have it open.
    """
    source, path = Path(backup).absolute(), Path(to).absolute()
    if not source.exists():
        raise NoQueue(f"there is no backup {source}")
    if not path.parent.is_dir():
        raise StoreRefused(f"the folder {path.parent} does not exist; create it first")
    refuse_network(path, network_below(path), allowed=allow_network)
    with named(path), locked(path):
        _refuse_target(source, path, replace=replace)
        contents = _Contents(source, path, shared=contents_shared)
        try:
            return _restore(source, path, contents, progress, allow_network=allow_network)
        except BaseException:
            remove_database(_unfinished(path))
            contents.abandon()
            raise


def _restore(
    source: Path, path: Path, contents: "_Contents", progress: Progress, *, allow_network: bool
) -> Restored:
    unfinished, replaced = _unfinished(path), path.exists()
    remove_database(unfinished)
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with snapshot_of(source) as snapshot:
        refs = list(query.contents(snapshot))
        database = source.stat().st_size
        total = sum(ref.size_bytes for ref in refs) + database
        for ref in refs:
            contents.copy(ref)
            progress(contents.size_bytes, total)
        write_copy(
            snapshot,
            unfinished,
            lambda part: progress(contents.size_bytes + round(part * database), total),
            marked=False,
        )
    _begin_epoch(unfinished, allow_network=allow_network)
    shutil.copymode(path if replaced else source, unfinished)
    sync(unfinished)
    with exclusive(path) if replaced else nullcontext():
        if not replaced:
            remove_beside(path)  # SQLite would apply the log of a deleted queue
            sync(path.parent)
        crash.point("restore-before-rename")
        unfinished.replace(path)
        sync(path.parent)
        crash.point("restore-after-rename")
    contents.delete_others({ref.name for ref in refs})
    size_bytes = path.stat().st_size + contents.size_bytes
    damaged = tuple(contents.damaged)
    return Restored(path, size_bytes, len(refs) - len(damaged), damaged, replaced)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _refuse_target(source: Path, path: Path, *, replace: bool) -> None:
    if path.is_symlink():
        raise StoreRefused(f"{path} is a symbolic link; pass the path of its target")
    if path.resolve() == source.resolve() or (path.exists() and path.samefile(source)):
        raise StoreRefused(f"{path} is the backup itself; choose another path")
    present = [str(there) for there in (path, contents_beside(path)) if there.exists()]
    if present and not replace:
        exist = "exists" if len(present) == 1 else "exist"
        raise StoreRefused(f"{' and '.join(present)} {exist} already; --replace replaces a queue")
    if path.exists():
        refuse_foreign_file(path)
        refuse_open(path)


def _begin_epoch(path: Path, *, allow_network: bool) -> None:
    """Migrate the copy to the current schema and begin a new epoch in it."""
    store = SqliteStore(path, allow_network=allow_network)
    try:
        store.begin_epoch()
    finally:
        store.close()


class _Contents:
    """The contents of a backup and the folder that they are copied to."""

    def __init__(self, source: Path, path: Path, *, shared: bool) -> None:
        self._source = Folder(contents_beside(source))
        self._shared = shared
        self._target = Folder(contents_beside(path), shared=shared)
        self._is_new = not self._target.path.exists() and not path.exists()
        self._path = path
        self._before = set(self._target.names(TIMESTAMP_MAX))
        self.size_bytes = 0
        self.damaged: list[str] = []

    def copy(self, ref: ContentRef) -> None:
        """Copy a stored file unless the folder already has it undamaged."""
        if ref.name not in self._before or not is_whole(self._target, ref):
            try:
                with self._source.open(ref) as stream:
                    target = Folder(
                        self._target.path, shared=self._shared, new_name=lambda: ref.name
                    )
                    target.put(chunks_of(stream))
            except ContentDamaged as error:
                self.damaged.append(str(error))
                return
        self.size_bytes += ref.size_bytes

    def delete_others(self, needed: set[str]) -> None:
        """Delete contents of the replaced queue and of killed restores."""
        self._target.delete(set(self._target.names(TIMESTAMP_MAX)) - needed)

    def abandon(self) -> None:
        """Remove the folder if this restore created it and the target does not exist."""
        if self._is_new and not self._path.exists():
            shutil.rmtree(self._target.path, ignore_errors=True)
