"""Restoring a backup to a file-based queue.

Contents are copied first, then the database, under a temporary name beside the target. The copy
begins a new epoch. When everything is durable, one rename replaces the target. At any time the
target is the previous queue or the restored one, each with all its contents.
"""

import os
import shutil
from contextlib import closing, nullcontext
from pathlib import Path
from typing import NamedTuple

from fairturn.clock import TIMESTAMP_MAX
from fairturn.config import contents_beside
from fairturn.contents.local import Folder, copy_content, sync
from fairturn.errors import ContentDamaged, NoQueue, StoreRefused
from fairturn.maintenance.backup import Progress, locked, refuse_target, unfinished
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
from fairturn.stores.sqlite.schema import network_below, refuse_network


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
    with locked(path):
        _refuse_target(source, path, replace=replace)
        contents = _Contents(source, path, shared=contents_shared)
        try:
            with unfinished(path) as file:
                return _restore(source, path, file, contents, progress, allow_network=allow_network)
        except BaseException:
            contents.abandon()
            raise


def _restore(
    source: Path,
    path: Path,
    file: Path,
    contents: "_Contents",
    progress: Progress,
    *,
    allow_network: bool,
) -> Restored:
    replaced = path.exists()
    with snapshot_of(source) as snapshot:
        refs = list(query.contents(snapshot))
        database = source.stat().st_size
        total = sum(ref.size_bytes for ref in refs) + database
        for ref in refs:
            contents.copy(ref)
            progress(contents.size_bytes, total)
        write_copy(
            snapshot,
            file,
            lambda part: progress(contents.size_bytes + round(part * database), total),
            marked=False,
        )
    with closing(SqliteStore(file, allow_network=allow_network)) as store:
        store.begin_epoch()
    shutil.copymode(path if replaced else source, file)
    sync(file)
    with exclusive(path) if replaced else nullcontext():
        if not replaced:
            remove_beside(path)  # SQLite would apply the log of a deleted queue
            sync(path.parent)
        crash.point("restore-before-rename")
        file.replace(path)
        sync(path.parent)
        crash.point("restore-after-rename")
    contents.delete_others({ref.name for ref in refs})
    size_bytes = path.stat().st_size + contents.size_bytes
    damaged = tuple(contents.damaged)
    return Restored(path, size_bytes, len(refs) - len(damaged), damaged, replaced)


def _refuse_target(source: Path, path: Path, *, replace: bool) -> None:
    if path.is_symlink():
        raise StoreRefused(f"{path} is a symbolic link; pass the path of its target")
    refuse_target(source, "backup", path, replace=replace, hint="--replace replaces a queue")
    if path.exists():
        refuse_open(path)


class _Contents:
    """The contents of a backup and the folder that they are copied to."""

    def __init__(self, source: Path, path: Path, *, shared: bool) -> None:
        self._source = Folder(contents_beside(source))
        self._target = Folder(contents_beside(path), shared=shared)
        self._is_new = not self._target.path.exists() and not path.exists()
        self._path = path
        self.size_bytes = 0
        self.damaged: list[str] = []

    def copy(self, ref: ContentRef) -> None:
        """Copy a stored file unless the folder already has it undamaged."""
        try:
            copy_content(ref, self._source, self._target)
        except ContentDamaged as error:
            self.damaged.append(str(error))
        else:
            self.size_bytes += ref.size_bytes

    def delete_others(self, needed: set[str]) -> None:
        """Delete contents of the replaced queue and of killed restores."""
        self._target.delete(set(self._target.names(TIMESTAMP_MAX)) - needed)

    def abandon(self) -> None:
        """Remove the folder if this restore created it and the target does not exist."""
        if self._is_new and not self._path.exists():
            shutil.rmtree(self._target.path, ignore_errors=True)
