"""PostgreSQL: notifications of a change, and their limits."""

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from fairturn.clock import SECOND_US
from fairturn.errors import StoreError
from fairturn.model import Completed
from fairturn.stores.conformance.steps import assert_numbers_are_exact, claim, find_all, submit
from fairturn.stores.postgres import PostgresStore, notify
from fairturn.stores.urls import SCHEMA
from tests.on_postgres import PATIENCE_S, new, terminate_others, woken

LEASE_US = 30 * SECOND_US


def test_a_hint_wakes_others_without_a_look(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "POLL_S", 3_600.0)
    other = PostgresStore(url)

    assert woken(store, lambda: submit(other))
    (claimed,) = claim(store)
    assert woken(other, lambda: store.finish([Completed(claimed.fence)]))
    other.close()


@pytest.fixture
def listener(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"LISTEN {SCHEMA}_changed")
        yield connection


def hints(listener: psycopg.Connection[Any]) -> int:
    """Return the number of notifications since the last call. The server delivers committed ones
    before it answers."""
    listener.execute("SELECT 1")
    return len(list(listener.notifies(timeout=0)))


def test_changes_close_together_share_a_hint(
    url: str, listener: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_TOGETHER_S", 3_600.0)
    store = PostgresStore(url)

    for _ in range(5):
        submit(store)
    claims = claim(store, 3)
    store.finish([Completed(claimed.fence) for claimed in claims])

    assert hints(listener) == 1
    store.close()
    assert hints(listener) == 1


def news_of(store: PostgresStore) -> int:
    """Return what the listener has received."""
    before = store.wait(-1, 0, certain=False)
    return store.wait(before, PATIENCE_S, certain=False)


def test_a_process_hears_of_its_own_changes_once(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_TOGETHER_S", 0.0)  # each submission sends a notification
    news = news_of(store)

    for _ in range(5):
        submit(store)
    with psycopg.connect(url, autocommit=True) as another:
        another.execute(f"NOTIFY {SCHEMA}_changed")

    assert store.wait(news + 5, PATIENCE_S, certain=False) == news + 6


HINT = ("pg_notify", "(text, text)", "void")


def break_function(url: str, function: tuple[str, str, str], fault: str) -> None:
    """Replace a function of the server."""
    name, arguments, result = function
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"UPDATE pg_proc SET proname = 'gone' WHERE proname = '{name}'")
        connection.execute(
            f"CREATE FUNCTION pg_catalog.{name} {arguments} RETURNS {result} LANGUAGE plpgsql AS "
            f"$$ BEGIN {fault}; END $$"
        )


def refuse_to_commit(url: str, table: str) -> None:
    """Let every transaction that has inserted into a table fail at its commit."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE "
            "'not with us'; END $$"
        )
        connection.execute(
            f"CREATE CONSTRAINT TRIGGER refused AFTER INSERT ON {table} "
            "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()"
        )


def test_what_fails_when_it_is_committed_is_not_said_to_be_stored(
    url: str, store: PostgresStore
) -> None:
    refuse_to_commit(url, "fairturn.documents")

    for documents in ([new()], [new()] * 2):
        with pytest.raises(StoreError, match="not with us"):
            store.submit(documents)

    assert find_all(store) == []


@pytest.mark.parametrize("fault", ["RAISE 'nobody is told'", "INSERT INTO refused VALUES (1)"])
def test_a_hint_that_fails_costs_a_submission_nothing(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(notify, "_TOGETHER_S", 0.0)  # each submission sends a notification
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE refused (number integer)")
    refuse_to_commit(url, "refused")
    break_function(url, HINT, fault)

    ids = [submit(store).id for _ in range(3)]
    ids += [receipt.id for receipt in store.submit([new(), new("b")])]

    assert sorted(ids) == sorted(found.id for found in find_all(store))
    assert_numbers_are_exact(store)


def test_a_submission_is_on_the_disk_when_it_returns(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_TOGETHER_S", 0.0)  # each submission sends a notification
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = on;"
            "CREATE TABLE written (at pg_lsn);"
            "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "INSERT INTO written VALUES (pg_current_wal_insert_lsn()); RETURN NULL; END $$;"
            "CREATE TRIGGER noted AFTER INSERT ON fairturn.documents EXECUTE FUNCTION note()"
        )
        store = PostgresStore(url)
        late = []

        for documents in ([new()], [new(), new("b")], [new()] * 60) * 10:
            store.submit(documents)
            late += connection.execute(
                "SELECT at FROM written WHERE at > pg_current_wal_flush_lsn()"
            ).fetchall()

        assert late == []
        store.close()


def test_a_lost_listener_costs_at_most_a_look_and_comes_back(
    url: str, store: PostgresStore
) -> None:
    other = PostgresStore(url)
    assert woken(store, lambda: submit(other))

    terminate_others(url)

    assert woken(store, lambda: submit(other))
    other.close()


def test_an_address_to_listen_at_that_leads_nowhere_is_told_once_and_without_its_password(
    url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_AGAIN_S", (0.01,))
    tried = threading.Semaphore(0)
    tell = notify.ChangeListener._log_failure

    def tell_and_count(self: notify.ChangeListener, error: Exception) -> None:
        tell(self, error)
        tried.release()

    monkeypatch.setattr(notify.ChangeListener, "_log_failure", tell_and_count)
    store = PostgresStore(url, listen_url="postgresql://app:secret@127.0.0.1:1/nowhere")

    store.wait(store.version(), 0)
    for _ in range(3):
        assert tried.acquire(timeout=PATIENCE_S)
    store.close()

    (told,) = [r.getMessage() for r in caplog.records if r.name == "fairturn.postgres"]
    assert told.startswith("cannot listen for changes at the database nowhere at 127.0.0.1:1 (")
    assert told.endswith("; polling once a second")
    assert "secret" not in told
