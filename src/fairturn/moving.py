"""A queue in a file, copied into PostgreSQL: for when one machine is not enough any more.

Nobody can write to the file while it is copied. The rows go over in one transaction, contents
before it, so that the target has all of the queue or nothing. Numbers, ids, fences, turns and
clocks stay what they are: the order goes on where it stood.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fairturn.addresses import is_address
from fairturn.config import contents_beside, open_store
from fairturn.content import Folder, chunks_of
from fairturn.errors import ContentDamaged, StoreRefused
from fairturn.model import ContentRef
from fairturn.stores.sqlite import SqliteStore
from fairturn.stores.sqlite.copying import Snapshot
from fairturn.stores.sqlite.unloading import unload

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
    progress: Progress = lambda done, total: None,
) -> Copied:
    """Copy the queue in a file into a new one at a postgresql:// address; its contents, if it has
    any, into a folder that all machines share. The file stays as it is."""
    path = Path(source)
    if not path.is_file():
        raise StoreRefused(f"there is no queue {path}")
    if not is_address(target):
        raise StoreRefused("a queue is copied to a postgresql:// address; for a file: backup")
    to = open_store(target)
    from fairturn.stores.postgres import PostgresStore  # its driver is an extra, and it is there

    assert isinstance(to, PostgresStore)
    try:
        return _copy(
            SqliteStore(path), to, None if contents is None else Folder(Path(contents)), progress
        )
    finally:
        to.close()


def _copy(
    store: SqliteStore, to: "PostgresStore", folder: Folder | None, progress: Progress
) -> Copied:
    try:
        with store.held() as connection:
            whole = unload(connection)
            refs = list(Snapshot(connection).contents())
            if refs and folder is None:
                raise StoreRefused(
                    f"the queue has {len(refs):,} contents outside its file; name the folder for "
                    "them, which all machines share: contents=, or --contents"
                )
            if folder is not None:
                _copy_contents(refs, Folder(contents_beside(store.path)), folder)
            to.load(whole, progress)
    finally:
        store.close()
    return Copied(whole.documents_known, whole.customers_known, len(refs))


def _copy_contents(refs: list[ContentRef], source: Folder, target: Folder) -> None:
    """Put every content into the folder under its own name. One that is there was copied before."""
    for ref in refs:
        try:
            target.open(ref).close()
            continue
        except ContentDamaged:
            target.delete([ref.name])
        with source.open(ref) as stream:
            Folder(target.path, new_name=partial(str, ref.name)).put(chunks_of(stream))
