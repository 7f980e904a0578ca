"""Copy a queue: from a file into PostgreSQL, from one PostgreSQL schema into another, or a queue of
fairturn 0.1 into one with the present schema.

A copy reads one snapshot of the source. It writes contents first, then all rows in one transaction,
which is rolled back if the source was changed meanwhile. Numbers, ids, fences, turns and clocks are
copied unchanged: the order of service continues.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from fairturn.clock import SystemClock
from fairturn.config import contents_beside, open_store
from fairturn.contents.local import Folder, copy_content
from fairturn.errors import StoreRefused, StoreUnavailable
from fairturn.maintenance.backup import Progress
from fairturn.maintenance.sqlite_transfer import unload
from fairturn.maintenance.takeover import copy_server, is_file_of_0_1, take_over_file
from fairturn.model import ContentRef
from fairturn.stores.sqlite import SqliteStore, query
from fairturn.stores.urls import SCHEMA, is_address
from fairturn.stores.values import Row

if TYPE_CHECKING:
    from fairturn.stores.postgres import PostgresStore

_COPIED = "SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM customers)"


class Copied(NamedTuple):
    """The numbers of copied entities."""

    documents: int
    customers: int
    contents: int


def copy_queue(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    contents: str | os.PathLike[str] | None = None,
    contents_shared: bool = False,
    schema: str | None = None,
    source_schema: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Copied:
    """Copy a queue into a new one. The source is not changed.

    A file is copied to a postgresql:// URL, and its contents to the folder `contents`, which all
    machines share (with `contents_shared`, all users of its group). A file of fairturn 0.1 can also
    be copied to a new file, with its contents beside it. A PostgreSQL queue, of 0.1 or of this
    release, is copied to a postgresql:// URL; its contents stay in their place. `schema` and
    `source_schema` name schemas other than `fairturn`.
    """
    source, target = os.fspath(source), os.fspath(target)
    if is_address(source):
        if not is_address(target):
            raise StoreRefused(
                f"{target} is a file; a queue in PostgreSQL can only be copied to a "
                "postgresql:// URL"
            )
        return _copy_server(source, source_schema, target, schema, progress)
    if source_schema is not None:
        raise ValueError(f"source_schema is {source_schema!r}; it must be None for a file")
    path = Path(source)
    if not path.is_file():
        raise StoreRefused(f"there is no queue {path}")
    is_old = is_file_of_0_1(path)
    if not is_address(target):
        if not is_old:
            raise StoreRefused(
                f"{target} is a file; copy to a postgresql:// URL, or use: fairturn backup"
            )
        return _take_over(path, Path(target), progress)
    to = open_store(target, schema=schema)
    from fairturn.stores.postgres import PostgresStore  # the driver is an extra, present by now

    assert isinstance(to, PostgresStore)
    folder = None if contents is None else Folder(Path(contents), shared=contents_shared)
    with closing(to):
        if not is_old:
            return _copy(path, contents_beside(path), to, folder, progress)
        with TemporaryDirectory(prefix="fairturn-") as temporary:
            converted = Path(temporary) / "queue.db"
            take_over_file(path, converted, lambda refs: None)
            return _copy(converted, contents_beside(path), to, folder, progress)


def _take_over(source: Path, target: Path, progress: Progress) -> Copied:
    def copy_contents(refs: list[ContentRef]) -> None:
        if refs:
            _copy_contents(refs, Folder(contents_beside(source)), Folder(contents_beside(target)))

    contents = take_over_file(source, target, copy_contents, progress)
    with closing(SqliteStore(target)) as store, store.read_transaction() as snapshot:
        ((documents, customers),) = snapshot.execute(_COPIED)
    return Copied(documents, customers, contents)


def _copy_server(
    source: str, source_schema: str | None, target: str, schema: str | None, progress: Progress
) -> Copied:
    open_store(target, schema=schema).close()  # creates the schema
    from fairturn.stores.postgres.connection import PostgresDatabase

    old, new = (
        PostgresDatabase(url, schema=name or SCHEMA, pool_max=1, prepare=False)
        for url, name in ((source, source_schema), (target, schema))
    )
    with closing(old), closing(new):
        return Copied(*copy_server(old, new, progress), contents=0)


def _copy(
    path: Path, beside: Path, to: "PostgresStore", folder: Folder | None, progress: Progress
) -> Copied:
    clock = SystemClock()
    with closing(SqliteStore(path)) as store:
        version = store.version()
        with store.read_transaction() as snapshot:
            exported = unload(snapshot, clock.now(), clock.uptime())
            refs = list(query.contents(snapshot))
            if refs and folder is None:
                raise StoreRefused(
                    f"the queue has {len(refs):,} contents outside its file; name a folder for "
                    "them that all machines share: contents=, or --contents"
                )
            if folder is not None:
                _copy_contents(refs, Folder(beside), folder)
            # The access keys are the last rows that are read; the target commits after them.
            last = _unless_changed(store, version, exported.access_keys)
            to.load(exported._replace(access_keys=last), progress)
    return Copied(exported.documents_known, exported.customers_known, len(refs))


def _unless_changed(store: SqliteStore, version: int, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows. Raise `StoreUnavailable` at the end if the file has another version."""
    yield from rows
    if store.version() != version:
        raise StoreUnavailable(
            f"{store.path} was changed while it was copied, and nothing was copied; stop its "
            "workers and submitters, and try again"
        )


def _copy_contents(refs: list[ContentRef], source: Folder, target: Folder) -> None:
    """Copy every content that the target does not have yet, under its own name."""
    for ref in refs:
        copy_content(ref, source, target)
