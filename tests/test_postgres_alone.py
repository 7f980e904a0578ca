"""What PostgreSQL claims by itself: a document that waits alone, where nothing is to be decided."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from random import Random
from typing import Any

import psycopg
import pytest
from psycopg import sql

from fairturn.clock import SECOND_US, ManualClock
from fairturn.flows import COST_ONE, Costs, Mode
from fairturn.model import LEASE_US_MAX, Completed, CustomerSettings, Released, Settings
from fairturn.stores.postgres import PostgresStore
from fairturn.stores.postgres.adapting import adapt
from fairturn.stores.postgres.alone import CLAIM_ALONE, Found, Look
from fairturn.stores.postgres.engine import Engine
from fairturn.testing.steps import (
    LEASE_S,
    LEASE_US,
    START,
    assert_numbers_are_exact,
    claim,
    claim_one,
    complete,
    ids,
    new,
    submit,
    submit_each,
)
from tests.servers.queues import Databases

PATIENCE_S = 120


@pytest.fixture
def url() -> Iterator[str]:
    with Databases() as databases:
        yield databases.new()


@pytest.fixture
def store(url: str) -> Iterator[PostgresStore]:
    """A store that has found nothing the last time."""
    opened = PostgresStore(url)
    assert claim(opened) == []
    yield opened
    opened.close()


@pytest.fixture
def decides_no_more(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on a claim that reads and decides is an error."""

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("this claim has asked for the turns, and decided")

    return lambda: monkeypatch.setattr(Engine, "ask", refuse)


# ── What is claimed ──────────────────────────────────────────────────────────────────────────────


def test_documents_that_come_one_by_one_are_claimed_without_a_decision(
    store: PostgresStore, decides_no_more: Callable[[], None]
) -> None:
    decides_no_more()

    for customer in ("acme", "bolt", "acme"):
        receipt = submit(store, customer, metadata='{"page":1}', name="invoice.pdf")
        claimed = claim_one(store)
        assert (claimed.document.id, claimed.document.customer) == (receipt.id, customer)
        assert claimed.document.attempts == 1
        complete(store, [claimed])

    assert claim(store) == []
    assert_numbers_are_exact(store)


def test_the_claim_is_what_an_ordinary_one_would_be(
    url: str, store: PostgresStore, decides_no_more: Callable[[], None]
) -> None:
    with closing(PostgresStore(url)) as other:
        submit(other, "acme", cost=3, name="a.pdf")
        ordinary = claim_one(other)
        other.finish([Completed(ordinary.fence)])
        claim(store)
    submit(store, "acme", cost=3, name="a.pdf")
    decides_no_more()

    alone = claim_one(store)

    same: dict[str, Any] = {"id": "", "count": 0, "submitted_at": 0, "order": 0, "claimed_at": 0}
    assert alone.document._replace(**same) == ordinary.document._replace(**same)
    assert alone.fence.number > ordinary.fence.number
    assert alone.lease_ends_at == alone.document.claimed_at + LEASE_US  # type: ignore[operator]
    assert alone.body == ordinary.body
    assert store.read(alone.document.id).document == alone.document  # type: ignore[union-attr]


def test_a_content_in_the_row_comes_as_bytes(
    store: PostgresStore, decides_no_more: Callable[[], None]
) -> None:
    submit(store, body=b"\x00\xff")
    decides_no_more()

    assert claim_one(store).body == b"\x00\xff"


def test_its_lease_runs_out_as_any_other(store: PostgresStore) -> None:
    submit(store)
    first = claim_one(store, lease_us=SECOND_US)
    with psycopg.connect(store.url) as connection:  # as if the time had passed
        connection.execute("UPDATE fairturn.leases SET until = 1")
        connection.execute("UPDATE fairturn.documents SET lease_until = 1")
    store._claiming.forget()  # and a look at all leases were due

    again = claim_one(store)

    assert again.document.id == first.document.id
    assert again.document.attempts == 2
    assert store.finish([Completed(first.fence)]) == [first.fence]


def test_one_of_many_who_look_gets_the_document_and_the_others_nothing(url: str) -> None:
    with ExitStack() as stack:
        stores = [stack.enter_context(closing(PostgresStore(url))) for _ in range(4)]
        for each in stores:
            assert claim(each) == []
        submit(stores[0])

        found = [len(claim(each, worker=f"w{n}")) for n, each in enumerate(stores)]

    assert sorted(found) == [0, 0, 0, 1]


def test_who_looks_and_who_claims_alone_is_noted(store: PostgresStore) -> None:
    assert claim(store, 5, worker="idle") == []
    submit(store)
    claim(store, 5, worker="busy")

    assert {seen.worker: seen.idle for seen in store.workers()} == {
        "worker-1": 1,
        "idle": 5,
        "busy": 4,
    }


# ── What is left to a decision ───────────────────────────────────────────────────────────────────


def another_mode(store: PostgresStore) -> None:
    with closing(PostgresStore(store.url)) as other:
        other.configure(Settings(mode=Mode.EQUAL))
    submit(store)


def a_limit(store: PostgresStore) -> None:
    store.adjust("acme", CustomerSettings(limit=1))
    submit(store)


WITH_SOMETHING_ELSE: dict[str, Callable[[PostgresStore], object]] = {
    "two customers": lambda store: submit_each(store, "ab"),
    "two documents of one": lambda store: submit_each(store, "aa"),
    "several in one call": lambda store: store.submit([new("a"), new("b")]),
    "a limit": a_limit,
    "another mode": another_mode,
}


@pytest.mark.parametrize("name", WITH_SOMETHING_ELSE)
def test_with_something_else_all_that_waits_is_claimed_in_its_order(
    store: PostgresStore, name: str
) -> None:
    WITH_SOMETHING_ELSE[name](store)
    waiting = store.summary().waiting

    claimed = claim(store, 5)

    assert len(claimed) == waiting
    assert [c.document.order for c in claimed] == sorted(c.document.order or 0 for c in claimed)
    assert claim(store, 5) == []
    assert_numbers_are_exact(store)


def test_a_delay_that_has_ended_is_found_beside_a_document_that_arrived(url: str) -> None:
    clock = ManualClock(START)
    with closing(PostgresStore(url, clock=clock)) as store:
        delayed = submit(store, "acme", due_at=START + 10 * SECOND_US)
        assert claim(store) == []
        clock.advance(11)
        arrived = submit(store, "bolt")

        found = claim(store, 2)

    assert set(ids(found)) == {delayed.id, arrived.id}


def test_a_lease_that_ran_out_is_found_beside_a_document_that_arrived(url: str) -> None:
    clock = ManualClock(START)
    with closing(PostgresStore(url, clock=clock)) as store:
        assert claim(store) == []
        left_behind = submit(store, "acme")
        claim_one(store)
        clock.advance(LEASE_S + 1)
        arrived = submit(store, "bolt")

        found = claim(store, 2)

    assert set(ids(found)) == {left_behind.id, arrived.id}


def test_after_a_restart_of_the_machine_all_that_ran_is_found_beside_what_arrived(url: str) -> None:
    clock = ManualClock(START)
    with closing(PostgresStore(url, clock=clock)) as store:
        assert claim(store) == []
        left_behind = submit(store, "acme")
        claim_one(store)
        clock.reboot("boot-2")
        arrived = submit(store, "bolt")

        found = claim(store, 2)

    assert set(ids(found)) == {left_behind.id, arrived.id}


def test_settings_that_another_process_has_changed_are_in_force(
    url: str, store: PostgresStore
) -> None:
    with closing(PostgresStore(url)) as other:
        other.configure(Settings(costs=Costs.KNOWN))
        submit(other, cost=5 * COST_ONE)

        claim_one(store)

    with psycopg.connect(url) as connection:
        charged = connection.execute("SELECT charged_cost FROM fairturn.documents").fetchall()
    assert charged == [(5 * COST_ONE,)]


def test_a_process_learns_from_a_claim_which_settings_are_in_force(
    url: str, store: PostgresStore, decides_no_more: Callable[[], None]
) -> None:
    with closing(PostgresStore(url)) as other:
        other.configure(Settings(patience_s=60))
        submit(other)
        assert len(claim(store, 2)) == 1
        submit(other)
        decides_no_more()

        assert len(claim(store, 2)) == 1


def test_a_snapshot_from_before_the_lock_is_not_trusted(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(
            sql.SQL(
                "ALTER DATABASE {} SET default_transaction_isolation = 'repeatable read'"
            ).format(name)
        )
    with closing(PostgresStore(url)) as one, closing(PostgresStore(url)) as other:
        for store in (one, other):
            assert claim(store) == []
        for n in range(10):
            receipt = submit(one, f"customer-{n}")
            found = [*claim(one), *claim(other)]
            assert ids(found) == [receipt.id]
            complete(other, found)


def test_a_customer_that_is_paused_gets_nothing(store: PostgresStore) -> None:
    store.adjust("acme", CustomerSettings(paused=True))
    claim(store)
    submit(store)

    assert claim(store) == []
    store.adjust("acme", CustomerSettings())
    assert len(claim(store)) == 1


def test_a_customer_at_its_limit_gets_nothing(store: PostgresStore) -> None:
    store.adjust("acme", CustomerSettings(limit=1))
    submit(store)
    running = claim_one(store)  # from here on the limit is folded in
    assert claim(store) == []

    second = submit(store)

    assert claim(store) == []
    complete(store, [running])
    assert ids(claim(store)) == [second.id]


def test_who_waits_already_has_the_turn_although_another_one_has_folded_it_in(
    url: str, store: PostgresStore
) -> None:
    with closing(PostgresStore(url)) as other:
        first, second = submit_each(other, "ab")
        assert ids(claim(other)) == [first.id]
        third = submit(other, "c")

        found = claim(store)

    assert ids(found) == [second.id]
    assert ids(claim(store)) == [third.id]


def test_a_document_that_was_given_back_is_found_beside_one_that_arrived(
    store: PostgresStore,
) -> None:
    first = submit(store)
    given_back = claim_one(store)
    store.finish([Released(given_back.fence)])
    second = submit(store, "bolt")

    assert ids(claim(store, 2)) == [first.id, second.id]


# ── It leaves the turns as a decision would ──────────────────────────────────────────────────────

_TURNS = """
    SELECT claims, fence, tick, clocks, weights, taken, promoted, boot,
        ARRAY(SELECT v FROM unnest(customers, levels, disturbed) v ORDER BY v)::text
    FROM fairturn.turns ORDER BY version DESC LIMIT 1"""
_FLOWS = """
    SELECT c.name, f.level, f.place, f.tick, f.folded, f.running, f.taken, f.claimed_to,
        f.head_order, f.head_since, f.head_bound, f.held
    FROM fairturn.flows f JOIN fairturn.customers c ON c.number = f.customer ORDER BY 1, 2"""
_DOCUMENTS = """
    SELECT number, state, returned, attempts, fence, claimed_at, lease_until, charged_cost,
        charged_weight, charge, worker
    FROM fairturn.documents ORDER BY number"""
_LEASES = "SELECT fence, until, running, documents FROM fairturn.leases ORDER BY fence"
_RECORDED = "SELECT count(*) FROM fairturn.recorded"


def all_of(url: str) -> list[Any]:
    with psycopg.connect(url) as connection:
        tables = (_TURNS, _FLOWS, _DOCUMENTS, _LEASES, _RECORDED)
        return [connection.execute(table).fetchall() for table in tables]


@pytest.mark.parametrize("mode", [Mode.FAIR, Mode.EQUAL])
@pytest.mark.parametrize("costs", [Costs.EQUAL, Costs.KNOWN])
@pytest.mark.parametrize("seed", range(2))
def test_what_the_server_writes_is_what_would_have_been_decided(
    mode: Mode, costs: Costs, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Look] = []
    look = Engine.look

    def look_and_note(*given: Any) -> Look:
        looks.append(look(*given))
        return looks[-1]

    monkeypatch.setattr(Engine, "look", look_and_note)
    chance, clock = Random(seed), ManualClock(START)
    chosen = Settings(mode=mode, costs=costs, patience_s=PATIENCE_S)
    with Databases() as databases, ExitStack() as stack:
        both = alone, decided = [
            stack.enter_context(closing(PostgresStore(url, settings=chosen, clock=clock, key=1)))
            for url in (databases.new(empty=True), databases.new(empty=True))
        ]
        for store in both:
            store.adjust("heavy", CustomerSettings(weight=7))
            store.adjust("light", CustomerSettings(weight=0.01))
            assert claim(store) == []
        for _ in range(50):
            # Several at once leave flows behind whose time is beyond the clock of their level.
            n = chance.choice([1, 1, 1, 1, 1, 4])
            documents = [
                new(
                    chance.choice(["heavy", "light", "plain"]),
                    cost=chance.choice([None, 0, 7, COST_ONE // 3, 5 * COST_ONE]),
                )
                for _ in range(n)
            ]
            for store in both:
                store.submit(documents)
            clock.advance(chance.choice([0, 0, 0, 1, PATIENCE_S, PATIENCE_S + 1, 1_501]))
            decided._claiming._dry = False  # so that it does not look first
            found, expected = (claim(store, n + 1, lease_us=LEASE_US_MAX) for store in both)
            assert len(found) == n
            assert found == expected
            assert all_of(alone.url) == all_of(decided.url)
            if chance.random() < 0.7:
                for store in both:
                    complete(store, found)
    assert sum(one.found is Found.ONE for one in looks) > 20


def test_clocks_that_have_come_far_are_left_to_a_decision(
    store: PostgresStore, decides_no_more: Callable[[], None]
) -> None:
    with psycopg.connect(store.url) as connection:
        connection.execute("UPDATE fairturn.turns SET clocks[1] = (1::bigint << 60) + 1")
    submit(store)
    decides_no_more()

    with pytest.raises(pytest.fail.Exception, match="decided"):
        claim(store)


# ── What it reads ────────────────────────────────────────────────────────────────────────────────


def test_it_is_found_as_soon_however_much_is_dead(
    url: str, store: PostgresStore, decides_no_more: Callable[[], None]
) -> None:
    decides_no_more()
    with psycopg.connect(url) as old, psycopg.connect(url) as connection:
        old.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        old.execute("SELECT pg_current_xact_id()")  # nothing is removed from now on
        for n in range(200):
            submit(store)
            complete(store, [claim_one(store)])
            if n == 10:
                few = pages_read(connection, store)
        many = pages_read(connection, store)

    assert many < 1.5 * few, (few, many)


def pages_read(connection: psycopg.Connection[Any], store: PostgresStore) -> int:
    """How many pages the claim of a document reads, each as often as it does."""
    submit(store)
    since, late = store._claiming._engine._horizon
    hour = 3_600 * SECOND_US
    alone = (1, True, False, hour, 1, "w", hour, None, 1)
    values = (None, None, "server", since, late, 0, False, *alone)
    cursor = connection.cursor()
    adapt(cursor.adapters)
    rows = cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) {CLAIM_ALONE}", values)
    plan = "\n".join(line for (line,) in rows.fetchall())
    running = cursor.execute("SELECT count(*) FROM fairturn.leases").fetchall()
    assert running == [(1,)], "it was not claimed"
    connection.rollback()
    complete(store, [claim_one(store)])
    return max(int(n) for n in re.findall(r"shared hit=(\d+)", plan))
