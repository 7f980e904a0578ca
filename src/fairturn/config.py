"""Settings and wiring: the only module that names concrete stores and contents."""

import os
import re
from pathlib import Path
from typing import Unpack

from fairturn import queue
from fairturn.clock import Clock
from fairturn.contents.local import Contents, Folder, Nowhere, TemporaryFolder
from fairturn.contents.s3 import Bucket, is_bucket
from fairturn.errors import SettingsConflict, StoreRefused
from fairturn.integrations.counts import TIMEOUT_S, Counts
from fairturn.integrations.counts.memory import MemoryCounts
from fairturn.model import Settings
from fairturn.priority import Rule
from fairturn.stores.contract import Store
from fairturn.stores.memory import MemoryStore
from fairturn.urls import POSTGRES, is_address, scheme_of
from fairturn.validation.changes import SettingChanges, changed

IN_MEMORY = ":memory:"
_NO_DRIVER = (
    "a queue in PostgreSQL needs the driver psycopg; install it with: "
    "pip install 'fairturn[postgres]'"
)
_SERVER = re.compile(r"(localhost|[\w.-]+:\d+)(/\d*)?")  # an address whose scheme was forgotten


class Queue(queue.Queue):
    """A fair document queue, opened by the name of its database.

    `Queue("documents.db")` is a file, made if it is new, with a folder `documents.db.contents` for
    what is too large for it. `Queue(":memory:")` ends with its process. Settings given as keywords
    are those of a new queue; one that exists keeps its own, and a keyword that differs from them
    raises `SettingsConflict`.

    `synchronous="NORMAL"` is faster and may lose the last documents in a power cut;
    `allow_network=True` opens a file on a network file system, which is slow and a risk.
    `contents_shared=True` lets the group of the folder beside the file use it, not its user alone.

    `Queue("postgresql://...")` is a schema of a PostgreSQL database, made or brought up unless
    `migrate=False`. Documents of more than 64 KiB need `contents=Folder(...)`, a folder that all
    machines share, or `contents=Bucket("s3://...")`, object storage. `listen_url` leads past a
    pooler, to hear at once of what others do.
    """

    def __init__(
        self,
        database: str | os.PathLike[str] | Store,
        *,
        contents: Contents | None = None,
        contents_shared: bool = False,
        clock: Clock | None = None,
        synchronous: str = "FULL",
        allow_network: bool = False,
        migrate: bool = True,
        listen_url: str | None = None,
        **settings: Unpack[SettingChanges],
    ) -> None:
        wanted = changed(Settings(), settings)
        if contents is not None and contents_shared:
            raise ValueError(
                "contents_shared is about the folder beside a file and contents were given; "
                "write contents=Folder(..., shared=True)"
            )
        if not isinstance(database, str | os.PathLike):
            _refuse_conflict(database.settings(), wanted, settings)
            contents = contents or _contents_of(database, clock, shared=contents_shared)
            super().__init__(database, contents, clock=clock)
            return
        store = open_store(
            os.fspath(database),
            wanted,
            clock=clock,
            synchronous=synchronous,
            allow_network=allow_network,
            migrate=migrate,
            listen_url=listen_url,
        )
        try:
            _refuse_conflict(store.settings(), wanted, settings)
            contents = contents or _contents_of(store, clock, shared=contents_shared)
            super().__init__(store, contents, clock=clock)
        except BaseException:
            store.close()
            raise


def open_store(
    database: str,
    settings: Settings | None = None,
    *,
    clock: Clock | None = None,
    synchronous: str = "FULL",
    allow_network: bool = False,
    migrate: bool = True,
    listen_url: str | None = None,
) -> Store:
    """The store behind a name; the settings are those of a queue that is made by this. Without a
    clock each has that of its machine: of this one, or of the server."""
    if not database:
        raise ValueError("the name of the database is empty; name a file, such as documents.db")
    if database == IN_MEMORY:
        return MemoryStore(settings=settings, clock=clock)
    scheme = scheme_of(database)
    if scheme is not None:
        if scheme not in POSTGRES:
            # Without the rest of the address, which may hold a password.
            raise StoreRefused(
                f"fairturn keeps a queue in a file, such as documents.db, or in PostgreSQL, at a "
                f"postgresql:// address; it knows no databases at {scheme}:// addresses"
            )
        return _postgres(database, settings, clock, migrate=migrate, listen_url=listen_url)
    from fairturn.stores.sqlite import SqliteStore  # its engine is loaded only where it is used

    return SqliteStore(
        database,
        settings=settings,
        clock=clock,
        synchronous=synchronous,
        allow_network=allow_network,
    )


def open_contents(place: str, *, shared: bool = False) -> Contents:
    """Where large documents lie: the path of a folder, or s3://BUCKET/PATH. A folder is private to
    its user, or `shared` by its group."""
    if is_bucket(place):
        if shared:
            raise ValueError(
                "contents_shared is true and the contents lie in a bucket, which has access rules "
                "of its own; leave contents_shared out"
            )
        return Bucket(place)
    if is_address(place):
        raise StoreRefused(
            "fairturn keeps contents in a folder or in a bucket, at an s3:// address; it knows "
            f"none at {place.partition(':')[0]}:// addresses"
        )
    return Folder(place, shared=shared)


def open_counts(
    place: str | os.PathLike[str],
    *,
    rule: Rule | None = None,
    clock: Clock | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Counts:
    """Counts without a queue, behind an address or the name of a file. Nothing is connected yet.
    A check that takes longer than `timeout_s` is given up."""
    rule = rule or Rule()
    place = os.fspath(place)
    if not place:
        raise ValueError("the place of the counts is empty; name one, such as redis://localhost")
    if place == IN_MEMORY:
        return MemoryCounts(rule=rule, clock=clock)
    scheme = scheme_of(place) or ""
    try:
        if scheme in ("redis", "rediss", "valkey", "valkeys", "unix"):
            from fairturn.integrations.counts.redis import RedisCounts

            return RedisCounts(place, rule=rule, clock=clock, timeout_s=timeout_s)
        if scheme in ("redis+cluster", "rediss+cluster"):
            from fairturn.integrations.counts.redis import RedisClusterCounts

            return RedisClusterCounts(place, rule=rule, clock=clock, timeout_s=timeout_s)
        if scheme in POSTGRES:
            from fairturn.integrations.counts.postgres import PostgresCounts

            return PostgresCounts(place, rule=rule, clock=clock, timeout_s=timeout_s)
    except ModuleNotFoundError as error:
        extra = "postgres" if scheme.startswith("postgres") else "redis"
        raise StoreRefused(
            f"counts at {scheme}:// need the package {error.name}; "
            f"install it: python -m pip install 'fairturn[{extra}]'"
        ) from None
    if _SERVER.fullmatch(place):
        # It would be a file of this process's machine and folder, and nobody would notice.
        raise StoreRefused(
            f"{place} names a server without saying of which kind; write redis://{place}, or "
            f"./{place} for a file of that name"
        )
    if scheme:
        raise StoreRefused(
            f"fairturn keeps no counts at {scheme}:// addresses; name redis://, valkey://, "
            "redis+cluster://, postgresql:// or a file, such as counts.db"
        )
    from fairturn.integrations.counts.sqlite import SqliteCounts

    return SqliteCounts(place, rule=rule, clock=clock, timeout_s=timeout_s)


def _postgres(
    url: str,
    settings: Settings | None,
    clock: Clock | None,
    *,
    migrate: bool,
    listen_url: str | None,
) -> Store:
    try:
        from fairturn.stores.postgres import PostgresStore  # its driver is an extra
    except ImportError as error:
        raise StoreRefused(_NO_DRIVER) from error
    return PostgresStore(
        url, settings=settings, clock=clock, migrate=migrate, listen_url=listen_url
    )


def migrate_server(url: str, *, grant: str | None = None) -> list[int]:
    """Bring the schema of a queue in PostgreSQL up, and let a role use it; the steps made."""
    if scheme_of(url) not in POSTGRES:
        raise ValueError("only a queue in PostgreSQL, at a postgresql:// address, has a schema")
    try:
        from fairturn.stores.postgres import schema
    except ImportError as error:
        raise StoreRefused(_NO_DRIVER) from error
    return schema.migrate_server(url, grant_to=grant)


def contents_beside(database: Path) -> Path:
    """The folder for what is too large for a file."""
    return database.with_name(f"{database.name}.contents")


def _contents_of(store: Store, clock: Clock | None, *, shared: bool) -> Contents:
    """Where the contents of a store lie, unless one was handed in."""
    if isinstance(store, MemoryStore):
        return TemporaryFolder(clock=clock)
    if is_address(str(getattr(store, "url", ""))):
        return Nowhere()
    path = getattr(store, "path", None)
    if not isinstance(path, Path):
        raise TypeError(f"{type(store).__name__} needs contents=, where large documents are kept")
    return Folder(contents_beside(path), shared=shared, clock=clock)


def _refuse_conflict(present: Settings, wanted: Settings, given: SettingChanges) -> None:
    differing = [name for name in given if getattr(present, name) != getattr(wanted, name)]
    if differing:
        raise SettingsConflict(
            "the queue exists with other settings: "
            + "; ".join(_difference(name, present, wanted) for name in differing)
        )


def _difference(name: str, present: Settings, wanted: Settings) -> str:
    old, new = (_plain(getattr(settings, name)) for settings in (present, wanted))
    return (
        f"{name} is {old!r} and {new!r} was given; leave it out, "
        f"or change it for every process with queue.configure({name}={new!r})"
    )


def _plain(value: object) -> object:
    return str(value) if isinstance(value, str) else value
