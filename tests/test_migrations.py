"""A database of an older version is brought to this one, with everything in it."""

from pathlib import Path

import apsw
import psycopg
import pytest

from fairturn.access.registry import Keys
from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import StoreUnavailable
from fairturn.explain.snapshot import Seen
from fairturn.model import LEASE_US_MIN, Completed, NewDocument
from fairturn.stores.postgres import PostgresStore, schema
from fairturn.stores.sqlite import SqliteStore
from fairturn.stores.sqlite.schema import APPLICATION_ID, migrations
from tests.servers.places import AnyStore
from tests.servers.queues import Databases


def old_file(path: Path, version: int = 1) -> Path:
    """A file as an older version made it, with a customer, and an attempt that has ended."""
    connection = apsw.Connection(str(path))
    for number, script in migrations()[:version]:
        connection.execute(script)
        connection.execute(f"PRAGMA user_version = {number}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute("INSERT INTO queue (one, settings, id_key, claims) VALUES (1, '{}', 7, 1)")
    connection.execute("INSERT INTO customers (number, name) VALUES (1, 'acme')")
    connection.close()
    return path


def test_a_file_without_access_keys_gets_them_and_keeps_its_documents(tmp_path: Path) -> None:
    path = old_file(tmp_path / "documents.db")

    store = SqliteStore(path)
    made = Keys(store).make("customer", customer="acme")
    store.submit([NewDocument("acme", "1")])

    assert Keys(store).check(made.shown) == made.key
    assert [customer.name for customer in store.customers().customers] == ["acme"]
    assert store.oldest_waiting().keys() == {1}
    store.close()


def test_a_retry_of_an_older_version_is_due_by_the_wall_clock(tmp_path: Path) -> None:
    path = old_file(tmp_path / "documents.db")
    connection = apsw.Connection(str(path))
    connection.execute(RETRIED_BEFORE_EPOCHS)
    connection.close()
    clock = ManualClock(10 * SECOND_US)
    store = SqliteStore(path, clock=clock)

    assert store.claim(1, worker="w", lease_us=LEASE_US_MIN).claims == []
    clock.advance(50)
    (claimed,) = store.claim(1, worker="w", lease_us=LEASE_US_MIN).claims

    assert claimed.document.attempts == 2
    store.begin_epoch()
    assert store.submit([NewDocument("acme", "1")])[0].id != claimed.document.id
    store.close()


def test_documents_that_are_cancelled_are_reported_from_the_new_version_on(tmp_path: Path) -> None:
    store = SqliteStore(old_file(tmp_path / "documents.db", version=6))
    (receipt,) = store.submit([NewDocument("acme", "1")])
    store.cancel([receipt.id])

    (cancelled,) = store.claim(1, worker="w", lease_us=LEASE_US_MIN).cancelled

    assert cancelled.id == receipt.id
    store.close()


# A document whose next attempt is due a minute after 1970.
RETRIED_BEFORE_EPOCHS = """
    INSERT INTO documents (number, customer, level, order_number, state, priority, count,
        submitted_at, size_bytes, kind, fence, attempts, claimed_at, due_at, error, body)
    VALUES (1, 1, 1, 1, 0, 1, 0, 0, 1, 'payload', 1, 1, 0, 60000000, 'busy', '1');
    INSERT INTO flows (customer, level, claimed_to) VALUES (1, 1, 1);
    UPDATE customers SET delayed = 1;
    UPDATE queue SET delayed = 1, next_number = 2, next_customer = 2, fence = 1"""


def old_schema(url: str, version: int = 1) -> str:
    """A queue in PostgreSQL as an older version made it, in which an attempt has ended."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA fairturn")
        connection.execute("CREATE TABLE fairturn.migrations (number integer PRIMARY KEY)")
        for number, script in schema.migrations()[:version]:
            connection.execute(schema.filled_in(script, "fairturn"))
            connection.execute("INSERT INTO fairturn.migrations VALUES (%s)", (number,))
        connection.execute("UPDATE fairturn.turns SET claims = 1")
    return url


def assert_outcomes_are_counted_from_now_on(store: AnyStore) -> None:
    assert (store.summary().started, store.summary().completed) == (1, 0)

    store.submit([NewDocument("acme", "1")])
    (claimed,) = store.claim(1, worker="w", lease_us=LEASE_US_MIN).claims
    store.finish([Completed(claimed.fence)])

    assert (store.summary().started, store.summary().completed) == (2, 1)
    store.close()


def test_how_documents_end_is_counted_from_the_new_version_on(tmp_path: Path) -> None:
    assert_outcomes_are_counted_from_now_on(SqliteStore(old_file(tmp_path / "documents.db")))
    with Databases() as databases:
        url = old_schema(databases.new(empty=True))
        assert_outcomes_are_counted_from_now_on(PostgresStore(url))


# A document waits, and the flow that a claim has made of it is one without versions.
WAITING_BEFORE_VERSIONS = """
    INSERT INTO fairturn.customers (name) VALUES ('acme');
    INSERT INTO fairturn.documents (number, customer, order_number, count, submitted_at, size_bytes,
        level, priority, state, is_payload, body_text)
    VALUES (nextval('fairturn.document_numbers'), 1, 1, 0, 0, 1, 1, 1, 1, true, '1');
    INSERT INTO fairturn.flows (customer, level, place, tick, folded, running, taken, claimed_to,
        head_order, head_since, head_bound, held)
    VALUES (1, 1, 0, 1, 1, 0, 0, 0, 1, 0, 0, false);
    UPDATE fairturn.turns SET tick = 1, weights[1] = 1000"""


def test_flows_without_versions_are_served_and_get_them() -> None:
    with Databases() as databases:
        url = old_schema(databases.new(empty=True), version=5)
        with psycopg.connect(url) as connection:
            connection.execute(WAITING_BEFORE_VERSIONS)

        store = PostgresStore(url)
        first = store.claim(1, worker="w", lease_us=30 * SECOND_US).claims
        (receipt,) = store.submit([NewDocument("acme", "2")])
        second = store.claim(1, worker="w", lease_us=30 * SECOND_US).claims
        store.close()
        with psycopg.connect(url) as connection:
            flows = connection.execute("SELECT level, version > 0 FROM fairturn.flows").fetchall()

    assert [claim.body for claim in first] == ["1"]
    assert [claim.document.id for claim in second] == [receipt.id]
    assert flows == [(1, True)]


def test_a_schema_that_cannot_be_changed_now_is_left_as_it_is_and_nobody_waits_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(schema, "_GIVE_UP_S", 0.05)
    with Databases() as databases:
        url = old_schema(databases.new(empty=True), version=5)
        with psycopg.connect(url) as dump:
            dump.execute("SELECT * FROM fairturn.flows")
            with pytest.raises(StoreUnavailable, match="schema 6 cannot be made beside it"):
                PostgresStore(url)
            assert schema.version_of(dump, "fairturn") == 5

        PostgresStore(url).close()


# How documents were counted before schema 7, in a row that nobody else holds.
COUNT_IN_THE_OLD_WAY = """
    UPDATE fairturn.totals SET arrived[1] = arrived[1] + 2, delayed = delayed + 1,
        changes = changes + 1
    WHERE shard = (SELECT shard FROM fairturn.totals WHERE shard = 3 FOR UPDATE SKIP LOCKED)"""


def test_what_is_counted_in_the_old_way_while_the_schema_is_changed_stays() -> None:
    with Databases() as databases:
        url = old_schema(databases.new(empty=True), version=6)
        with psycopg.connect(url) as before, psycopg.connect(url) as reader:
            before.execute(COUNT_IN_THE_OLD_WAY)
            store = PostgresStore(url)
            before.commit()
            reader.execute("SELECT fairturn.count_arrived(3, ARRAY[1,0,0,0,0,0,0,0,0], 0)")
            reader.execute("SELECT fairturn.count_arrived(99, ARRAY[1,0,0,0,0,0,0,0,0], 0)")
            rows = reader.execute(
                "SELECT shard, arrived[1], delayed, changes FROM fairturn.totals "
                "WHERE changes > 0 ORDER BY shard"
            ).fetchall()
        store.close()

    assert rows == [(3, 3, 1, 2), (99, 1, 0, 1)]


def test_functions_are_those_of_this_version_whatever_they_were_before() -> None:
    with Databases() as databases:
        url = old_schema(databases.new(empty=True), version=7)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "CREATE FUNCTION fairturn.pending() RETURNS bigint LANGUAGE sql AS 'SELECT 7::int8'"
            )
            PostgresStore(url).close()

            assert connection.execute("SELECT fairturn.pending()").fetchall() == [(0,)]


WORKER_BEFORE_SLOTS = "INSERT INTO {}workers (name, seen_at, idle) VALUES ('w', 5, 913)"


def test_a_worker_of_the_version_before_slots_is_listed_until_it_signs_on(tmp_path: Path) -> None:
    path = old_file(tmp_path / "documents.db")
    connection = apsw.Connection(str(path))
    connection.execute(WORKER_BEFORE_SLOTS.format(""))
    connection.close()
    with Databases() as databases:
        url = old_schema(databases.new(empty=True), version=8)
        with psycopg.connect(url) as session:
            session.execute(WORKER_BEFORE_SLOTS.format("fairturn."))
        for store in (SqliteStore(path), PostgresStore(url)):
            assert store.workers() == [Seen("w", 5, 0)]
            store.sign_on("w", 4)
            assert [seen.slots for seen in store.workers()] == [4]
            store.close()
