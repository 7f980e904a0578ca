"""PostgreSQL: a wrong row degrades one customer for a moment and never stops the queue."""

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from fairturn.clock import SECOND_US, ManualClock
from fairturn.errors import QueueFull
from fairturn.model import Advanced, CustomerSettings, Settings
from fairturn.stores.conformance.steps import claim, find_all, submit
from fairturn.stores.postgres import PostgresStore
from tests.on_postgres import PATIENCE_S, new, wait_until_waiting

# In one second of 16 a claim searches for documents that wrong sums and bounds hide.
START = 1_700_000_000 * SECOND_US
LEASE_US = 30 * SECOND_US


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def store(url: str, clock: ManualClock) -> Iterator[PostgresStore]:
    opened = PostgresStore(url, clock=clock)
    yield opened
    opened.close()


@pytest.fixture
def damage(url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


DAMAGES = {
    "no weights": "UPDATE fairturn.scheduler_states SET weights = array_fill(0::bigint, ARRAY[9])",
    "weights too low": "UPDATE fairturn.scheduler_states "
    "SET weights = array_fill(-500::bigint, ARRAY[9])",
    "a weight of 0": "UPDATE fairturn.customer_states SET weight = 0",
    "more running than the limit": "UPDATE fairturn.flows SET running = 9, held = false "
    "WHERE customer = (SELECT number FROM fairturn.customers WHERE name = 'wrong')",
    "one head twice": "UPDATE fairturn.flows SET head_order = 1 "
    "WHERE customer = (SELECT number FROM fairturn.customers WHERE name = 'wrong')",
    "events that are no JSON": "INSERT INTO fairturn.event_log (at, customers, events) "
    "VALUES (1, '{1}', 'torn')",
    "events of no kind": "INSERT INTO fairturn.event_log (at, customers, events) "
    "VALUES (1, '{1}', '[[99,1,1,1]]')",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_every_other_customer_is_served(
    store: PostgresStore, clock: ManualClock, damage: psycopg.Connection[Any], name: str
) -> None:
    store.adjust("wrong", CustomerSettings(weight=2, limit=3))
    store.submit([new("wrong")] * 6 + [new("a"), new("b")] * 5)
    claim(store, 0)

    damage.execute(DAMAGES[name])
    claimed = []
    for _ in range(17):
        claimed += claim(store, 20)
        clock.advance(1)

    customers = [each.document.customer for each in claimed]
    assert (customers.count("a"), customers.count("b")) == (5, 5)


def test_a_queue_whose_counters_are_too_high_accepts_documents(
    store: PostgresStore, damage: psycopg.Connection[Any]
) -> None:
    store.configure(Settings(waiting_max=5))
    store.submit([new("a")])
    damage.execute(
        "UPDATE fairturn.arrival_counters SET arrived[1] = arrived[1] + 9, delayed = delayed + 7"
    )

    store.submit([new("b")] * 4)

    assert (store.summary().waiting, store.summary().delayed) == (5, 0)


def test_a_refused_submission_repairs_nothing_in_a_queue_that_is_really_full(
    store: PostgresStore, damage: psycopg.Connection[Any]
) -> None:
    store.configure(Settings(waiting_max=1))
    store.submit([new("a")])
    before = damage.execute("SELECT * FROM fairturn.scheduler_states").fetchall()

    with pytest.raises(QueueFull):
        store.submit([new("b")])

    assert damage.execute("SELECT * FROM fairturn.scheduler_states").fetchall() == before


def test_a_submission_in_a_transaction_of_the_caller_begins_no_epoch_there(
    url: str, store: PostgresStore, damage: psycopg.Connection[Any]
) -> None:
    submit(store, "other")
    damage.execute("UPDATE fairturn.queue SET incarnation = 'another server'")

    with psycopg.connect(url) as frozen:
        (receipt,) = store.submit([new("held")], connection=frozen)
        assert [each.document.customer for each in claim(store, 9)] == ["other"]
        frozen.commit()

    assert [each.document.id for each in claim(store, 9)] == [receipt.id]
    assert damage.execute("SELECT epoch FROM fairturn.queue").fetchall() == [(2,)]


def test_settings_of_a_customer_that_is_purged_meanwhile_are_those_of_a_new_one(
    url: str, store: PostgresStore, damage: psycopg.Connection[Any]
) -> None:
    submit(store, "acme")
    calls = [
        threading.Thread(target=store.purge, args=("acme",)),
        threading.Thread(target=store.adjust, args=("acme", CustomerSettings(limit=2))),
    ]
    with psycopg.connect(url) as claiming:
        claiming.execute("SELECT FROM fairturn.queue FOR NO KEY UPDATE")
        for n, call in enumerate(calls, start=1):
            call.start()
            wait_until_waiting(damage, n)
    for call in calls:
        call.join(PATIENCE_S)

    (customer,) = store.customers(names=["acme"]).customers
    assert customer.settings.limit == 2
    assert find_all(store) == []


def test_a_document_of_a_clock_that_was_ahead_does_not_end_the_pruning(
    store: PostgresStore, clock: ManualClock
) -> None:
    store.configure(Settings(cancelled_kept_s=10))
    clock.step(400 * 86_400)
    ahead = submit(store)
    clock.step(-400 * 86_400)
    later = submit(store)
    store.cancel([later.id])
    clock.advance(86_500)

    while store.prune() is not None:
        pass

    assert [found.id for found in find_all(store)] == [ahead.id]


def test_a_running_document_without_its_worker_loses_its_lease_like_others(
    store: PostgresStore, clock: ManualClock, damage: psycopg.Connection[Any]
) -> None:
    store.submit([new("wrong"), new("a")])
    claim(store, 2)
    damage.execute("UPDATE fairturn.documents SET worker = NULL, claimed_at = NULL")
    clock.advance(31)

    claimed = claim(store, 2)

    assert [each.document.attempts for each in claimed] == [2, 2]
    (record,) = store.attempts(claimed[0].document.id) or []
    assert (record.worker, record.claimed_at_us) == ("", clock.now())


def test_a_document_without_the_rows_of_its_steps_is_claimed(
    store: PostgresStore, damage: psycopg.Connection[Any]
) -> None:
    store.submit([new("wrong")])
    (first,) = claim(store)
    store.finish([Advanced(first.fence, "default", "1")])
    damage.execute("DELETE FROM fairturn.attempts")

    (second,) = claim(store)

    assert (second.document.step, second.previous, second.steps) == (1, None, ())
