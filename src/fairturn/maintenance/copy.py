"""Copy a queue from an SQLite file into PostgreSQL, for workers on more than one machine.

The file is read from one snapshot, and no lock of it is held while the server is waited for. The
rows go over in one transaction, contents before it, so that the target has all of the queue or
nothing; the transaction is rolled back if the file was changed meanwhile. Numbers, ids, fences,
turns and clocks stay what they are: the order goes on where it stood.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fairturn.clock import SystemClock
from fairturn.config import contents_beside, open_store
from fairturn.contents.local import Folder, chunks_of
from fairturn.errors import ContentDamaged, StoreRefused, StoreUnavailable
from fairturn.model import ContentRef
from fairturn.stores.sqlite import SqliteStore
from fairturn.stores.values import Row
from fairturn.urls import is_address

if TYPE_CHECKING:
    from fairturn.stores.postgres import PostgresStore

Progress = Callable[[int, int], None]  # hears of rows done, and of all


class Copied(NamedTuple):
    """What was copied."""

    documents: int
    customers: int
    contents: int


def copy_queue(
    source: str | os.PathLike[str],
    target: str,
    *,
    contents: str | os.PathLike[str] | None = None,
    contents_shared: bool = False,
    progress: Progress = lambda done, total: None,
) -> Copied:
    """Copy the queue in a file into a new one at a postgresql:// address; its contents, if it has
    any, into a folder that all machines share; with `contents_shared`, all users of its group. The
    file stays as it is."""
    path = Path(source)
    if not path.is_file():
        raise StoreRefused(f"there is no queue {path}")
    if not is_address(target):
        raise StoreRefused("a queue is copied to a postgresql:// address; for a file: backup")
    to = open_store(target)
    from fairturn.stores.postgres import PostgresStore  # its driver is an extra, and it is there

    assert isinstance(to, PostgresStore)
    try:
        folder = None if contents is None else Folder(Path(contents), shared=contents_shared)
        return _copy(SqliteStore(path), to, folder, progress)
    finally:
        to.close()


def _copy(
    store: SqliteStore, to: "PostgresStore", folder: Folder | None, progress: Progress
) -> Copied:
    clock = SystemClock()
    try:
        version = store.version()
        with store.snapshot() as snapshot:
            whole = snapshot.unload(clock.now(), clock.uptime())
            refs = list(snapshot.contents())
            if refs and folder is None:
                raise StoreRefused(
                    f"the queue has {len(refs):,} contents outside its file; name the folder for "
                    "them, which all machines share: contents=, or --contents"
                )
            if folder is not None:
                _copy_contents(refs, Folder(contents_beside(store.path)), folder)
            # These are the last rows that are read, and the target commits after them.
            last = _unless_changed(store, version, whole.access_keys)
            to.load(whole._replace(access_keys=last), progress)
    finally:
        store.close()
    return Copied(whole.documents_known, whole.customers_known, len(refs))


def _unless_changed(store: SqliteStore, version: int, rows: Iterable[Row]) -> Iterator[Row]:
    """The rows; then an error if the file has been changed since it had this version."""
    yield from rows
    if store.version() != version:
        raise StoreUnavailable(
            f"{store.path} was changed while it was copied, and nothing was copied; stop its "
            "workers and submitters, and try again"
        )


def _copy_contents(refs: list[ContentRef], source: Folder, target: Folder) -> None:
    """Put every content into the folder under its own name, unless it is there already."""
    for ref in refs:
        try:
            target.open(ref).close()
        except ContentDamaged:  # or it is not there
            with source.open(ref) as stream:
                named = Folder(target.path, shared=target.shared, new_name=partial(str, ref.name))
                named.put(chunks_of(stream))
