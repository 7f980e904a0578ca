"""The schema of an older release is migrated; one of 0.1 or of the future is refused."""

import json
from pathlib import Path

import apsw
import psycopg
import pytest

from fairturn.errors import NoQueue, StoreRefused, StoreUnavailable
from fairturn.model import Completed, KindPolicy, NewDocument, Settings
from fairturn.stores.migrations import BASELINE, Migration
from fairturn.stores.postgres import PostgresStore, schema
from fairturn.stores.sqlite import SqliteStore
from fairturn.stores.sqlite.schema import APPLICATION_ID, migrations, newest_version
from tests.servers.places import AnyStore
from tests.servers.queues import Databases


def old_file(path: Path, version: int = BASELINE) -> Path:
    """A file with the schema of an older release, and an empty queue in it."""
    connection = apsw.Connection(str(path))
    for number, readable_from, script in migrations():
        if number <= version:
            connection.execute(script)
            connection.execute("INSERT INTO migrations VALUES (?, ?)", (number, readable_from))
            connection.execute(f"PRAGMA user_version = {number}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("INSERT INTO queue (one, settings, id_key) VALUES (1, '{}', 7)")
    connection.close()
    return path


def old_schema(url: str, version: int = BASELINE) -> str:
    """A PostgreSQL schema of an older release, without a queue."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA fairturn")
        connection.execute(
            "CREATE TABLE fairturn.migrations "
            "(number integer PRIMARY KEY, readable_from integer NOT NULL)"
        )
        for number, readable_from, script in schema.migrations():
            if number <= version:
                connection.execute(schema.filled_in(script, "fairturn"))
                connection.execute(
                    "INSERT INTO fairturn.migrations VALUES (%s, %s)", (number, readable_from)
                )
    return url


def assert_works(store: AnyStore) -> None:
    store.submit([NewDocument("acme", "1")])
    (claim,) = store.claim(1, worker="w", lease_us=30_000_000).claims
    assert store.finish([Completed(claim.fence)]) == []
    store.close()


def test_the_schema_of_an_older_release_is_migrated(tmp_path: Path) -> None:
    assert_works(SqliteStore(old_file(tmp_path / "documents.db")))
    with Databases() as databases:
        url = old_schema(databases.new(empty=True))
        assert_works(PostgresStore(url))
        with psycopg.connect(url) as connection:
            assert schema.version_of(connection, "fairturn") == schema.newest()


def test_every_migration_says_which_releases_still_read_its_schema() -> None:
    """A release reads the schema that the next one makes: migrations add, and a later release
    removes. Only the baseline begins anew."""
    for found in (migrations(), schema.migrations()):
        first, *others = found
        assert (first.number, first.readable_from) == (BASELINE, BASELINE)
        assert all(each.readable_from < each.number for each in others)
        assert found == sorted(found)


def advance_file(path: Path, step: Migration) -> None:
    SqliteStore(path).close()
    connection = apsw.Connection(str(path))
    connection.execute(step.script)
    connection.execute("INSERT INTO migrations VALUES (?, ?)", step[:2])
    connection.execute(f"PRAGMA user_version = {step.number}")
    connection.close()


def advance_server(url: str, step: Migration) -> None:
    PostgresStore(url).close()
    with psycopg.connect(url) as connection:
        connection.execute(step.script.format(schema="fairturn"))
        connection.execute("INSERT INTO fairturn.migrations VALUES (%s, %s)", step[:2])


ADD_A_COLUMN = "ALTER TABLE {}documents ADD COLUMN colour text"


def test_a_process_of_this_release_works_on_the_expanded_schema_of_the_next(tmp_path: Path) -> None:
    path, next_one = tmp_path / "documents.db", newest_version() + 1
    advance_file(path, Migration(next_one, next_one - 1, ADD_A_COLUMN.format("")))
    assert_works(SqliteStore(path))
    with Databases() as databases:
        url = databases.new()
        step = Migration(next_one, next_one - 1, ADD_A_COLUMN.format("{schema}."))
        advance_server(url, step)
        assert_works(PostgresStore(url))
        assert_works(PostgresStore(url, migrate=False))


def test_a_schema_that_this_release_cannot_read_is_refused(tmp_path: Path) -> None:
    path, next_one = tmp_path / "documents.db", newest_version() + 1
    refused = f"has schema {next_one}, and this release reads schemas up to {next_one - 1}"
    advance_file(path, Migration(next_one, next_one, "SELECT 1"))
    with pytest.raises(StoreRefused, match=refused):
        SqliteStore(path)
    with Databases() as databases:
        url = databases.new()
        advance_server(url, Migration(next_one, next_one, "SELECT 1"))
        with pytest.raises(StoreRefused, match=refused):
            PostgresStore(url)


def test_a_role_that_may_not_migrate_is_refused_with_the_command_that_does() -> None:
    with Databases() as databases:
        url = databases.new(empty=True)
        with pytest.raises(NoQueue, match="create it with: fairturn migrate"):
            PostgresStore(url, migrate=False)


def next_step(script: str) -> Migration:
    return Migration(schema.newest() + 1, schema.newest(), script)


def test_a_migration_gives_up_beside_a_long_transaction_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schema, "_LOCK_TIMEOUT_S", 0.05)
    step = next_step(ADD_A_COLUMN.format("{schema}."))
    with Databases() as databases:
        url = databases.new()
        with (
            psycopg.connect(url) as dump,
            psycopg.connect(url, autocommit=True) as connection,
        ):
            dump.execute("SELECT * FROM fairturn.documents")
            with pytest.raises(StoreUnavailable, match="is blocked by a long-running transaction"):
                schema.migrate(connection, "documents", "fairturn", [step])
            assert schema.version_of(connection, "fairturn") == schema.newest()

            dump.rollback()
            assert schema.migrate(connection, "documents", "fairturn", [step]) == [step.number]
            assert schema.migrate(connection, "documents", "fairturn", [step]) == []


def test_the_last_migration_installs_every_function() -> None:
    last = schema.migrations()[-1].script
    for _, script in schema.function_scripts():
        assert script in last


def test_settings_of_this_release_are_stored_only_if_they_differ_from_their_defaults() -> None:
    """The release before refuses settings that it does not know, and may restart in a rollout."""
    stored = json.loads(Settings(attempts_max=7).to_json())
    changed = Settings(kinds=KindPolicy.OPEN, expired_kept_s=60.0)

    assert stored["attempts_max"] == 7
    assert stored.keys().isdisjoint({"kinds", "expired_kept_s"})
    assert Settings.from_json(json.dumps(stored)) == Settings(attempts_max=7)
    assert Settings.from_json(changed.to_json()) == changed
