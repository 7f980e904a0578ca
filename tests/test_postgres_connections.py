"""PostgreSQL: connections, also lost or pooled ones, and their round trips."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from fairturn.clock import SECOND_US
from fairturn.errors import FairturnError, StoreUnavailable
from fairturn.model import Completed, CustomerSettings, Filter, Receipt, Settings
from fairturn.stores.conformance.steps import assert_numbers_are_exact, claim, find_all, submit
from fairturn.stores.postgres import PostgresStore, connection, notify
from fairturn.stores.postgres.pool import Use
from fairturn.stores.postgres.session import BEGIN
from fairturn.stores.postgres.submit import SUBMISSIONS_PER_CUSTOMER_MAX
from fairturn.stores.urls import SCHEMA
from tests.on_postgres import (
    PATIENCE_S,
    ended_somehow,
    new,
    terminate_others,
    wait_until_waiting,
    woken,
)
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
    monkeypatch.setattr(connection, "WAIT_S", 0.5)
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


def test_a_call_that_waits_for_a_connection_gets_the_next_one_that_is_given_back(url: str) -> None:
    store = PostgresStore(url, pool_max=2)
    told: list[Receipt] = []
    thread = threading.Thread(target=lambda: told.append(submit(store)))

    with store._database.session():
        thread.start()
    thread.join(PATIENCE_S)

    assert len(told) == 1
    store.close()


def test_claims_and_outcomes_have_connections_that_nothing_else_can_use_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PostgresStore(url, pool_max=4)
    submit(store)

    with ExitStack() as others, monkeypatch.context() as patched:
        patched.setattr(connection, "WAIT_S", 0.05)
        for _ in range(2):
            others.enter_context(store._database.session(Use.OTHER))
        with pytest.raises(StoreUnavailable, match="all connections to .* were in use"):
            store.summary()
        (claimed,) = claim(store)
        assert store.renew([claimed.fence], lease_us=LEASE_US).lost == []
        assert store.finish([Completed(claimed.fence)]) == []

    store.close()


def test_submissions_that_wait_for_one_customer_leave_those_of_others_undisturbed(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(store, "held")
    receipts: list[Receipt] = []
    with psycopg.connect(url) as frozen, psycopg.connect(url, autocommit=True) as looking:
        store.submit([new("held")], connection=frozen)
        threads = [
            threading.Thread(target=lambda: receipts.append(submit(store, "held")))
            for _ in range(2 * connection.POOL_MAX)
        ]
        for thread in threads:
            thread.start()
        wait_until_waiting(looking, SUBMISSIONS_PER_CUSTOMER_MAX)

        assert submit(store, "other").count == 0
        assert store.summary().waiting == 2
        assert {each.document.customer for each in claim(store, 9)} == {"held", "other"}
        frozen.commit()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert sorted(receipt.count for receipt in receipts) == list(range(-21, -1))
    assert_numbers_are_exact(store)


def test_a_submission_gives_up_when_its_customer_stays_locked(
    url: str, store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WAIT_S", 0.1)
    submit(store)
    with psycopg.connect(url) as frozen:
        store.submit([new()], connection=frozen)

        with pytest.raises(StoreUnavailable, match="other transactions have held locks"):
            submit(store)


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
    monkeypatch.setattr(notify, "POLL_S", 3_600.0)
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


def test_a_statement_is_prepared_once_whatever_the_size_of_its_numbers(url: str) -> None:
    opened = connection.PostgresDatabase(url, schema=SCHEMA, pool_max=2, prepare=True)
    with opened.session() as session:
        found = [session.fetch("SELECT %s", (n,)) for n in (1, 1_000, 100_000, 1 << 40)]
        prepared = session.fetch("SELECT count(*) FROM pg_prepared_statements WHERE NOT from_sql")

    assert found == [[(1,)], [(1_000,)], [(100_000,)], [(1 << 40,)]]
    assert prepared[0][0] <= 2  # and the one that counts them
    opened.close()


def test_the_errors_of_this_store_are_ours(store: PostgresStore) -> None:
    store.close()

    for call in (store.summary, lambda: submit(store), lambda: claim(store)):
        with pytest.raises(FairturnError, match="was closed"):
            call()
