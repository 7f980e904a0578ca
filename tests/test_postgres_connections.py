"""PostgreSQL: connections, also those that are lost or pooled, and their round trips."""

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from fairturn.clock import SECOND_US
from fairturn.errors import FairturnError, StoreUnavailable
from fairturn.model import Completed, CustomerSettings, Filter, Receipt, Settings
from fairturn.stores.postgres import PostgresStore, database, pooling, watching
from fairturn.stores.postgres.piping import Line
from fairturn.stores.postgres.session import BEGIN, SCHEMA, Session
from fairturn.testing.steps import assert_numbers_are_exact, claim, find_all, submit
from tests.on_postgres import PATIENCE_S, ended_somehow, new, terminate_others, woken
from tests.servers import pgbouncer, postgres
from tests.servers.proxy import Proxy
from tests.servers.queues import Databases

LEASE_US = 30 * SECOND_US


# ── Lost connections ─────────────────────────────────────────────────────────────────────────────


def test_connections_that_the_server_has_ended_are_replaced(url: str, store: PostgresStore) -> None:
    submit(store, key="k", digest=b"1")
    calls: list[Any] = [
        lambda: submit(store, key="k", digest=b"1"),
        lambda: store.submit([new("b")] * 3),
        lambda: claim(store, 2),
        lambda: store.finish([Completed(claim(store)[0].fence)]),
        store.summary,
        lambda: find_all(store),
        store.version,
        lambda: store.configure(Settings(attempts_max=2)),
        store.prune,
    ]

    for call in calls:
        terminate_others(url)
        call()

    assert store.summary().waiting == 1
    assert_numbers_are_exact(store)


def test_a_queue_that_loses_its_server_says_so_and_goes_on_when_it_is_back(
    databases: Databases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT_S", 0.5)
    name = databases.new().rpartition("/")[2].partition("?")[0]
    with Proxy(postgres.of_this_run().url(name, tcp=True)) as proxy:
        store = PostgresStore(proxy.url)
        store.submit([new("a"), new("b")])
        (first,) = claim(store)

        proxy.cut()
        for call in (
            lambda: store.submit([new()]),
            lambda: store.submit([new(), new()]),
            lambda: claim(store),
            store.summary,
        ):
            with pytest.raises(StoreUnavailable, match="cannot be reached|was in use"):
                call()
        proxy.mend()

        deadline = threading.Event()
        while True:
            try:
                assert store.finish([Completed(first.fence)]) == []
                break
            except StoreUnavailable:
                assert not deadline.wait(0.05)
        assert len(claim(store, 9)) == 1
        store.close()


def test_calls_share_at_most_so_many_connections_and_who_waits_in_vain_is_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresStore(url, pool_max=2)

    with store._database.session(), store._database.session(), monkeypatch.context() as patched:
        patched.setattr(database, "WAIT_S", 0.05)
        with pytest.raises(StoreUnavailable, match="all 2 connections to .* were in use"):
            store.summary()

    assert store.summary().waiting == 0
    store.close()


def test_a_call_that_waits_for_a_connection_gets_the_next_one_that_is_given_back(url: str) -> None:
    store = PostgresStore(url, pool_max=1)
    told: list[Receipt] = []
    thread = threading.Thread(target=lambda: told.append(submit(store)))

    with store._database.session():
        thread.start()
    thread.join(PATIENCE_S)

    assert len(told) == 1
    store.close()


def test_calls_one_after_the_other_use_one_connection(store: PostgresStore) -> None:
    lent = store._database.session
    with lent() as first, lent():
        pass

    with lent() as session:
        last = session.connection
    for _ in range(3):
        with lent() as session:
            assert session.connection is last
    assert not first.connection.closed


def test_each_thread_goes_on_with_its_own_connection(store: PostgresStore) -> None:
    lent = store._database.session
    taken, done = threading.Event(), threading.Event()

    def use_another() -> None:
        with lent():
            taken.set()
            done.wait(PATIENCE_S)

    thread = threading.Thread(target=use_another)
    with lent() as session:
        own = session.connection
        thread.start()
        assert taken.wait(PATIENCE_S)
    done.set()
    thread.join(PATIENCE_S)

    for _ in range(3):
        with lent() as session:
            assert session.connection is own


def test_each_use_goes_on_with_its_own_connection_whichever_thread_it_is_in(
    store: PostgresStore,
) -> None:
    lent, (claims, outcomes) = store._database.session, pooling.Use
    with lent(outcomes) as second, lent() as third, lent(claims) as first:
        expected = [third.connection, second.connection, first.connection]  # the first one last
    for _ in range(3):
        found: list[Any] = []

        def use_each(found: list[Any] = found) -> None:
            for use in (None, outcomes, claims):
                with lent(use) as session:
                    found.append(session.connection)

        thread = threading.Thread(target=use_each)
        thread.start()
        thread.join(PATIENCE_S)
        assert found == expected


def test_claims_and_outcomes_have_connections_of_their_own(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store)
    uses: list[pooling.Use | None] = []
    lent = store._database.session

    def noted(use: pooling.Use | None = None) -> database.Lending:
        uses.append(use)
        return lent(use)

    monkeypatch.setattr(store._database, "session", noted)
    (claimed,) = claim(store)
    store.finish([Completed(claimed.fence)])

    assert [use for use in uses if use is not None] == [*pooling.Use]


def test_a_connection_that_nobody_needs_any_more_goes_back_to_the_pool(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = store._database.session
    with lent(), lent():
        pass
    assert len(store._database._pool._at_hand) == 2
    monkeypatch.setattr(pooling, "_IDLE_S", 0.0)

    with lent() as session:
        used = session.connection

    assert store._database._pool._at_hand == [used]


def test_a_connection_that_is_old_goes_back_to_the_pool_which_replaces_it(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = store._database.session
    with lent() as first, lent():
        pass
    monkeypatch.setattr(pooling, "_AT_HAND_S", 0.0)

    used = set()
    for _ in range(2):
        with lent() as session:
            used.add(session.connection)

    assert first.connection in used
    assert len(used) == 2


def test_a_connection_comes_back_without_a_transaction(store: PostgresStore) -> None:
    with store._database.session() as session:
        session.ask(BEGIN)

    with store._database.session() as another:
        status = another.connection.info.transaction_status
    assert status is TransactionStatus.IDLE
    assert submit(store).count == 0


# ── PgBouncer ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def pooled(url: str) -> Iterator[str]:
    if pgbouncer.find() is None:
        if os.environ.get("FAIRTURN_REQUIRE_SERVICES"):
            pytest.fail("pgbouncer is not installed: apt-get install pgbouncer")
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    name = url.rpartition("/")[2].partition("?")[0]
    server = postgres.of_this_run().url(name, tcp=True)
    with pgbouncer.started(server, server_connections=2) as address:
        yield address


def test_everything_works_through_a_pooler_that_has_two_connections_for_fifty_clients(
    pooled: str, url: str
) -> None:
    stores = [PostgresStore(pooled, pool_max=10) for _ in range(5)]
    errors: list[BaseException] = []

    def run(seed: int) -> None:
        random, store = Random(seed), stores[seed % 5]
        try:
            for n in range(6):
                store.submit([new(random.choice("abc"))])
                store.submit([new(name) for name in random.choices("abc", k=60)])
                claims = store.claim(20, worker="w", lease_us=LEASE_US).claims
                outcomes = [ended_somehow(each.fence, random) for each in claims]
                assert store.finish(outcomes) == []
                store.summary()
                assert store.find(Filter(), size=100).documents
                if n == 3:
                    store.adjust("a", CustomerSettings(weight=2))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)

    assert errors == []
    assert_numbers_are_exact(stores[0])
    assert len(find_all(stores[0], size=1_000)) == 50 * 6 * 61
    for store in stores:
        store.close()


def test_behind_a_pooler_changes_are_heard_of_at_another_address(
    pooled: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "POLL_S", 3_600.0)
    store, other = PostgresStore(pooled, listen_url=url), PostgresStore(pooled)

    assert woken(store, lambda: submit(other))
    store.close()
    other.close()


def test_behind_a_pooler_without_another_address_changes_are_looked_for(
    pooled: str, url: str
) -> None:
    store, other = PostgresStore(pooled), PostgresStore(url)

    assert woken(store, lambda: submit(other))
    store.close()
    other.close()


# ── Round trips ──────────────────────────────────────────────────────────────────────────────────


def test_after_an_error_in_a_round_trip_the_connection_goes_on_and_nothing_of_it_is_left(
    url: str,
) -> None:
    with Line.connect(url, autocommit=True) as line:
        line.prepares = True
        session = Session(line, "fairturn")

        def divide() -> None:
            with session.together():
                session.ask("BEGIN")
                session.ask("INSERT INTO fairturn.limited (customer) VALUES (%s)", (7,))
                session.ask("SELECT 1 / %s::integer", (0,))
                session.ask("SELECT %s::text || 'never prepared'", ("was ",))

        with pytest.raises(psycopg.errors.DivisionByZero):
            divide()
        line.rollback()

        assert session.fetch("SELECT %s::text || 'never prepared'", ("was ",)) == [
            ("was never prepared",)
        ]
        assert session.fetch("SELECT 1 / %s::integer", (1,)) == [(1,)]
        assert session.fetch("SELECT * FROM fairturn.limited") == []


def test_a_statement_is_prepared_once_whatever_the_size_of_its_numbers(url: str) -> None:
    connection = database.Database(url, schema=SCHEMA, pool_max=1, prepare=True).connect()
    connection.prepares = True
    with connection:
        session = Session(connection, SCHEMA)
        found = [session.fetch("SELECT %s", (n,)) for n in (1, 1_000, 100_000, 1 << 40)]

        assert found == [[(1,)], [(1_000,)], [(100_000,)], [(1 << 40,)]]
        assert len(connection.prepared) == 1


def test_a_round_trip_may_be_large_in_both_directions(url: str) -> None:
    with Line.connect(url, autocommit=True) as line:
        session = Session(line, "fairturn")
        large = "x" * 1_000_000
        with session.together():
            answers = [session.ask("SELECT repeat(%(text)s, 2)", {"text": large}) for _ in range(8)]

        assert [answer.fetchall() for answer in answers] == [[(large * 2,)]] * 8


def test_a_round_trip_that_is_broken_off_closes_its_connection(url: str) -> None:
    with Line.connect(url, autocommit=True) as line:
        session = Session(line, "fairturn")
        with suppress(KeyboardInterrupt), session.together():
            session.ask("SELECT 1")
            raise KeyboardInterrupt

        assert line.closed


def test_the_errors_of_this_store_are_ours(store: PostgresStore) -> None:
    store.close()

    for call in (store.summary, lambda: submit(store), lambda: claim(store)):
        with pytest.raises(FairturnError, match="was closed"):
            call()
