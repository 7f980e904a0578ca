"""Copy a queue of fairturn 0.1 into a new queue with the present schema.

The last schemas of 0.1 are version 8 in a file and version 9 on PostgreSQL. The baseline of 0.2
differs in names and in new columns with defaults, so rows are copied table by table. The source is
read in one transaction and not changed. `copy_server` also copies a PostgreSQL queue with the
present schema.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from fairturn.contents.local import sync
from fairturn.errors import NoQueue, StoreRefused, StoreUnavailable
from fairturn.maintenance.backup import Progress, locked, unfinished
from fairturn.maintenance.sqlite_file import read_only, read_only_uri
from fairturn.model import ContentRef
from fairturn.stores.sqlite import query
from fairturn.stores.sqlite.connection import translated
from fairturn.stores.sqlite.schema import foreign_version_of, migrate, refuse_foreign_file
from fairturn.stores.values import JUMP_MIN, STORED_BYTES

if TYPE_CHECKING:
    from fairturn.stores.postgres.connection import PostgresDatabase
    from fairturn.stores.postgres.session import Connection

FILE_0_1, SERVER_0_1 = 8, 9  # the last schema versions of 0.1
# The names of 0.1, by the present ones.
_TABLES = {
    "event_log": "recorded",
    "outcome_counters": "ends",
    "customer_states": "standings",
    "idempotency_keys": "keys",
    "arrival_counters": "totals",
    "counter_changes": "moved",
    "scheduler_states": "turns",
    "limited_customers": "limited",
    "prune_cursor": "pruning",
}
_FILE_COLUMNS = {"scheduler_version": "turns_version", "body_type": "kind"}
_SERVER_COLUMNS = {"body_type": "CASE WHEN is_payload THEN 'payload' ELSE 'content' END"}


# ── Files ────────────────────────────────────────────────────────────────────────────────────────

_FILE_TABLES = "SELECT name FROM {}.sqlite_schema WHERE type = 'table' ORDER BY name"
_MARK = "UPDATE queue SET is_copy = 1"
_COUNT_BYTES = f"""
    UPDATE customers SET stored_bytes = d.bytes
    FROM (SELECT customer, sum({STORED_BYTES}) AS bytes FROM documents GROUP BY customer) d
    WHERE number = d.customer"""


def is_file_of_0_1(path: Path) -> bool:
    """Return whether the file has the last schema of 0.1. Raise `StoreRefused` if it is not a
    queue, or has an earlier schema."""
    refuse_foreign_file(path, any_version=True)
    with translated(path), read_only(path) as connection:
        version = foreign_version_of(connection, str(path))
    if 0 < version < FILE_0_1:
        raise StoreRefused(
            f"{path} has schema {version}; open it once with the last fairturn 0.1, which migrates "
            f"it to schema {FILE_0_1}, and copy it then"
        )
    return version == FILE_0_1


def take_over_file(
    source: Path,
    target: Path,
    copy_contents: Callable[[list[ContentRef]], None],
    progress: Progress = lambda done, total: None,
) -> int:
    """Copy a queue of 0.1 to a new file; return the number of its contents.

    `copy_contents` is called before the file gets its name. Under its name, the file is complete
    and durable; its first write begins a new epoch. Raises `StoreUnavailable` if another process
    changes the source meanwhile.
    """
    if target.exists():
        raise StoreRefused(f"{target} exists already; name a new file")
    with locked(target), unfinished(target) as file:
        with translated(source):
            refs = _copy_file(source, file, progress)
        copy_contents(refs)
        sync(file)
        file.replace(target)
        sync(target.parent)
    return len(refs)


def _copy_file(source: Path, file: Path, progress: Progress) -> list[ContentRef]:
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_URI
    with closing(apsw.Connection(str(file), flags=flags)) as connection:
        migrate(connection, str(file))
        connection.execute("ATTACH ? AS old", (read_only_uri(source),))
        before = _state(connection, source)
        connection.execute("BEGIN IMMEDIATE")
        for statement in _file_statements(connection, progress):
            connection.execute(statement)
        connection.execute(_MARK)
        connection.execute(_COUNT_BYTES)
        refs = list(query.contents(connection))
        connection.execute("COMMIT")
        if _state(connection, source) != before:
            raise StoreUnavailable(
                f"{source} was changed while it was copied, and nothing was copied; stop its "
                "workers and submitters, and try again"
            )
    return refs


def _file_statements(connection: apsw.Connection, progress: Progress) -> Iterator[str]:
    tables = [name for (name,) in connection.execute(_FILE_TABLES.format("main"))]
    for done, table in enumerate(tables, start=1):
        old = _TABLES.get(table, table)
        columns, old_columns = (
            _file_columns(connection, database, name)
            for database, name in (("main", table), ("old", old))
        )
        if old_columns and table != "migrations":
            renamed = {new: name for new, name in _FILE_COLUMNS.items() if name in old_columns}
            pairs = _pairs(columns, old_columns, renamed)
            pairs.pop("kind", None)  # the body type in 0.1, the kind of work since
            yield f"DELETE FROM main.{table}"
            yield (
                f"INSERT INTO main.{table} ({', '.join(pairs)}) "
                f"SELECT {', '.join(pairs.values())} FROM old.{old}"
            )
        progress(done, len(tables))


def _file_columns(connection: apsw.Connection, database: str, table: str) -> list[str]:
    rows = connection.execute("SELECT name FROM pragma_table_info(?, ?)", (table, database))
    return [name for (name,) in rows]


def _state(connection: apsw.Connection, source: Path) -> tuple[Any, ...]:
    """Return a value that changes when another process writes to the source."""
    status, log = source.stat(), Path(f"{source}-wal")
    return (
        connection.pragma("data_version", schema="old"),
        status.st_size,
        status.st_mtime_ns,
        log.exists() and log.stat().st_size,
    )


# ── PostgreSQL ───────────────────────────────────────────────────────────────────────────────────

_SERVER_COLUMNS_OF = """
    SELECT table_name, array_agg(column_name::text ORDER BY ordinal_position)
    FROM information_schema.columns WHERE table_schema = %s GROUP BY table_name"""
# Transaction ids are valid on one server only: in the copy, events get the copying transaction's.
_NOT_COPIED = {"xid", "events_from", "events_late"}
# Since schema 11.
_ADDED = {
    *("probes", "released_bytes", "kinds", "kind_states", "kind_arrivals"),
    *("attempts", "checkpoints", "expirations", "kind_services", "outages"),
}
_SEQUENCES = ("document_numbers", "customer_numbers")
_IDENTITIES = ("counter_changes", "outcome_counters", "unreported_cancels")
_LOCK_TIMEOUT_S = 5
_IDLE_TIMEOUT_S = 60  # the server releases the locks on the source if this process is frozen


def copy_server(
    source: "PostgresDatabase", target: "PostgresDatabase", progress: Progress
) -> tuple[int, int]:
    """Copy all rows of a queue into a new one, in one transaction; return the numbers of documents
    and customers.

    The source is locked against writes meanwhile. The first write to the copy begins a new epoch,
    because its database has a different incarnation. Raises `StoreUnavailable` if the source is in
    use, and `StoreRefused` if the target was ever used.
    """
    import psycopg

    from fairturn.stores.postgres.load import lock_new
    from fairturn.stores.postgres.session import Session

    try:
        with (
            source.connect() as reading,
            target.connect() as writing,
            reading.transaction(),
            writing.transaction(),
        ):
            lock_new(Session(writing, target.schema), target.name)
            return _copy_tables(reading, source, writing, target.schema, progress)
    except psycopg.errors.LockNotAvailable as error:
        raise StoreUnavailable(
            f"{source.name} is in use, and nothing was copied; stop its workers and submitters, "
            "and try again"
        ) from error
    except psycopg.Error as error:
        raise target.translate(error) from error


def _copy_tables(
    reading: "Connection",
    source: "PostgresDatabase",
    writing: "Connection",
    schema: str,
    progress: Progress,
) -> tuple[int, int]:
    old_columns = dict(reading.execute(_SERVER_COLUMNS_OF, (source.schema,)).fetchall())
    columns = dict(writing.execute(_SERVER_COLUMNS_OF, (schema,)).fetchall())
    if "documents" not in old_columns:
        raise NoQueue(f"{source.name} has no queue in its schema {source.schema}")
    is_old = "body_type" not in old_columns["documents"]
    tables = sorted(columns.keys() - {"migrations"} - (_ADDED - old_columns.keys()))
    old_names = {table: _TABLES.get(table, table) if is_old else table for table in tables}
    if not set(old_names.values()) <= old_columns.keys():
        raise StoreRefused(
            f"{source.name} has a schema before version {SERVER_0_1}; migrate it with the last "
            "fairturn 0.1, and copy it then"
        )
    reading.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_S}s'")
    reading.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{_IDLE_TIMEOUT_S}s'")
    locked_tables = ", ".join(f"{source.schema}.{old}" for old in old_names.values())
    reading.execute(f"LOCK TABLE {locked_tables} IN SHARE MODE")
    writing.execute(f"TRUNCATE {', '.join(f'{schema}.{table}' for table in tables)}")
    for done, table in enumerate(tables, start=1):
        old = old_names[table]
        pairs = _pairs(columns[table], old_columns[old], _SERVER_COLUMNS if is_old else {})
        if is_old:
            pairs.pop("kind", None)
        order = ""
        if table == "event_log":
            pairs.pop("number")  # drawn again, in the same order
            order = " ORDER BY number"
        read = f"SELECT {', '.join(pairs.values())} FROM {source.schema}.{old}{order}"
        with (
            reading.cursor().copy(f"COPY ({read}) TO STDOUT") as rows,
            writing.cursor().copy(
                f"COPY {schema}.{table} ({', '.join(pairs)}) FROM STDIN"
            ) as written,
        ):
            for data in rows:
                written.write(data)
        progress(done, len(tables))
    for sequence in _SEQUENCES:
        last = reading.execute(f"SELECT last_value, is_called FROM {source.schema}.{sequence}")
        writing.execute(f"SELECT setval('{schema}.{sequence}', %s, %s)", last.fetchone())
    if "stored_bytes" not in old_columns["customers"]:
        writing.execute(
            f"UPDATE {schema}.customers c SET stored_bytes = d.bytes FROM (SELECT customer, "
            f"sum({STORED_BYTES}) AS bytes FROM {schema}.documents GROUP BY customer) d "
            "WHERE c.number = d.customer"
        )
    if "ids_from" not in old_columns["queue"]:
        writing.execute(
            f"UPDATE {schema}.queue SET ids_from = {JUMP_MIN} + "
            f"(SELECT last_value FROM {schema}.document_numbers)"
        )
    if "since_patience" not in old_columns[old_names["scheduler_states"]]:
        writing.execute(f"UPDATE {schema}.scheduler_states SET since_patience = ARRAY[claims % 10]")
    writing.execute(f"SELECT {schema}.require_schema_in_use()")
    for table in _IDENTITIES:
        writing.execute(
            f"SELECT setval(pg_get_serial_sequence('{schema}.{table}', 'number'), "
            f"coalesce((SELECT max(number) FROM {schema}.{table}), 0) + 1, false)"
        )
    ((documents, customers),) = writing.execute(
        f"SELECT (SELECT count(*) FROM {schema}.documents), "
        f"(SELECT count(*) FROM {schema}.customers)"
    ).fetchall()
    return documents, customers


def _pairs(
    columns: list[str], old_columns: list[str], renamed: Mapping[str, str]
) -> dict[str, str]:
    """Return the expression for each column of the copy that the source has."""
    return {
        column: renamed.get(column, column)
        for column in columns
        if column not in _NOT_COPIED and (column in renamed or column in old_columns)
    }
