"""Wiring: the only module that chooses concrete stores, contents and counts."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fairturn.clock import Clock
from fairturn.contents.local import Contents, Folder, NoContents, TemporaryFolder
from fairturn.contents.s3 import Bucket, is_bucket
from fairturn.errors import SettingsConflict, StoreRefused
from fairturn.integrations.counts import TIMEOUT_S, Counts
from fairturn.integrations.counts.memory import MemoryCounts
from fairturn.model import SettingChanges, Settings
from fairturn.priority import Rule
from fairturn.stores.contract import QueueStore
from fairturn.stores.memory import MemoryStore
from fairturn.stores.urls import POSTGRES, SCHEMA, is_address, scheme_of

IN_MEMORY = ":memory:"
_SERVER = re.compile(r"(localhost|[\w.-]+:\d+)(/\d*)?")  # a URL without its scheme


def open_store(
    database: str,
    settings: Settings | None = None,
    *,
    clock: Clock | None = None,
    synchronous: str = "FULL",
    allow_network: bool = False,
    migrate: bool = True,
    listen_url: str | None = None,
    schema: str | None = None,
) -> QueueStore:
    """Open the store of a queue, in a file, in PostgreSQL or in memory.

    `settings` apply if this call creates the queue. The default clock is that of this machine, or
    of the PostgreSQL server.
    """
    if not database:
        raise ValueError("the database name is empty; pass a file name, such as documents.db")
    if database == IN_MEMORY:
        return MemoryStore(settings=settings, clock=clock)
    scheme = scheme_of(database)
    if scheme is not None:
        if scheme not in POSTGRES:
            # The rest of the URL may contain a password.
            raise StoreRefused(
                f"{scheme}:// URLs are not supported for queues; use a file, such as documents.db, "
                "or a postgresql:// URL"
            )
        with _driver_present():
            from fairturn.stores.postgres import PostgresStore
        return PostgresStore(
            database,
            settings=settings,
            clock=clock,
            migrate=migrate,
            listen_url=listen_url,
            schema=schema or SCHEMA,
        )
    if schema is not None:
        raise ValueError(
            f"schema is {schema!r}, and {database} is a file; only PostgreSQL has schemas"
        )
    from fairturn.stores.sqlite import SqliteStore  # loads SQLite only where it is used

    return SqliteStore(
        database,
        settings=settings,
        clock=clock,
        synchronous=synchronous,
        allow_network=allow_network,
    )


def open_contents(place: str, *, shared: bool = False) -> Contents:
    """Open the contents at `place`, a folder or s3://BUCKET/PATH. Only the user that creates a
    folder can read it, or with `shared` also its group."""
    if is_bucket(place):
        if shared:
            raise ValueError(
                "contents_shared does not apply to a bucket, which has access rules of its own; "
                "leave it out"
            )
        return Bucket(place)
    if is_address(place):
        raise StoreRefused(
            f"{place.partition(':')[0]}:// URLs are not supported for contents; use a folder or "
            "an s3:// URL"
        )
    return Folder(place, shared=shared)


def open_counts(
    place: str | os.PathLike[str],
    *,
    rule: Rule | None = None,
    clock: Clock | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Counts:
    """Return counts without a queue, at a URL or in a file. This call does not connect. Checks time
    out after `timeout_s`."""
    rule = rule or Rule()
    place = os.fspath(place)
    if not place:
        raise ValueError("the URL of the counts is empty; pass one, such as redis://localhost")
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
            f"install it with: python -m pip install 'fairturn[{extra}]'"
        ) from None
    if _SERVER.fullmatch(place):
        # A file of this name would silently be private to this machine and folder.
        raise StoreRefused(
            f"{place} looks like a server without a scheme; use redis://{place}, or ./{place} for "
            "a file of that name"
        )
    if scheme:
        raise StoreRefused(
            f"{scheme}:// URLs are not supported for counts; use redis://, valkey://, "
            "redis+cluster://, postgresql:// or a file, such as counts.db"
        )
    from fairturn.integrations.counts.sqlite import SqliteCounts

    return SqliteCounts(place, rule=rule, clock=clock, timeout_s=timeout_s)


def migrate_server(
    url: str, *, grant: str | None = None, schema_name: str | None = None
) -> list[int]:
    """Migrate a queue in PostgreSQL and grant its use to the role `grant`. Return the numbers of
    the migrations that were applied."""
    if scheme_of(url) not in POSTGRES:
        raise ValueError("only a queue in PostgreSQL, at a postgresql:// URL, has a schema")
    with _driver_present():
        from fairturn.stores.postgres import schema
    return schema.migrate_server(url, schema=schema_name or SCHEMA, grant_to=grant)


@contextmanager
def _driver_present() -> Iterator[None]:
    """Translate the error of an import that needs the driver, an optional extra."""
    try:
        yield
    except ImportError as error:
        raise StoreRefused(
            "a queue in PostgreSQL needs the driver psycopg; install it with: "
            "pip install 'fairturn[postgres]'"
        ) from error


def contents_beside(database: Path) -> Path:
    """Return the default contents folder of a queue in a file."""
    return database.with_name(f"{database.name}.contents")


def contents_of(store: QueueStore, clock: Clock | None, *, shared: bool) -> Contents:
    """Return the default contents of a store."""
    if isinstance(store, MemoryStore):
        return TemporaryFolder(clock=clock)
    if is_address(str(getattr(store, "url", ""))):
        return NoContents()
    path = getattr(store, "path", None)
    if not isinstance(path, Path):
        raise TypeError(f"{type(store).__name__} has no default contents; pass contents=")
    return Folder(contents_beside(path), shared=shared, clock=clock)


def refuse_conflict(present: Settings, wanted: Settings, given: SettingChanges) -> None:
    """Raise `SettingsConflict` if a given setting differs from that of the queue."""
    differences = []
    for name in given:
        old, new = getattr(present, name), getattr(wanted, name)
        if old != new:
            # A mode is shown as its text, not as the member of the enum.
            old, new = (str(each) if isinstance(each, str) else each for each in (old, new))
            differences.append(
                f"{name} is {old!r} and {new!r} was given; leave it out, "
                f"or change it for every process with queue.configure({name}={new!r})"
            )
    if differences:
        raise SettingsConflict("the queue exists with other settings: " + "; ".join(differences))
