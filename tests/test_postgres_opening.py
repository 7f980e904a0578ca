"""PostgreSQL: roles that may open a queue, URLs, and versions."""

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from fairturn import Queue
from fairturn.clock import SECOND_US
from fairturn.errors import StoreError, StoreRefused, StoreUnavailable
from fairturn.maintenance.copy import copy_queue
from fairturn.model import (
    Completed,
    CustomerSettings,
    KindSettings,
    Released,
    Settings,
    State,
)
from fairturn.scheduling.flows import Mode
from fairturn.stores.conformance.steps import assert_numbers_are_exact, claim, find_all, submit
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.postgres import schema as migrating
from tests.on_postgres import new, terminate_others
from tests.servers import postgres
from tests.servers.queues import Databases

LEASE_US = 30 * SECOND_US


# ── The schema and its roles ─────────────────────────────────────────────────────────────────────


@pytest.fixture
def role(databases: Databases) -> Iterator[str]:
    name = f"app_{os.getpid()}"
    with psycopg.connect(postgres.of_this_run().url(), autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN")
        yield name
    with psycopg.connect(postgres.of_this_run().url(), autocommit=True) as connection:
        databases.__exit__(None, None, None)  # the grants are dropped with the databases
        connection.execute(f"DROP ROLE {name}")


def as_role(url: str, role: str) -> str:
    return url.replace("postgres@", f"{role}@", 1)


def test_a_role_that_may_not_change_the_schema_can_do_everything_else(
    databases: Databases, role: str
) -> None:
    owner = databases.new(empty=True)
    migrating.migrate_server(owner, grant_to=role)

    store = PostgresStore(as_role(owner, role))
    submit(store, "a", key="k", digest=b"1")
    store.submit([new("b")] * 60)
    store.adjust("a", CustomerSettings(limit=1))
    (first, *others) = claim(store, 3)
    assert store.renew([first.fence], lease_us=LEASE_US) == ([], [])
    assert store.finish([Completed(first.fence, "1"), *(Released(c.fence) for c in others)]) == []
    waiting = next(found for found in find_all(store) if found.state is State.WAITING)
    assert store.cancel([waiting.id]) == [State.CANCELLED]
    store.configure(Settings(mode=Mode.EQUAL))
    store.sign_on("w", 1, ["ocr"])  # the first other kind excludes earlier releases
    store.configure_kind("ocr", KindSettings(limit=1))
    while store.prune() is not None:
        pass
    store.purge("b")
    assert_numbers_are_exact(store)
    store.close()

    with (
        psycopg.connect(as_role(owner, role)) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("CREATE TABLE fairturn.another (n integer)")
    with (
        psycopg.connect(as_role(owner, role)) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute("UPDATE fairturn.migrations SET number = number + 1")


def test_a_role_that_was_let_in_can_copy_a_queue(
    databases: Databases, role: str, tmp_path: Path
) -> None:
    owner = databases.new(empty=True)
    migrating.migrate_server(owner, grant_to=role)
    with Queue(tmp_path / "documents.db") as queue:
        receipt = queue.submit("acme", payload=1)

    copy_queue(tmp_path / "documents.db", as_role(owner, role))

    with Queue(as_role(owner, role), migrate=False) as copied:
        assert copied.get(receipt.id).customer == "acme"
        assert copied.submit("acme", payload=2).count == receipt.count - 1


def test_a_role_without_rights_is_told_what_it_lacks(databases: Databases, role: str) -> None:
    empty, made = databases.new(empty=True), databases.new()

    with pytest.raises(StoreRefused, match=f"the role {role} may not migrate it .*--grant {role}"):
        PostgresStore(as_role(empty, role))
    with pytest.raises(StoreRefused, match=f"the role {role} lacks a privilege that a queue needs"):
        PostgresStore(as_role(made, role))
    with pytest.raises(StoreRefused, match=f"the role {role} may not create or change the schema"):
        migrating.migrate_server(as_role(empty, role))


def test_rights_that_were_not_given_are_not_said_to_be(databases: Databases, role: str) -> None:
    url = databases.new()
    migrating.migrate_server(url, grant_to=role)

    with pytest.raises(StoreRefused, match=r"or grant its use .*pg_read_all_stats"):
        migrating.migrate_server(as_role(url, role), grant_to="pg_read_all_stats")


def test_rights_for_a_role_that_is_not_there_are_refused_before_anything_is_made(
    databases: Databases,
) -> None:
    empty = databases.new(empty=True)

    with pytest.raises(StoreRefused, match="has no role 'nobody_here'"):
        migrating.migrate_server(empty, grant_to="nobody_here")

    with psycopg.connect(empty) as connection:
        assert migrating.version_of(connection, "fairturn") == 0


def test_without_leave_to_migrate_a_database_without_a_schema_is_refused(
    databases: Databases,
) -> None:
    empty = databases.new(empty=True)

    with pytest.raises(StoreRefused, match="has no queue in its schema fairturn; create it with"):
        PostgresStore(empty, migrate=False)

    with psycopg.connect(empty) as connection:
        found = connection.execute("SELECT to_regnamespace('fairturn') IS NULL").fetchall()
    assert found == [(True,)]


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_another_isolation_level_by_default_is_refused_with_the_statement_that_changes_it(
    url: str, isolation: str
) -> None:
    database = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            f"ALTER DATABASE {database} SET default_transaction_isolation = '{isolation}'"
        )

        with pytest.raises(
            StoreRefused, match=f"default_transaction_isolation is '{isolation}'"
        ) as refused:
            PostgresStore(url)

        connection.execute(str(refused.value).partition("connect again: ")[2])
    PostgresStore(url).close()


def test_a_newer_schema_is_refused_and_left_untouched(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("INSERT INTO fairturn.migrations VALUES (99, 99)")

    for migrate in (True, False):
        with pytest.raises(StoreRefused, match="has schema 99, and this release reads"):
            PostgresStore(url, migrate=migrate)


def test_two_queues_in_two_schemas_of_one_database_do_not_touch_each_other(url: str) -> None:
    stores = [PostgresStore(url, schema=schema) for schema in ("fairturn", "another")]
    for n, store in enumerate(stores):
        store.submit([new("a")] * (n + 1))
        store.submit([new("b")])
    stores[1].configure(Settings(mode=Mode.LEVELS))

    assert [store.summary().waiting for store in stores] == [2, 3]
    assert [len(claim(store, 9)) for store in stores] == [2, 3]
    assert stores[0].settings().mode is Mode.FAIR
    for store in stores:
        store.close()


def test_a_schema_that_is_no_plain_name_is_refused() -> None:
    for name in ("", "Fair", 'x"; DROP TABLE y; --', "a b", "x" * 64):
        with pytest.raises(ValueError, match="it must contain only lowercase letters"):
            PostgresStore("postgresql:///x", schema=name)


# ── Sentences ────────────────────────────────────────────────────────────────────────────────────

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        (f"postgresql://u:{SECRET}@127.0.0.1:1/db", StoreUnavailable, "cannot be reached"),
        (f"postgresql://u:{SECRET}@nowhere.invalid/db", StoreUnavailable, "cannot be reached"),
        (f"postgresql://u:{SECRET}@h:port/db", StoreRefused, "its port is not a number; write"),
        (
            f"postgresql://u:{SECRET}@h/db?colour=red",
            StoreRefused,
            "colour is not a connection parameter",
        ),
        (f"postgresql://u:{SECRET}%zz@h/db", StoreRefused, "is not a valid PostgreSQL URL; write"),
        (f"postgresql:/u:{SECRET}@h/db", StoreRefused, "is not a valid PostgreSQL URL; write"),
        (f"postgresql://u:x@{SECRET}@h/db", StoreRefused, "an @ in a password is written %40"),
        (
            f"postgresql://u:a/b?{SECRET}=x@h/db",
            StoreRefused,
            "is not a valid PostgreSQL URL; write",
        ),
        (
            f"postgresql://u:{SECRET}@127.0.0.1:99999/db",
            StoreRefused,
            "invalid port number: .99999.; corr",
        ),
        (
            f"postgresql://u:{SECRET}@127.0.0.1/db?sslmode=no",
            StoreRefused,
            "invalid sslmode value: .no.;",
        ),
        ("postgresql://?service=nowhere", StoreRefused, "definition of service .nowhere. not fou"),
    ],
)
def test_an_address_that_leads_nowhere_is_a_sentence_without_the_password(
    url: str, error: type[StoreError], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        PostgresStore(url)

    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_address_to_listen_at_that_is_none_is_told_when_the_queue_is_opened(url: str) -> None:
    with pytest.raises(StoreRefused, match="is not a valid PostgreSQL URL; write") as refused:
        PostgresStore(url, listen_url=f"postgresql:/u:{SECRET}@h/db")

    assert SECRET not in str(refused.value)


def test_a_database_that_does_not_exist_is_named() -> None:
    with pytest.raises(
        StoreRefused, match='"nosuchdatabase" does not exist; create it with createdb'
    ):
        PostgresStore(postgres.of_this_run().url("nosuchdatabase"))


def test_a_role_that_does_not_exist_is_named() -> None:
    url = as_role(postgres.of_this_run().url(), "nosuchrole")

    with pytest.raises(StoreRefused, match="cannot be opened: .*; correct the URL"):
        PostgresStore(url)


def test_a_read_only_server_is_waited_for(url: str, store: PostgresStore) -> None:
    name = url.rpartition("/")[2].partition("?")[0]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    terminate_others(url)

    with pytest.raises(StoreUnavailable):
        store.submit([new()])

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    terminate_others(url)
    assert submit(store).count == 0


# ── Upgrades ──────────────────────────────────────────────────────────────────────────────────────


def test_who_runs_goes_on_beside_a_newer_fairturn_and_who_starts_is_refused(
    store: PostgresStore, url: str
) -> None:
    submit(store)
    with psycopg.connect(url) as newer:
        newer.execute("INSERT INTO fairturn.migrations VALUES (9999, 9999)")
        newer.execute("ALTER TABLE fairturn.documents ADD COLUMN colour text")
        newer.execute("ALTER TABLE fairturn.flows ADD COLUMN colour text")
        newer.execute("CREATE TABLE fairturn.colours (colour text)")

    submit(store)
    (first, second) = claim(store, 2)
    assert store.finish([Completed(first.fence), Released(second.fence)]) == []
    assert_numbers_are_exact(store)
    with pytest.raises(StoreRefused, match="install the newer fairturn that migrated it"):
        PostgresStore(url)
